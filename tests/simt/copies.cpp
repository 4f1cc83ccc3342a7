// SPDX-License-Identifier: MIT
/*
mbarriers and asynchronous copies: cp.async, bulk copies, st.async, and what tensor copies share with them.

An mbarrier counts arrivals and bytes, and a wait parks its thread until the phase ends.

A load or st.async is a *flight* until it lands. Meanwhile its destination is poison: a thread that reads too early sees NaN. A
bulk store stays in the table of stores until its thread has waited for it, whether it has landed or not. A cp.async belongs to
its thread alone, and lands in the wait.

Lazy copies land when nothing else of the group can run, oldest first; stores and cp.async land in their wait. Eager copies land
where they are issued. Random copies land now and then, in simt_reschedule.

For TSan a copy is a thread of its own. It begins where the copy is issued, and ends at the end of the mbarrier's phase or at
the wait for the bulk group. A second one, which only proxy fences and landings order, reads what bulk stores read. For cp.async
the issuing thread itself reads and writes, at the issue and at the wait.

Not simulated: L2 policies, fences between a thread's access and a later copy over it, the order of two cp.async to one address.
*/
#include "engine.h"

#include <stdio.h>

/* ---- mbarriers ------------------------------------------------------------------------------------------------------- */

static const uint64_t BARRIER_MAGIC = 0x6d62617272000000u;      // the low 24 bits: the index in the group's table

mbarrier *simt_find_barrier(const uint64_t *at, const block *blk, const char *what, const char *file, int line, void *pc) {
    group *g = simt_me->group;
    size_t offset, room;
    if (!simt_find_variable(g, at, &offset, &room) || room < 8 || (blk && block_of(g, at) != blk))
        simt_fail(file, line, "%s: %p is not in %s shared memory", what, (const void *)at,
                  blk ? "this block's" : "the cluster's");
    if ((uintptr_t)at % 8) simt_fail(file, line, "%s: %s is not aligned to 8 bytes", what, simt_place_name(g, at));
    if (block_of(g, at)->exited == block_of(g, at)->threads)
        simt_fail_all(file, line, "%s: a peer block gone: rank %u has exited, its mbarrier %s with it", what,
                      block_of(g, at)->rank, simt_place_name(g, at));
    touch(at, 8, false, pc);
    size_t index = *at ^ BARRIER_MAGIC;
    if (index >= g->barrier_count || g->barriers[index].at != at)
        simt_fail_all(file, line, "%s: %s is not an initialised mbarrier", what, simt_place_name(g, at));
    return &g->barriers[index];
}

static void set_integers(int *at, int value, size_t count) __attribute__((noinline));
PLAIN_LOOP static void set_integers(int *at, int value, size_t count) {
    for (size_t i = 0; i < count; i++) at[i] = value;
}

static int *last_waited(group *g, const mbarrier *bar, unsigned thread) {
    return g->last_waited + (bar - g->barriers) * bar->block->threads + thread;
}

void simt_mbarrier_init(uint64_t *at, unsigned count, const char *file, int line) {
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    const char *what = "mbarrier.init";
    size_t offset, room;
    if (!simt_find_variable(g, at, &offset, &room) || room < 8 || block_of(g, at) != f->block)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, (void *)at);
    if ((uintptr_t)at % 8) simt_fail(file, line, "%s: %s is not aligned to 8 bytes", what, simt_place_name(g, at));
    if (!count || count > MAX_ARRIVALS) simt_fail(file, line, "%s: a count of %u, not 1 to 2^20 - 1", what, count);
    size_t index = *at ^ BARRIER_MAGIC;
    if (index < g->barrier_count && g->barriers[index].at == at)
        simt_fail_all(file, line, "%s: %s is in use, initialised at %s:%d", what, simt_place_name(g, at),
                      base_name(g->barriers[index].born.file), g->barriers[index].born.line);
    for (index = 0; index < g->barrier_count && g->barriers[index].at != at; index++);
    if (index == MAX_BARRIERS * g->block_count) simt_fail(file, line, "%s: more than %u mbarriers a block", what, MAX_BARRIERS);
    if (index == g->barrier_count) g->barrier_count++;
    mbarrier *bar = &g->barriers[index];
    *bar = mbarrier();
    bar->at = at;
    bar->block = f->block;
    bar->count = bar->pending = count;
    bar->initialiser = f->index;
    bar->landed_in = bar->waited_for = -1;
    bar->born = {what, file, line};
    set_integers(last_waited(g, bar, 0), -2, f->block->threads);
    // For TSan an init writes and all other operations read: they may run together, but not with this.
    touch(at, 8, true, __builtin_return_address(0));
    *at = BARRIER_MAGIC | index;
}

static void publish_barriers(const fiber *f) {
    group *g = f->block->group;
    for (unsigned i = 0; i < g->barrier_count; i++)
        if (g->barriers[i].block == f->block && g->barriers[i].initialiser == f->index) g->barriers[i].fenced = 1;
}
void simt_fence_mbarrier_init(void) {
    publish_barriers(simt_me->self);
    simt_me->self->inits_fenced = 1;
}

void simt_check_fenced(const mbarrier *bar, const char *what, const char *file, int line) {
    if (bar->fenced) return;
    simt_fail_all(file, line, "%s: no fence.mbarrier_init follows the init of mbarrier %s at %s:%d", what,
                  simt_place_name(simt_me->group, bar->at), base_name(bar->born.file), bar->born.line);
}

/* After each change: ends the phase if nothing is missing, and wakes the threads that wait for it. */
static void settle(mbarrier *bar, const char *what, const char *file, int line) {
    group *g = bar->block->group;
    if (bar->bytes > MAX_ARRIVALS || bar->bytes < -MAX_ARRIVALS) {
        simt_fail_all(file, line, "%s: the byte count of mbarrier %s leaves its range: %d", what, simt_place_name(g, bar->at),
                      bar->bytes);
        return;
    }
    if (bar->pending || bar->bytes) return;
    if (bar->in_flight) {
        simt_fail_all(file, line,
                      "%s: phase %u of mbarrier %s ends while %zu bytes are on their way to it: fewer announced than copied",
                      what, bar->phase, simt_place_name(g, bar->at), bar->in_flight);
        return;
    }
    if (bar->waking) {
        simt_fail_all(file, line,
                      "%s: phase %u of mbarrier %s ends before %u threads that wait for phase %u could see its end: one parity "
                      "later they wait for ever", what, bar->phase, simt_place_name(g, bar->at), bar->waking, bar->phase - 1);
        return;
    }
    bar->phase++;
    bar->pending = bar->count;
    bar->from_peers[bar->phase & 1] = 0;
    simt_me->progress++;
    if (!bar->parked) return;
    bar->waking = bar->parked;
    bar->parked = 0;
    fiber *all = &g->fibers[bar->block->rank * (size_t)bar->block->threads];
    for (unsigned i = 0; i < bar->block->threads; i++)
        if (all[i].state == IN_MBARRIER && all[i].waits_for == bar) set_ready(g, all[i].warp, 1u << all[i].lane);
}

/* A thread that waited for "the phase before the first" has read what no copy had brought. */
void simt_mark_bytes(mbarrier *bar) {
    bar->counts_bytes = 1;
    if (bar->passed.file)
        simt_fail_all(bar->passed.file, bar->passed.line,
                      "wrong parity: the wait for parity 1 returned at once, before the first phase of mbarrier %s, which "
                      "counts bytes", simt_place_name(simt_me->group, bar->at));
}

static void arrive(mbarrier *bar, unsigned bytes, unsigned arrivals, const char *what, const char *file, int line) {
    if (bytes) simt_mark_bytes(bar);
    if (bytes > MAX_ARRIVALS) simt_fail(file, line, "%s: %u bytes, more than 2^20 - 1", what, bytes);
    bar->bytes += (int)bytes;
    if (arrivals && !bar->pending)
        simt_fail_all(file, line, "%s: an arrival too many at %s", what, simt_barrier_text(simt_me->group, bar));
    bar->pending -= arrivals;
    if (arrivals) release(&bar->tag[bar->phase & 1]);
    settle(bar, what, file, line);
}

void simt_mbarrier_arrive(uint64_t *at, unsigned arrivals, unsigned bytes, const char *file, int line) {
    const char *what = !arrivals ? "mbarrier.expect_tx" : bytes ? "mbarrier.arrive.expect_tx" : "mbarrier.arrive";
    maybe_switch();
    mbarrier *bar = simt_find_barrier(at, simt_me->self->block, what, file, line, __builtin_return_address(0));
    arrive(bar, bytes, arrivals, what, file, line);
}

void simt_mbarrier_arrive_remote(unsigned address, const char *file, int line) {
    const char *what = "mbarrier.arrive.shared::cluster";
    maybe_switch();
    mbarrier *bar = simt_find_barrier((uint64_t *)simt_cluster_pointer(address, what, file, line), NULL, what, file, line,
                                 __builtin_return_address(0));
    simt_check_fenced(bar, what, file, line);
    if (bar->block != simt_me->self->block) bar->from_peers[bar->phase & 1] = 1;
    arrive(bar, 0, 1, what, file, line);
}

/* The wait for `phase` is over. */
static void pass(mbarrier *bar, int phase, int cluster_scope, const char *what, const char *file, int line) {
    if (phase < 0) {
        if (!bar->passed.file) bar->passed = {what, file, line};
        if (bar->counts_bytes) simt_mark_bytes(bar);
        return;
    }
    if (bar->waited_for < phase) bar->waited_for = phase;
    if (!cluster_scope && bar->from_peers[phase & 1])
        simt_fail_all(file, line, "%s: peers arrived at mbarrier %s or stored to it in phase %d: the wait needs cluster scope",
                      what, simt_place_name(simt_me->group, bar->at), phase);
    acquire(&bar->tag[phase & 1]);
}

static void check_parity(unsigned parity, const char *what, const char *file, int line) {
    if (parity > 1) simt_fail(file, line, "%s: a parity of %u, not 0 or 1", what, parity);
}

bool simt_mbarrier_try_wait(uint64_t *at, unsigned parity, int cluster_scope, const char *file, int line) {
    const char *what = "mbarrier.try_wait.parity";
    check_parity(parity, what, file, line);
    mbarrier *bar = simt_find_barrier(at, simt_me->self->block, what, file, line, __builtin_return_address(0));
    if ((bar->phase & 1) == parity) simt_yield(file, line);
    if ((bar->phase & 1) == parity) return false;
    pass(bar, (int)bar->phase - 1, cluster_scope, what, file, line);
    return true;
}

void simt_mbarrier_wait(uint64_t *at, unsigned parity, int cluster_scope, const char *file, int line) {
    const char *what = "mbarrier.try_wait.parity";
    fiber *f = simt_me->self;
    check_parity(parity, what, file, line);
    maybe_switch();
    mbarrier *bar = simt_find_barrier(at, f->block, what, file, line, __builtin_return_address(0));
    int phase = (int)bar->phase - 1, *last = last_waited(simt_me->group, bar, f->index);
    if ((bar->phase & 1) == parity) {
        phase = f->waits_phase = bar->phase;
        f->waits_for = bar;
        bar->parked++;
        note_site(f, what, file, line);
        simt_block_fiber(f, IN_MBARRIER);
        bar->waking--;
        f->waits_for = NULL;
    } else if (*last == phase) {
        simt_fail_all(file, line,
                      "wrong parity: the wait for parity %u returned at once, for phase %d of mbarrier %s, which this thread "
                      "has waited for before", parity, phase, simt_place_name(simt_me->group, at));
    }
    *last = phase;
    pass(bar, phase, cluster_scope, what, file, line);
}

/* ---- asynchronous copies --------------------------------------------------------------------------------------------- */

#if defined(SIMT_TSAN)
/* The running fiber goes on as a copier, ordered after the releases of `issue`. */
void simt_become_copier(copier who, char *issue) {
    block *blk = simt_me->self->block;
    void **t = &blk->copiers[who][who == FENCED_READER ? 0 : blk->copier_turn++ % COPIERS];
    __tsan_switch_to_fiber(*t, 1);
    acquire(who == FENCED_READER ? &blk->fence_tag : issue);
}
void simt_end_copier(char *done) {
    release(done);
    release(&simt_me->launch->end_tag);
    __tsan_switch_to_fiber(simt_me->self->tsan, 1);
}
void simt_copier_access(copier who, const void *read, const void *write, size_t bytes, char *done, void *pc) {
    if (who != FENCED_READER) release(&simt_me->self->issue_tag);
    simt_become_copier(who, &simt_me->self->issue_tag);
    if (read) touch(read, bytes, false, pc);
    if (write) touch(write, bytes, true, pc);
    if (who == LOADER && write) release(&block_of(simt_me->group, write)->fence_tag);
    simt_end_copier(done);
}
#else
void simt_copier_access(copier, const void *, const void *, size_t, char *, void *) {}
#endif

PLAIN_LOOP static void copy_words(void *to, const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes / 8; i++) ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
}

uint64_t simt_hash(const void *at, size_t bytes) {
    const uint64_t *word = (const uint64_t *)at, odd = 0x9e3779b97f4a7c15u;
    uint64_t h[4] = {bytes, 1, 2, 3};                   // four at a time: a multiplication takes a few cycles
    size_t i = 0;
    for (; i + 4 <= bytes / 8; i += 4)
        for (unsigned n = 0; n < 4; n++) h[n] = (h[n] ^ word[i + n]) * odd, h[n] ^= h[n] >> 29;
    for (; i < bytes / 8; i++) h[0] = (h[0] ^ word[i]) * odd, h[0] ^= h[0] >> 29;
    for (unsigned n = 1; n < 4; n++) h[0] = (h[0] ^ h[n]) * odd, h[0] ^= h[0] >> 29;
    return h[0];
}

void simt_forget_notes(block *blk, const char *at, size_t bytes) {
    for (unsigned i = 0; i < blk->note_count;) {
        range_note *n = &blk->notes[i];
        if (overlap(at, bytes, n->from, n->to - n->from)) *n = blk->notes[--blk->note_count];
        else i++;
    }
}
void simt_take_note(block *blk, const char *at, size_t bytes) {
    simt_forget_notes(blk, at, bytes);
    if (blk->note_count == MAX_NOTES) blk->notes_lost = 1;
    else blk->notes[blk->note_count++] = {at, at + bytes, simt_hash(at, bytes), blk->fences};
}

written simt_written_since(const block *blk, const char *at, size_t bytes) {
    const char *end = at + bytes;
    unsigned since = 0, written = 0;
    while (at < end) {
        const range_note *here = NULL;
        const char *next = end;
        for (unsigned i = 0; i < blk->note_count; i++) {
            const range_note *n = &blk->notes[i];
            if (n->from <= at && at < n->to) here = n;
            else if (n->from > at && n->from < next) next = n->from;
        }
        if (!here) {
            written |= !blk->notes_lost;
        } else if (simt_hash(here->from, here->to - here->from) != here->hash) {
            written = 1;
            if (since < here->fences) since = here->fences;
        }
        at = here ? here->to : next;
    }
    return !written ? UNWRITTEN : blk->fences == since ? UNFENCED : FENCED;
}

void simt_check_global(const void *at, size_t bytes, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    if (in_shared(g, at))
        simt_fail(file, line, "%s: %p is not in global memory", what, at);
    const void *bad = first_hidden(at, bytes);
    if (bad)
        simt_fail(file, line, "%s: %u bytes at %p leave their allocation at byte %zu", what, (unsigned)bytes, at,
                  (size_t)((const char *)bad - (const char *)at));
#if !defined(SIMT_TSAN)                                         // its lock would order the threads that ask
    if (!simt_range_fits(at, bytes))
        simt_fail(file, line, "%s: %u bytes at %p leave their allocation", what, (unsigned)bytes, at);
#endif
}

static void check_bulk(const void *shared, const void *global, unsigned bytes, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    size_t offset, room;
    if ((uintptr_t)shared % 16) simt_fail(file, line, "%s: the shared address %p is not a multiple of 16", what, shared);
    if ((uintptr_t)global % 16) simt_fail(file, line, "%s: the global address %p is not a multiple of 16", what, global);
    if (!bytes || bytes % 16) simt_fail(file, line, "%s: a size of %u bytes, not a multiple of 16", what, bytes);
    const char *name = simt_find_variable(g, shared, &offset, &room);
    if (!name || block_of(g, shared) != simt_me->self->block)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, shared);
    if (bytes > room)
        simt_fail(file, line, "%s: %u bytes from byte %zu of %s, which ends after %zu", what, bytes, offset, name, room);
    simt_check_global(global, bytes, what, file, line);
}

void simt_check_destination(const char *to, size_t bytes, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    for (unsigned i = 0; i < g->flight_count; i++) {
        const flight *x = &g->flights[(g->first_flight + i) % MAX_COPIES];
        if (overlap(to, bytes, x->to, x->bytes))
            simt_fail_all(file, line, "%s: %s is still being filled by the copy issued at %s:%d", what, simt_place_name(g, to),
                          base_name(x->site.file), x->site.line);
    }
    for (unsigned i = 0; i < g->store_count; i++) {
        const store *x = &g->stores[i];
        if (overlap(to, bytes, x->from, x->bytes))
            simt_fail_all(file, line, "%s: %s is the source of the bulk store issued at %s:%d, which has not been waited for",
                          what, simt_place_name(g, to), base_name(x->site.file), x->site.line);
    }
    simt_check_operands(to, bytes, what, file, line);
}

void simt_check_landed(const char *from, size_t bytes, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    for (unsigned i = 0; i < g->flight_count; i++) {
        const flight *x = &g->flights[(g->first_flight + i) % MAX_COPIES];
        if (overlap(from, bytes, x->to, x->bytes))
            simt_fail_all(file, line, "%s: %s is still being filled by the copy issued at %s:%d", what,
                          simt_place_name(g, x->to > from ? x->to : from), base_name(x->site.file), x->site.line);
    }
}

static void land(flight x) {
    block *blk = block_of(simt_me->group, x.to);
    if (x.box.element) {
        simt_move_box(&x.box, x.to, BOX_IN);
        simt_take_note(blk, x.to, x.bytes);
    } else if (x.from) {
        copy_words(x.to, x.from, x.bytes);
        simt_take_note(blk, x.to, x.bytes);
    } else {
        simt_forget_notes(blk, x.to, x.bytes);
        *(uint64_t *)x.to = x.value;
    }
    x.bar->in_flight -= x.bytes;
    x.bar->bytes -= (int)x.bytes;
    x.bar->landed_in = (int)x.bar->phase;
    if (x.peer) x.bar->from_peers[x.bar->phase & 1] = 1;
    settle(x.bar, x.site.what, x.site.file, x.site.line);
}

static void land_flight(group *g, unsigned i) {
    flight *first = &g->flights[g->first_flight], x = g->flights[(g->first_flight + i) % MAX_COPIES];
    g->flights[(g->first_flight + i) % MAX_COPIES] = *first;
    g->first_flight = (g->first_flight + 1) % MAX_COPIES;
    g->flight_count--;
    land(x);
}

static void land_store(store *x) {
    if (x->landed) return;
    if (x->box.element) simt_move_box(&x->box, (char *)x->from, x->add ? BOX_ADD : BOX_OUT);
    else copy_words(x->to, x->from, x->bytes);
    x->landed = 1;
}

/* 4, 8 or 16 aligned bytes. There are millions of these copies, so no loop. */
static void copy_few(char *to, const char *from, unsigned bytes) {
    if (bytes == 4) {
        *(uint32_t *)to = *(const uint32_t *)from;
        return;
    }
    *(uint64_t *)to = *(const uint64_t *)from;
    if (bytes == 16) ((uint64_t *)to)[1] = ((const uint64_t *)from)[1];
}

static void land_own(own_copy *x) {
    if (x->landed) return;
    copy_few(x->to, x->from, x->bytes);
    x->landed = 1;
}

void simt_land_one(worker *w, group *g) {
    land_flight(g, simt_copies == RANDOM_COPIES ? random_number(&w->copy_random) % g->flight_count : 0);
}

void simt_land_at_random(worker *w, group *g) {
    uint64_t r = random_number(&w->copy_random);
    if (r & 3) return;
    if (g->products_parked && (r >>= 2, r & 1) && simt_finish_products(w, g)) return;
    const unsigned shared = g->flight_count + g->store_count;
    if (shared + w->self->own_count == 0) return;
    r = (r >> 2) % (shared + w->self->own_count);
    if (r < g->flight_count) land_flight(g, r);
    else if (r < shared) land_store(&g->stores[r - g->flight_count]);
    else land_own(&w->self->own_copies[r - shared]);
}

void simt_launch_flight(const flight *x) {
    group *g = simt_me->group;
    if (simt_copies != EAGER) simt_fill(x->to, simt_poison_byte(), x->bytes);
    x->bar->in_flight += x->bytes;
    if (simt_copies == EAGER) {
        land(*x);
        return;
    }
    if (g->flight_count == MAX_COPIES) land_flight(g, 0);
    g->flights[(g->first_flight + g->flight_count++) % MAX_COPIES] = *x;
}

/* ---- bulk copies and st.async ---------------------------------------------------------------------------------------- */

void simt_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *at, const char *file, int line) {
    const char *what = "cp.async.bulk.shared::cluster.global";
    fiber *f = simt_me->self;
    maybe_switch();
    check_bulk(shared, global, bytes, what, file, line);
    mbarrier *bar = simt_find_barrier(at, f->block, what, file, line, __builtin_return_address(0));
    simt_check_fenced(bar, what, file, line);
    simt_mark_bytes(bar);
    simt_check_destination((char *)shared, bytes, what, file, line);
    simt_forget_notes(f->block, (char *)shared, bytes);
    simt_copier_access(LOADER, global, shared, bytes, &bar->tag[bar->phase & 1], __builtin_return_address(0));
    flight x = {(char *)shared, (const char *)global, 0, bytes, 0, bar, {what, file, line}, {}};
    simt_launch_flight(&x);
}

void simt_st_async(unsigned to_address, uint64_t value, unsigned bar_address, const char *file, int line) {
    const char *what = "st.async";
    group *g = simt_me->group;
    size_t offset, room;
    maybe_switch();
    char *to = simt_cluster_pointer(to_address, what, file, line);
    mbarrier *bar = simt_find_barrier((uint64_t *)simt_cluster_pointer(bar_address, what, file, line), NULL, what, file, line,
                                 __builtin_return_address(0));
    if (to_address % 8)
        simt_fail(file, line, "%s: the address of rank %u's %s is not a multiple of 8", what, block_of(g, to)->rank,
                  simt_place_name(g, to));
    if (!simt_find_variable(g, to, &offset, &room) || room < 8)
        simt_fail(file, line, "%s: 8 bytes at 0x%x are in no shared variable", what, to_address);
    if (bar->block != block_of(g, to))
        simt_fail(file, line, "%s: the store goes to rank %u, its mbarrier %s is in rank %u", what, block_of(g, to)->rank,
                  simt_place_name(g, bar->at), bar->block->rank);
    simt_check_fenced(bar, what, file, line);
    simt_mark_bytes(bar);
    simt_check_destination(to, 8, what, file, line);
    simt_copier_access(WRITER, NULL, to, 8, &bar->tag[bar->phase & 1], __builtin_return_address(0));
    flight x = {to, NULL, value, 8, bar->block != simt_me->self->block, bar, {what, file, line}, {}};
    simt_launch_flight(&x);
}

void simt_fence_proxy_async(void) {
    fiber *f = simt_me->self;
    f->block->fences++;
    publish_barriers(f);
    release(&f->block->fence_tag);
}

void simt_check_source(const char *from, size_t bytes, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    simt_check_landed(from, bytes, what, file, line);
    if (simt_written_since(simt_me->self->block, from, bytes) == UNFENCED)
        simt_fail_all(file, line, "%s: threads wrote to %s and none has executed fence.proxy.async since", what,
                      simt_place_name(g, from));
    if (g->store_count == MAX_STORES)
        simt_fail(file, line, "%s: more than %u bulk stores that nobody has waited for", what, MAX_STORES);
    simt_take_note(simt_me->self->block, from, bytes);
}

void simt_add_store(const store *x) {
    group *g = simt_me->group;
    store *added = &g->stores[g->store_count++];
    *added = *x;
    if (simt_copies == EAGER) land_store(added);
}

void simt_bulk_store(void *global, const void *shared, unsigned bytes, const char *file, int line) {
    const char *what = "cp.async.bulk.global.shared::cta", *from = (const char *)shared;
    fiber *f = simt_me->self;
    maybe_switch();
    check_bulk(shared, global, bytes, what, file, line);
    simt_check_source(from, bytes, what, file, line);
    void *pc = __builtin_return_address(0);
    simt_copier_access(READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    simt_copier_access(FENCED_READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    simt_copier_access(WRITER, NULL, global, bytes, &f->write_tag[f->bulk_groups & 3], pc);
    const store x = {(char *)global, from, bytes, f->bulk_groups, 0, simt_hash(from, bytes), f, {what, file, line}, {}, 0};
    simt_add_store(&x);
}

void simt_bulk_commit(void) { simt_me->self->bulk_groups++; }

void simt_bulk_wait(unsigned groups, int read, const char *file, int line) {
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    maybe_switch();
    note_site(f, read ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group", file, line);
    for (unsigned i = 0; i < g->store_count;) {
        store *x = &g->stores[i];
        if (x->by != f || x->group + groups >= f->bulk_groups) {
            i++;
            continue;
        }
        if (simt_hash(x->from, x->bytes) != x->hash)
            simt_fail_all(x->site.file, x->site.line, "%s: its source, %s, was written to before the wait at %s:%d",
                          x->site.what, simt_place_name(g, x->from), base_name(file), line);
        land_store(x);
        acquire(&f->read_tag[x->group & 3]);
        *x = g->stores[--g->store_count];
    }
    if (read) return;
    for (unsigned n = 0; n < 4; n++)
        if (n + groups < f->bulk_groups) acquire(&f->write_tag[(f->bulk_groups - groups - 1 - n) & 3]);
}

/* ---- prefetches ------------------------------------------------------------------------------------------------------ */

static bool poisoned_prefetch;
void simt_allow_poisoned_prefetch(int allowed) { poisoned_prefetch = allowed; }

void simt_bulk_prefetch(const void *at, unsigned bytes, const char *file, int line) {
    const char *const what = "cp.async.bulk.prefetch.L2";
    if (!bytes || (((uintptr_t)at | bytes) & 15))
        simt_fail(file, line, "%s: %u bytes at %p are not multiples of 16", what, bytes, at);
    if (!poisoned_prefetch) simt_check_global(at, bytes, what, file, line);
}

void simt_prefetch(const void *at, const char *file, int line) {
    if (!poisoned_prefetch && first_hidden(at, 1)) simt_check_global(at, 1, "prefetch.global.L2", file, line);
}

/* ---- cp.async -------------------------------------------------------------------------------------------------------- */

__attribute__((noinline, cold)) static void bad_own_copy(const void *to, const void *from, size_t bytes, const char *file,
                                                         int line) {
    group *g = simt_me->group;
    size_t offset, room;
    char what[32];
    snprintf(what, sizeof what, "cp.async of %zu", bytes);
    if (bytes != 4 && bytes != 8 && bytes != 16) simt_fail(file, line, "cp.async copies 4, 8 or 16 bytes, not %zu", bytes);
    if ((uintptr_t)to % bytes) simt_fail(file, line, "%s: the shared address %p is not a multiple of %zu", what, to, bytes);
    if ((uintptr_t)from % bytes) simt_fail(file, line, "%s: the global address %p is not a multiple of %zu", what, from, bytes);
    if ((size_t)((const char *)to - simt_me->self->block->memory) >= g->memory_stride)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, to);
    const char *name = simt_find_variable(g, to, &offset, &room);
    if (!name || bytes > room) simt_fail(file, line, "%s: %zu bytes at %p are in no shared variable", what, bytes, to);
    simt_check_global(from, bytes, what, file, line);
}

void simt_cp_async(void *to, const void *from, size_t bytes, const char *file, int line) {
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    // To check that the ranges lie in a shared variable and an allocation takes a search: ASan and the redzones do that.
    if (__builtin_expect((bytes != 4 && bytes != 8 && bytes != 16) || (((uintptr_t)to | (uintptr_t)from) & (bytes - 1))
                         || (size_t)((char *)to - f->block->memory) >= g->memory_stride
                         || in_shared(g, from)
                         || first_hidden(to, bytes) || first_hidden(from, bytes), 0))
        bad_own_copy(to, from, bytes, file, line);
    if (__builtin_expect(f->own_count == MAX_OWN_COPIES, 0))
        simt_fail(file, line, "cp.async of %zu: more than %u copies that the thread has not waited for", bytes, MAX_OWN_COPIES);
    touch(from, bytes, false, __builtin_return_address(0));
    touch(to, bytes, true, __builtin_return_address(0));
    own_copy *x = &f->own_copies[f->own_count++];
    *x = {(char *)to, (const char *)from, file, line, f->own_groups, (unsigned short)bytes, 0};
    const uint64_t word = 0x0101010101010101u * (unsigned char)simt_poison_byte(), poison[2] = {word, word};
    if (simt_copies == EAGER) land_own(x);
    else copy_few(x->to, (const char *)poison, x->bytes);
}

void simt_cp_async_commit(const char *, int) { simt_me->self->own_groups++; }

void simt_cp_async_wait(unsigned groups, const char *, int) {
    fiber *f = simt_me->self;
    maybe_switch();
    unsigned kept = 0;
    for (unsigned i = 0; i < f->own_count; i++) {
        own_copy *x = &f->own_copies[i];
        if (x->group + groups >= f->own_groups) {
            if (kept++ != i) f->own_copies[kept - 1] = *x;
            continue;
        }
        touch(x->from, x->bytes, false, __builtin_return_address(0));
        touch(x->to, x->bytes, true, __builtin_return_address(0));
        land_own(x);
    }
    f->own_count = kept;
}

/* ---- before a launch, and at the end of threads and blocks ----------------------------------------------------------- */

/* Tables of the mbarriers and copies. From calloc: what is never used is never touched. */
void simt_prepare_copies(group *g, unsigned threads) {
    size_t room = (size_t)MAX_BARRIERS * g->block_count * threads;
    g->barrier_count = g->first_flight = g->flight_count = g->store_count = 0;
    if (!g->barriers) {
        g->barriers = (mbarrier *)calloc(MAX_BARRIERS * MAX_BLOCKS, sizeof *g->barriers);
        g->flights = (flight *)calloc(MAX_COPIES, sizeof *g->flights);
        g->stores = (store *)calloc(MAX_STORES, sizeof *g->stores);
    }
    if (g->live > g->own_copies_room) {
        free(g->own_copies);
        g->own_copies = (own_copy *)calloc((size_t)g->live * MAX_OWN_COPIES, sizeof *g->own_copies);
        g->own_copies_room = g->live;
    }
    if (room <= g->last_waited_room) return;
    free(g->last_waited);
    g->last_waited = (int *)calloc(room, sizeof *g->last_waited);
    g->last_waited_room = room;
}

void simt_check_copies_of_thread(fiber *f) {
    group *g = f->block->group;
    for (unsigned i = 0; i < g->store_count; i++) {
        const store *x = &g->stores[i];
        if (x->by != f) continue;
        simt_fail_all(x->site.file, x->site.line, "%s: thread %u exits and has not %s", x->site.what, f->index,
                      x->group == f->bulk_groups ? "committed it to a bulk group" : "waited for its bulk group");
    }
    if (!f->own_count) return;
    const own_copy *x = &f->own_copies[0];
    simt_fail_all(x->file, x->line, "cp.async of %u: thread %u exits and has not %s", x->bytes, f->index,
                  x->group == f->own_groups ? "committed it to a group" : "waited for its group");
}

void simt_check_copies_of_block(block *blk) {
    group *g = blk->group;
    for (unsigned i = 0; i < g->barrier_count; i++) {
        const mbarrier *bar = &g->barriers[i];
        if (bar->block != blk) continue;
        if (bar->in_flight)
            simt_fail_all(bar->born.file, bar->born.line,
                          "block rank %u exits while %zu bytes are on their way to it, counted by mbarrier %s", blk->rank,
                          bar->in_flight, simt_place_name(g, bar->at));
        if (bar->bytes)
            simt_fail_all(bar->born.file, bar->born.line, "block rank %u exits in phase %u of mbarrier %s with %d bytes %s",
                          blk->rank, bar->phase, simt_place_name(g, bar->at), abs(bar->bytes),
                          bar->bytes < 0 ? "too many" : "missing");
        if (bar->landed_in > bar->waited_for)
            simt_fail_all(bar->born.file, bar->born.line,
                          "block rank %u exits and nobody has waited for the bytes of phase %d of mbarrier %s", blk->rank,
                          bar->landed_in, simt_place_name(g, bar->at));
    }
}
