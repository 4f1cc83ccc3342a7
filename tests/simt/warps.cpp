// SPDX-License-Identifier: MIT
/*
Warps, barriers and shared memory: what threads of a warp, a block or a cluster do together.

A warp operation (a shuffle, a vote, a reduction, __syncwarp) is one function, simt_warp. Each lane stores its value and its
request, and waits. The last lane of the mask checks that all agree, and computes the result of each. A barrier counts arrivals;
the last thread to arrive sets the others ready. For TSan each barrier has two tags and uses them in turn: a fast thread must
not release the tag that a slow one has not acquired.

The shared memory of a block is its dynamic area, then the static variables in the order in which the kernel first uses them. A
redzone follows each.

Not simulated: lanes in lockstep, the memory's banks, fences (atomics order as acquire-release).
*/
#include "engine.h"

/* ---- warp operations ------------------------------------------------------------------------------------------------- */

static const char *const operation_names[] = {
    "__syncwarp", "__shfl_sync", "__all_sync", "__any_sync", "__ballot_sync", "__match_any_sync", "a warp gather (cub)",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
};

unsigned simt_lane(void) { return simt_me->self->lane; }

static uint64_t reduce_values(const warp *wp, unsigned mask, simt_warp_operation operation) {
    uint32_t r = wp->value[__builtin_ctz(mask)];
    for (unsigned m = mask & (mask - 1); m; m &= m - 1) {
        uint32_t v = wp->value[__builtin_ctz(m)];
        switch (operation) {
        case SIMT_ADD: r += v; break;
        case SIMT_MIN_U32: r = v < r ? v : r; break;
        case SIMT_MAX_U32: r = v > r ? v : r; break;
        case SIMT_MIN_S32: r = (int32_t)v < (int32_t)r ? v : r; break;
        case SIMT_MAX_S32: r = (int32_t)v > (int32_t)r ? v : r; break;
        case SIMT_AND: r &= v; break;
        case SIMT_OR: r |= v; break;
        default: r ^= v; break;
        }
    }
    return r;
}

PLAIN_LOOP static void copy_bytes(void *to, const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((char *)to)[i] = ((const char *)from)[i];
}

/* All lanes of the mask have stored their requests: computes the result of each. Not inlined, here and below: a switch is
   faster to a fiber whose stack takes fewer cache lines. */
__attribute__((noinline)) static void finish_warp(warp *wp, unsigned mask, simt_warp_operation operation) {
    uint64_t result[32], common = 0;
    unsigned nonzero = 0;
    switch (operation) {
    case SIMT_SYNCWARP:
        return;
    case SIMT_SHFL:
        for (unsigned m = mask; m; m &= m - 1) {
            unsigned lane = __builtin_ctz(m), source = wp->argument[lane];
            if (!(mask >> source & 1))
                simt_fail_all(wp->site[lane].file, wp->site[lane].line,
                              "__shfl_sync: lane %u reads lane %u, which is not in the mask 0x%08x", lane, source, mask);
            result[lane] = wp->value[source];
        }
        for (unsigned m = mask; m; m &= m - 1) wp->value[__builtin_ctz(m)] = result[__builtin_ctz(m)];
        return;
    case SIMT_GATHER:
        for (unsigned m = mask; m; m &= m - 1) {
            unsigned lane = __builtin_ctz(m);
            size_t bytes = wp->gather_bytes[lane];
            if (!wp->gather_to[lane]) continue;
            for (unsigned n = mask; n; n &= n - 1) {
                char *to = (char *)wp->gather_to[lane] + __builtin_ctz(n) * bytes;
                copy_bytes(to, (const void *)wp->value[__builtin_ctz(n)], bytes);
            }
        }
        return;
    case SIMT_MATCH_ANY:
        for (unsigned m = mask; m; m &= m - 1) {
            unsigned lane = __builtin_ctz(m), same = 0;
            for (unsigned n = mask; n; n &= n - 1)
                same |= (unsigned)(wp->value[__builtin_ctz(n)] == wp->value[lane]) << __builtin_ctz(n);
            result[lane] = same;
        }
        for (unsigned m = mask; m; m &= m - 1) wp->value[__builtin_ctz(m)] = result[__builtin_ctz(m)];
        return;
    case SIMT_ALL: case SIMT_ANY: case SIMT_BALLOT:
        for (unsigned m = mask; m; m &= m - 1) nonzero |= (unsigned)(wp->value[__builtin_ctz(m)] != 0) << __builtin_ctz(m);
        common = operation == SIMT_ALL ? nonzero == mask : operation == SIMT_ANY ? nonzero != 0 : nonzero;
        break;
    default:
        common = reduce_values(wp, mask, operation);
    }
    for (unsigned m = mask; m; m &= m - 1) wp->value[__builtin_ctz(m)] = common;
}

/* All lanes of the mask wait. True if for one another, false while one still waits for another mask. */
__attribute__((noinline)) static bool lanes_agree(const warp *wp, unsigned mask, unsigned lane) {
    for (unsigned m = mask; m; m &= m - 1)
        if (wp->mask[__builtin_ctz(m)] != mask) return false;
    const wait_site *mine = &wp->site[lane];
    for (unsigned m = mask; m; m &= m - 1) {
        const wait_site *other = &wp->site[__builtin_ctz(m)];
        const bool same_operation = wp->operation[__builtin_ctz(m)] == wp->operation[lane];
        if (other->line != mine->line || !same_operation || !same_file(other->file, mine->file))
            simt_fail_all(mine->file, mine->line,
                          "divergent warp operations: lane %u is in %s, lane %u in %s, %s:%d, mask 0x%08x", lane, mine->what,
                          __builtin_ctz(m), other->what, base_name(other->file), other->line, mask);
    }
    return true;
}

#if defined(SIMT_TSAN)
static char *warp_tag(warp *wp, unsigned mask, sync_tag **which) {
    sync_tag *t = wp->tags;
    while (t < wp->tags + MAX_TAGS - 1 && t->mask && t->mask != mask) t++;
    if (t->mask != mask) *t = {mask, 0, {0, 0}};
    *which = t;
    return &t->at[t->generation & 1];
}
#endif

__attribute__((noinline, cold)) static void bad_mask(const fiber *f, const char *what, unsigned mask, const char *file,
                                                     int line) {
    const warp *wp = f->warp;
    if (!(mask >> f->lane & 1))
        simt_fail(file, line, "%s: lane %u is not in the mask 0x%08x that it passes", what, f->lane, mask);
    if (mask & ~wp->exist)
        simt_fail_all(file, line, "%s: the mask 0x%08x names lane %u, which does not exist", what, mask,
                      __builtin_ctz(mask & ~wp->exist));
    simt_fail_all(file, line, "%s: the mask 0x%08x names lane %u, which has exited", what, mask,
                  __builtin_ctz(mask & wp->exited));
}

uint64_t simt_warp(simt_warp_operation operation, unsigned mask, uint64_t value, unsigned argument, const char *file, int line) {
    fiber *f = simt_me->self;
    warp *wp = f->warp;
    unsigned lane = f->lane, bit = 1u << lane;
    const char *what = operation_names[operation];
    if (__builtin_expect(!(mask & bit) || (mask & (wp->exited | ~wp->exist)), 0)) bad_mask(f, what, mask, file, line);
    wp->value[lane] = value;
    wp->mask[lane] = mask;
    wp->argument[lane] = argument;
    wp->operation[lane] = operation;
    wp->site[lane] = {what, file, line};
    wp->waiting |= bit;
#if defined(SIMT_TSAN)
    sync_tag *entry = NULL;
    char *tag = operation == SIMT_SYNCWARP ? warp_tag(wp, mask, &entry) : NULL;
    if (tag) release(tag);
#endif
    if ((wp->waiting & mask) == mask && lanes_agree(wp, mask, lane)) {
        finish_warp(wp, mask, operation);
        wp->waiting &= ~mask;
        set_ready(f->block->group, wp, mask);
        simt_me->progress++;
#if defined(SIMT_TSAN)
        if (tag) entry->generation++;
#endif
        simt_reschedule();
    } else {
        simt_block_fiber(f, IN_WARP);
    }
#if defined(SIMT_TSAN)
    if (tag) acquire(tag);
#endif
    return wp->value[lane];
}

void simt_warp_gather(unsigned mask, const void *mine, void *all, size_t bytes, const char *file, int line) {
    warp *wp = simt_me->self->warp;
    wp->gather_to[simt_lane()] = all;
    wp->gather_bytes[simt_lane()] = bytes;
    simt_warp(SIMT_GATHER, mask, (uint64_t)mine, 0, file, line);
}

/* ---- block, named and cluster barriers ------------------------------------------------------------------------------- */

int simt_block_barrier(int predicate, const char *file, int line) {
    fiber *f = simt_me->self;
    block *blk = f->block;
    group *g = blk->group;
    char *tag = &blk->tag[blk->barriers & 1];
    note_site(f, "__syncthreads", file, line);
    if (blk->exited) simt_fail_all(file, line, "__syncthreads: %u threads of the block have exited", blk->exited);
    if (!blk->arrived) blk->barrier_site = {"__syncthreads", file, line};
    else if (blk->barrier_site.line != line || !same_file(blk->barrier_site.file, file))
        simt_fail_all(file, line,
                      "divergent barriers: thread %u is in __syncthreads here, %u threads of its block in the one at %s:%d",
                      f->index, blk->arrived, base_name(blk->barrier_site.file), blk->barrier_site.line);
    release(tag);
    blk->predicate_count += predicate != 0;
    if (++blk->arrived == blk->threads) {
        blk->result = blk->predicate_count;
        blk->arrived = blk->predicate_count = 0;
        blk->barriers++;
        simt_me->progress++;
        unsigned warps = (blk->threads + 31) / 32;
        for (warp *wp = f->warp - f->index / 32; warps--; wp++) set_ready(g, wp, wp->exist);
        // The order begins again at the block's first thread, or at its last.
        if (simt_schedule == FORWARD) g->current_warp = f->warp->index - f->index / 32;
        if (simt_schedule == REVERSE) g->current_warp = f->warp->index - f->index / 32 + (blk->threads - 1) / 32;
        simt_reschedule();
    } else {
        simt_block_fiber(f, IN_BLOCK);
    }
    acquire(tag);
    return blk->result;
}

/* Whether some lanes of the warp have arrived at the named barrier and others have not; last: the thread that arrives now. */
static bool split_warp(const warp *wp, const fiber *last, int barrier) {
    unsigned there = 0;
    for (unsigned m = wp->exist; m; m &= m - 1) {
        const fiber *f = &wp->lanes[__builtin_ctz(m)];
        if (f == last || (f->state == IN_NAMED && f->named == barrier)) there |= m & -m;
    }
    return there && there != wp->exist;
}

void simt_named_barrier(int barrier, int threads, const char *file, int line) {
    const char *what = "bar.sync";
    fiber *f = simt_me->self;
    block *blk = f->block;
    maybe_switch();
    note_site(f, what, file, line);
    if (barrier < 1 || barrier >= NAMED_BARRIERS) simt_fail(file, line, "%s: barrier %d, not 1 to 15", what, barrier);
    if (threads < 32 || threads % 32 || (unsigned)threads > round_up(blk->threads, 32))
        simt_fail(file, line, "%s: %d threads, in a block of %u: not whole warps of it", what, threads, blk->threads);
    named_barrier *n = &blk->named[barrier];
    char *tag = &n->tag[n->generation & 1];
    if (n->arrived && n->threads != (unsigned)threads)
        simt_fail_all(file, line, "%s: thread %u waits for %d threads at barrier %d, those at %s:%d for %u", what, f->index,
                      threads, barrier, base_name(n->site.file), n->site.line, n->threads);
    if (!n->arrived) n->site = {what, file, line};
    n->threads = threads;
    release(tag);
    if (++n->arrived < n->threads) {
        f->named = barrier;
        simt_block_fiber(f, IN_NAMED);
        acquire(tag);
        return;
    }
    warp *first = f->warp - f->index / 32;
    for (unsigned i = 0; i < (blk->threads + 31) / 32; i++) {
        unsigned woken = 0;
        if (split_warp(&first[i], f, barrier))
            simt_fail_all(file, line, "%s: %d threads have come to barrier %d, but of warp %u not all", what, threads, barrier,
                          i);
        for (unsigned m = first[i].exist & ~first[i].ready; m; m &= m - 1) {
            const fiber *other = &first[i].lanes[__builtin_ctz(m)];
            if (other->state == IN_NAMED && other->named == barrier) woken |= m & -m;
        }
        if (woken) set_ready(blk->group, &first[i], woken);
    }
    n->arrived = 0;
    n->generation++;
    simt_me->progress++;
    simt_reschedule();
    acquire(tag);
}

unsigned simt_barriers_passed(void) { return simt_me->self->block->barriers + simt_me->self->cluster_waits; }

unsigned simt_cluster_ctarank(void) { return simt_me->self->block->rank; }
unsigned simt_cluster_nctarank(void) { return simt_me->group->block_count; }

static void cluster_arrive(bool publish, const char *file, int line) {
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    if (f->cluster_arrivals != f->cluster_waits) simt_fail(file, line, "a second cluster arrive without a wait between");
    unsigned missing = g->block_count * f->block->threads - g->live - g->cluster_left;
    if (missing) simt_fail_all(file, line, "cluster barrier: %u threads of the cluster have exited before it", missing);
    if (!g->cluster_arrived) g->cluster_site = {"a cluster barrier", file, line};
    if (publish || f->inits_fenced) release(&g->cluster_tag[g->cluster_phase & 1]);
    f->inits_fenced = 0;
    f->cluster_arrivals++;
    if (++g->cluster_arrived < g->live + g->cluster_left) return;
    g->cluster_arrived = g->cluster_left = 0;
    g->cluster_phase++;
    simt_me->progress++;
    for (unsigned i = 0; i < g->warp_count; i++) {
        warp *wp = &g->warps[i];
        unsigned woken = 0;
        for (unsigned m = wp->exist & ~wp->ready; m; m &= m - 1)
            if (wp->lanes[__builtin_ctz(m)].state == IN_CLUSTER) woken |= m & -m;
        if (woken) set_ready(g, wp, woken);
    }
}

void simt_cluster_arrive(const char *file, int line) { cluster_arrive(true, file, line); }
void simt_cluster_arrive_relaxed(const char *file, int line) { cluster_arrive(false, file, line); }

void simt_cluster_wait(const char *file, int line) {
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    if (f->cluster_arrivals == f->cluster_waits) simt_fail(file, line, "a cluster wait without an arrive before it");
    note_site(f, "a cluster barrier", file, line);
    char *tag = &g->cluster_tag[f->cluster_waits & 1];
    if (g->cluster_phase < f->cluster_arrivals) simt_block_fiber(f, IN_CLUSTER);
    else simt_reschedule();
    acquire(tag);
    f->cluster_waits++;
    if (f->block->cluster_waited < f->cluster_waits) f->block->cluster_waited = f->cluster_waits;
}

/* ---- shared memory --------------------------------------------------------------------------------------------------- */

const char *simt_find_variable(const group *g, const void *at, size_t *offset, size_t *room) {
    size_t place = (const char *)at - g->memory, dynamic = simt_me->launch->shape->dynamic_bytes;
    if (place >= g->memory_stride * g->block_count) return NULL;
    place %= g->memory_stride;
    if (place < dynamic) {
        *offset = place;
        *room = dynamic - place;
        return "the dynamic shared memory";
    }
    for (const shared_slot &s : g->shared) {
        if (place < s.offset || place >= s.offset + s.variable->bytes) continue;
        *offset = place - s.offset;
        *room = s.variable->bytes - *offset;
        return s.variable->name;
    }
    return NULL;
}

void *simt_shared(const simt_variable *v) {
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    for (const shared_slot &s : g->shared)
        if (s.variable == v) return f->block->memory + s.offset;
    launch *l = simt_me->launch;
    size_t base = dynamic_area(l), alignment = v->alignment > 16 ? v->alignment : 16;
    size_t offset = round_up(base + g->static_used, alignment);
    size_t end = round_up(offset + v->bytes, 16) + REDZONE, dynamic = l->shape->dynamic_bytes;
    g->static_bytes = round_up(g->static_bytes, v->alignment) + v->bytes;
    if (g->static_bytes > STATIC_BYTES || end > g->memory_stride)
        simt_fail(v->file, v->line, "static shared memory: %s brings it to %zu bytes, more than 48 KiB", v->name,
                  g->static_bytes);
    if (g->static_bytes + dynamic > l->shape->most_bytes)
        simt_fail(v->file, v->line, "shared memory: %zu bytes static with %s, %zu dynamic, together more than %zu",
                  g->static_bytes, v->name, dynamic, l->shape->most_bytes);
    // The same offset in every block of the cluster: a block that has not got this far has the variable too.
    for (unsigned b = 0; b < g->block_count; b++) {
        char *p = g->blocks[b].memory + offset;
        simt_fill(p, simt_poison_byte(), v->bytes);
        simt_fill(p + v->bytes, REDZONE_BYTE, end - offset - v->bytes);
        if (g->blocks[b].exited < g->blocks[b].threads) show(p, v->bytes);
    }
    g->static_used = end - base;
    g->shared.push_back({v, offset});
    return f->block->memory + offset;
}

void *simt_dynamic_shared(size_t bytes, const char *file, int line) {
    if (bytes > simt_me->launch->shape->dynamic_bytes)
        simt_fail(file, line, "the kernel's dynamic shared memory takes %zu bytes, the launch gives %zu", bytes,
                  simt_me->launch->shape->dynamic_bytes);
    return simt_me->self->block->memory;
}

/* The offset of `smem` in this block's shared memory; checks both arguments. */
static size_t cluster_offset(const void *smem, unsigned rank, const char *file, int line) {
    const group *g = simt_me->group;
    const size_t offset = (const char *)smem - simt_me->self->block->memory;
    if (rank >= g->block_count) simt_fail(file, line, "there is no rank %u in a cluster of %u blocks", rank, g->block_count);
    if (offset >= g->memory_stride) simt_fail(file, line, "%p is not in this block's shared memory", smem);
    return offset;
}

void *simt_cluster_map(const void *smem, unsigned rank, const char *file, int line) {
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    const size_t offset = cluster_offset(smem, rank, file, line);
    block *peer = &g->blocks[rank];
    if (peer == f->block) return (void *)smem;
    if (!f->cluster_waits)
        simt_fail_all(file, line,
                      "shared memory of rank %u used before the first cluster barrier: that block may not have started", rank);
    if (peer->exited == peer->threads)
        simt_fail_all(file, line, "a peer block gone: rank %u has exited, its shared memory with it", rank);
    unsigned *mapped_after = &peer->mapped_after[f->block->rank];
    if (*mapped_after < f->cluster_arrivals + 1) *mapped_after = f->cluster_arrivals + 1;
    return peer->memory + offset;
}

unsigned simt_cluster_address(const void *smem, unsigned rank, const char *file, int line) {
    const size_t offset = cluster_offset(smem, rank, file, line);
    return (unsigned)(rank * simt_me->group->memory_stride + offset);
}

char *simt_cluster_pointer(unsigned address, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    if (address >= g->memory_stride * g->block_count)
        simt_fail(file, line, "%s: 0x%x is not in the cluster's shared memory", what, address);
    char *at = g->memory + address;
    if (block_of(g, at) != simt_me->self->block && !simt_me->self->cluster_waits)
        simt_fail_all(file, line,
                      "%s: shared memory of rank %u used before the first cluster barrier: that block may not have started",
                      what, block_of(g, at)->rank);
    return at;
}

char *simt_matrix_row(void *row, const char *file, int line) {
    const char *what = "stmatrix";
    group *g = simt_me->group;
    size_t offset, room;
    if ((uintptr_t)row % 16) simt_fail(file, line, "%s: the row's address %p is not a multiple of 16", what, row);
    if (!simt_find_variable(g, row, &offset, &room) || block_of(g, row) != simt_me->self->block || room < 16)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, row);
    return (char *)row;
}
