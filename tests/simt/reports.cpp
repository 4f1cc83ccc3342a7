// SPDX-License-Identifier: MIT
/*
Reports: what a launch did wrong, and where its threads are.

Only the first error of a launch is reported. The report goes to stderr and to simt_last_report(). Then every fiber of the launch
is abandoned at its next switch. simt_fail names the running thread, simt_fail_all also where every other thread of its group
is.
*/
#include "engine.h"

#include <stdarg.h>
#include <stdio.h>

#include <mutex>

static std::mutex report_mutex;
static std::string last_report;
static int quiet;

const char *simt_last_report(void) { return last_report.c_str(); }
void simt_clear_report(void) { last_report.clear(); }
void simt_quiet(int value) { quiet = value; }

void simt_report_text(const char *text) {
    std::lock_guard<std::mutex> lock(report_mutex);
    last_report = text;
    if (!quiet) fputs(text, stderr);
}

static void append(std::string &text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(std::string &text, const char *format, ...) {
    char line[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    text += line;
}

std::string simt_symbol_name(const void *address);     // runtime.cpp

const char *simt_place_name(const group *g, const void *at) {
    constexpr size_t size = sizeof simt_me->place_names[0];
    char *text = simt_me->place_names[simt_me->places++ % 4];
    size_t offset, room;
    const char *name = simt_find_variable(g, at, &offset, &room);
    if (!name) snprintf(text, size, "%p", at);
    else if (offset) snprintf(text, size, "%s + %zu bytes", name, offset);
    else snprintf(text, size, "%s", name);
    return text;
}

const char *simt_barrier_text(const group *g, const mbarrier *bar) {
    char *const text = simt_me->barrier_text;
    snprintf(text, sizeof simt_me->barrier_text,
             "mbarrier %s, initialised at %s:%d, in phase %u: %u of %u arrivals missing, %d bytes %s",
             simt_place_name(g, bar->at), base_name(bar->born.file), bar->born.line, bar->phase, bar->pending, bar->count,
             abs(bar->bytes), bar->bytes < 0 ? "too many" : "missing");
    return text;
}

static void describe_fiber(std::string &text, const fiber *f, unsigned first, unsigned last) {
    uint3 b = f->block->index;
    const wait_site *site = &f->warp->site[f->lane];
    append(text, "simt:   block (%u,%u,%u) thread%s %u", b.x, b.y, b.z, first == last ? "" : "s", first);
    if (last != first) append(text, "-%u", last);
    if (f->state == EXITED) append(text, " exited\n");
    else if (f->state == READY) append(text, " can run\n");
    else if (f->state == IN_WARP)
        append(text, " in %s, mask 0x%08x, %s:%d\n", site->what, f->warp->mask[f->lane], base_name(site->file), site->line);
    else if (f->state == IN_MBARRIER)
        append(text, " in %s for %s, phase %u, %s:%d\n", site->what, simt_place_name(f->block->group, f->waits_for->at),
               f->waits_phase, base_name(site->file), site->line);
    else if (f->state == IN_NAMED)
        append(text, " in %s, number %d, %u of %u threads there, %s:%d\n", site->what, f->named,
               f->block->named[f->named].arrived, f->block->named[f->named].threads, base_name(site->file), site->line);
    else append(text, " in %s, %s:%d\n", site->what, base_name(site->file), site->line);
}

/* Whether two threads of a block wait for the same thing, or are both exited or ready. */
static bool wait_alike(const fiber *a, const fiber *b) {
    const wait_site *s = &a->warp->site[a->lane], *t = &b->warp->site[b->lane];
    if (a->state != b->state) return false;
    if (a->state == EXITED || a->state == READY) return true;
    if (a->state == IN_WARP && a->warp->mask[a->lane] != b->warp->mask[b->lane]) return false;
    if (a->state == IN_MBARRIER && a->waits_for != b->waits_for) return false;
    if (a->state == IN_NAMED && a->named != b->named) return false;
    return s->line == t->line && s->what == t->what;
}

/* Where the threads of the group are. Neighbours that wait for the same thing share a line. */
static void describe_group(std::string &text, const group *g) {
    unsigned lines = 0;
    for (unsigned i = 0; i < g->barrier_count; i++) {
        const mbarrier *bar = &g->barriers[i];
        if (!g->yielded && !bar->parked && !bar->bytes && bar->pending == bar->count) continue;
        if (++lines > 16) break;
        uint3 b = bar->block->index;
        append(text, "simt:   block (%u,%u,%u) %s\n", b.x, b.y, b.z, simt_barrier_text(g, bar));
    }
    for (unsigned b = 0; b < g->block_count; b++) {
        const block *blk = &g->blocks[b];
        const fiber *all = &g->fibers[b * (size_t)blk->threads];
        unsigned first = 0;
        for (unsigned i = 1; i <= blk->threads; i++) {
            if (i < blk->threads && wait_alike(&all[i], &all[first])) continue;
            if (++lines > 48) {
                append(text, "simt:   ...\n");
                return;
            }
            describe_fiber(text, &all[first], first, i - 1);
            first = i;
        }
    }
}

static void file_report(launch *l, const std::string &text) {
    if (l->failed.exchange(1)) return;              // only the first error of a launch is reported
    simt_report_text(text.c_str());
}

static void report_failure(worker *w, bool everybody, const char *file, int line, const char *message) {
    std::string text;
    append(text, "simt: %s:%d: ", base_name(file), line);
    text += message;
    text += "\n";
    if (!w || !w->launch) {
        simt_report_text(text.c_str());
        return;
    }
    append(text, "simt:   kernel %s", simt_symbol_name(w->launch->shape->kernel).c_str());
    if (w->self) {
        uint3 b = w->self->here.block_idx, t = w->self->here.thread_idx;
        append(text, ", block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y, t.z);
    }
    text += "\n";
    if (everybody) describe_group(text, w->group);
    file_report(w->launch, text);
}

static void fail_with(bool everybody, const char *file, int line, const char *message) {
    report_failure(simt_me, everybody, file, line, message);    // destroys its strings before this stack is abandoned
    if (simt_me && simt_me->self) simt_leave_fiber();
}

void simt_fail(const char *file, int line, const char *format, ...) {
    char message[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    fail_with(false, file, line, message);
}

void simt_fail_all(const char *file, int line, const char *format, ...) {
    char message[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    fail_with(true, file, line, message);
}

/* Names the first thread that waits for an mbarrier, a wgmma or a named barrier, and says what is missing there. */
void simt_report_deadlock(group *g) {
    for (unsigned i = 0; i < g->warp_count; i++)
        for (unsigned m = g->warps[i].exist; m; m &= m - 1) {
            const fiber *f = &g->warps[i].lanes[__builtin_ctz(m)];
            const wait_site *site = &f->warp->site[f->lane];
            if (f->state == IN_WGMMA) {
                simt_report_wgmma_deadlock(f);
                return;
            }
            if (f->state == IN_NAMED) {
                const named_barrier *n = &f->block->named[f->named];
                simt_fail_all(site->file, site->line,
                              "deadlock: %u threads wait for what cannot come, thread %u of block rank %u here at barrier %d, "
                              "where %u of %u threads are", g->live, f->index, f->block->rank, f->named, n->arrived,
                              n->threads);
                return;
            }
            if (f->state != IN_MBARRIER) continue;
            simt_fail_all(site->file, site->line,
                          "deadlock: %u threads wait for what cannot come, thread %u of block rank %u here for phase %u of %s",
                          g->live, f->index, f->block->rank, f->waits_phase, simt_barrier_text(g, f->waits_for));
            return;
        }
    simt_fail_all("launch", 0, "deadlock: %u threads wait for what cannot come", g->live);
}
