// SPDX-License-Identifier: MIT
/*
Tensor maps and tensor copies (TMA): boxes of a matrix between global and shared memory.

A CUtensorMap of the simulator is a simt_tensor, as plain data. cuTensorMapEncodeTiled checks what CUDA's documentation demands
and fills it in. A tensor copy is a bulk copy (copies.cpp) of the box at (x, y). Elements outside of the matrix are zeros, and
the swizzle permutes the 16-byte vectors of each row. A multicast is one such copy in each block of the mask.

Not simulated, and refused as not supported: types other than f16, bf16 and f32, interleaved and im2col layouts, steps other
than 1, fills other than zeros, maps of more than three dimensions. Copies move boxes of two dimensions.
*/
#include "engine.h"

#include "cuda.h"
#include "cudaTypedefs.h"

/* What a CUtensorMap holds. The innermost dimension is first. Strides are in bytes; stride[0] is that of dimension 1. */
static const uint64_t TENSOR_MAGIC = 0x74656e736f726d70u;
struct simt_tensor {
    uint64_t magic;
    char *base;
    int64_t size[3], stride[2];
    unsigned box[3], rank, type, element, span; // element: bytes of one; span: bytes of a swizzled row, 0 without swizzle
};

/* ---- maps ------------------------------------------------------------------------------------------------------------ */

static_assert(sizeof(simt_tensor) <= sizeof(CUtensorMap), "a map holds its description");

static CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *size,
                             const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                             CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                             CUtensorMapFloatOOBfill fill) {
    const unsigned spans[] = {0, 32, 64, 128};
    simt_tensor t = simt_tensor();
    if (!map || (uintptr_t)map % 64 || rank < 1 || rank > 5 || !address || (uintptr_t)address % 16)
        return CUDA_ERROR_INVALID_VALUE;
    if (!size || (rank > 1 && !strides) || !box || !steps || (unsigned)promotion > 3) return CUDA_ERROR_INVALID_VALUE;
    if (type > CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B || interleave > CU_TENSOR_MAP_INTERLEAVE_32B ||
        swizzle > CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B || fill > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 &&
        type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (interleave || swizzle > CU_TENSOR_MAP_SWIZZLE_128B || fill || rank > 3) return CUDA_ERROR_NOT_SUPPORTED;
    t.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    for (unsigned i = 0; i < rank; i++) {
        if (!size[i] || size[i] > (cuuint64_t)1 << 32) return CUDA_ERROR_INVALID_VALUE;
        if (!box[i] || box[i] > 256 || !steps[i] || steps[i] > 8) return CUDA_ERROR_INVALID_VALUE;
        if (i && (strides[i - 1] % 16 || strides[i - 1] >= (cuuint64_t)1 << 40)) return CUDA_ERROR_INVALID_VALUE;
        if (steps[i] != 1) return CUDA_ERROR_NOT_SUPPORTED;
        t.size[i] = (int64_t)size[i];
        t.box[i] = box[i];
        if (i) t.stride[i - 1] = (int64_t)strides[i - 1];
    }
    if (box[0] * t.element % 16 || (swizzle && box[0] * t.element > spans[swizzle])) return CUDA_ERROR_INVALID_VALUE;
    t.magic = TENSOR_MAGIC;
    t.base = (char *)address;
    t.rank = rank;
    t.type = type;
    t.span = spans[swizzle];
    memset(map, 0, sizeof *map);
    memcpy(map, &t, sizeof t);
    return CUDA_SUCCESS;
}

void *simt_tensor_encoder(void) {
    const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_tiled;
    return (void *)encode;
}

/* ---- boxes ----------------------------------------------------------------------------------------------------------- */

/* Whether row r of the box has columns in the matrix: *first to *last - 1. */
static bool box_row(const tensor_box *b, unsigned r, int64_t *first, int64_t *last) {
    const int64_t y = (int64_t)b->at[1] + r, x = b->at[0];
    *first = x < 0 ? -x : 0;
    *last = b->size[0] - x < b->box[0] ? b->size[0] - x : b->box[0];
    return y >= 0 && y < b->size[1] && *first < *last;
}
static char *box_place(const tensor_box *b, unsigned r, int64_t column) {
    return b->base + ((int64_t)b->at[1] + r) * b->stride + (b->at[0] + column) * (int64_t)b->element;
}

static void add_float(char *to, const char *from) {
    uint32_t *at = (uint32_t *)to, old = __atomic_load_n(at, __ATOMIC_RELAXED), sum;
    do {
        float x, y;
        __builtin_memcpy(&x, &old, 4);
        __builtin_memcpy(&y, from, 4);
        x += y;
        __builtin_memcpy(&sum, &x, 4);
    } while (!__atomic_compare_exchange_n(at, &old, sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

PLAIN_LOOP void simt_move_box(const tensor_box *b, char *at, box_motion motion) {
    const int64_t each = 16 / b->element;
    for (unsigned r = 0; r < b->box[1]; r++) {
        int64_t first, last;
        if (!box_row(b, r, &first, &last)) first = last = 0;
        for (int64_t column = 0; column < b->box[0]; column += each, at += 16) {
            char *chunk = swizzled(at, b->span);
            const int64_t low = first > column ? first : column, high = last < column + each ? last : column + each;
            if (motion == BOX_IN && high - low < each) ((uint64_t *)chunk)[0] = ((uint64_t *)chunk)[1] = 0;
            if (low >= high) continue;
            char *global = box_place(b, r, low), *shared = chunk + (low - column) * b->element;
            const int64_t bytes = (high - low) * b->element;
            if (motion == BOX_ADD)
                for (int64_t i = 0; i < bytes; i += 4) add_float(global + i, shared + i);
            else if (bytes == 16)
                for (unsigned i = 0; i < 16; i += 8)
                    __builtin_memcpy((motion == BOX_IN ? shared : global) + i, (motion == BOX_IN ? global : shared) + i, 8);
            else
                for (int64_t i = 0; i < bytes; i += 2)
                    __builtin_memcpy((motion == BOX_IN ? shared : global) + i, (motion == BOX_IN ? global : shared) + i, 2);
        }
    }
}

static unsigned box_bytes(const tensor_box *b) { return b->box[0] * b->box[1] * b->element; }

/* What TSan sees of the box in global memory. Additions are reads for it: they may run together, but not with a plain write. */
#if defined(SIMT_TSAN)
static void touch_box(const tensor_box *b, bool write, void *pc) {
    for (unsigned r = 0; r < b->box[1]; r++) {
        int64_t first, last;
        if (box_row(b, r, &first, &last)) touch(box_place(b, r, first), (last - first) * b->element, write, pc);
    }
}
static void copier_box(copier who, const tensor_box *b, const void *write_shared, bool write_global, char *done, void *pc) {
    release(&simt_me->self->issue_tag);
    simt_become_copier(who, &simt_me->self->issue_tag);
    touch_box(b, write_global, pc);
    if (write_shared) {
        touch(write_shared, box_bytes(b), true, pc);
        release(&block_of(simt_me->group, write_shared)->fence_tag);
    }
    simt_end_copier(done);
}
#else
static void copier_box(copier, const tensor_box *, const void *, bool, char *, void *) {}
#endif

/* The box at (x, y) of the matrix that a map describes. */
static tensor_box read_map(const void *map, int x, int y, const char *what, const char *file, int line) {
    const simt_tensor *t = (const simt_tensor *)map;
    group *g = simt_me->group;
    if ((uintptr_t)map % 64) simt_fail(file, line, "%s: the tensor map at %p is not aligned to 64 bytes", what, map);
    if (in_shared(g, map))
        simt_fail(file, line, "%s: the tensor map is in shared memory", what);
    if (t->magic != TENSOR_MAGIC) simt_fail(file, line, "%s: %p is not a tensor map", what, map);
    if (t->rank != 2) simt_fail(file, line, "%s: a tensor map of rank %u, not 2", what, t->rank);
    if (t->span && t->box[0] * t->element != t->span)
        simt_fail(file, line, "%s: rows of %u bytes in a swizzle of %u, which the engine does not know", what,
                  t->box[0] * t->element, t->span);
    return {t->base, {t->size[0], t->size[1]}, t->stride[0], {x, y}, {t->box[0], t->box[1]}, t->element, t->span};
}

void simt_tensor_prefetch(const void *map, const char *file, int line) {
    read_map(map, 0, 0, "prefetch.tensormap", file, line);
}

static void check_box(const void *shared, const tensor_box *b, const char *what, const char *file, int line) {
    group *g = simt_me->group;
    size_t offset, room;
    const char *low = NULL, *high = NULL;
    if ((uintptr_t)shared % 128) simt_fail(file, line, "%s: the shared address %p is not a multiple of 128", what, shared);
    const char *name = simt_find_variable(g, shared, &offset, &room);
    if (!name || block_of(g, shared) != simt_me->self->block)
        simt_fail(file, line, "%s: %p is not in this block's shared memory", what, shared);
    if (box_bytes(b) > room)
        simt_fail(file, line, "%s: %u bytes from byte %zu of %s, which ends after %zu", what, box_bytes(b), offset, name, room);
    for (unsigned r = 0; r < b->box[1]; r++) {
        int64_t first, last;
        if (!box_row(b, r, &first, &last)) continue;
        const char *row = box_place(b, r, first);
        const void *bad = first_hidden(row, (last - first) * b->element);
        if (bad) simt_fail(file, line, "%s: row %lld of the matrix leaves its allocation", what, (long long)b->at[1] + r);
        if (!low) low = row;
        high = row + (last - first) * b->element;
    }
    if (low) simt_check_global(low, high - low, what, file, line);
}

static void load_box(char *shared, const tensor_box *b, uint64_t *at, block *to, const char *what, const char *file, int line,
                     void *pc) {
    mbarrier *bar = simt_find_barrier(at, to, what, file, line, pc);
    const unsigned bytes = box_bytes(b);
    simt_check_fenced(bar, what, file, line);
    simt_mark_bytes(bar);
    simt_check_destination(shared, bytes, what, file, line);
    simt_forget_notes(to, shared, bytes);
    copier_box(LOADER, b, shared, false, &bar->tag[bar->phase & 1], pc);
    flight x = {shared, NULL, 0, bytes, 0, bar, {what, file, line}, *b};
    simt_launch_flight(&x);
}

void simt_tensor_load(void *shared, const void *map, int x, int y, uint64_t *bar, const char *file, int line) {
    const char *what = "cp.async.bulk.tensor.2d.shared::cluster.global";
    maybe_switch();
    const tensor_box b = read_map(map, x, y, what, file, line);
    check_box(shared, &b, what, file, line);
    load_box((char *)shared, &b, bar, simt_me->self->block, what, file, line, __builtin_return_address(0));
}

void simt_tensor_load_multicast(void *shared, const void *map, int x, int y, uint64_t *bar, unsigned mask, const char *file,
                                int line) {
    const char *what = "cp.async.bulk.tensor.2d.shared::cluster.global.multicast::cluster";
    fiber *f = simt_me->self;
    group *g = simt_me->group;
    maybe_switch();
    const tensor_box b = read_map(map, x, y, what, file, line);
    check_box(shared, &b, what, file, line);
    if (!mask || mask >> g->block_count)
        simt_fail(file, line, "%s: a mask of 0x%x in a cluster of %u blocks", what, mask, g->block_count);
    for (unsigned rank = 0; rank < g->block_count; rank++) {
        if (!(mask >> rank & 1)) continue;
        block *to = &g->blocks[rank];
        const size_t distance = to->memory - f->block->memory;
        if (to != f->block && !f->cluster_waits)
            simt_fail_all(file, line,
                          "%s: shared memory of rank %u used before the first cluster barrier: that block may not have started",
                          what, rank);
        load_box((char *)shared + distance, &b, (uint64_t *)((char *)bar + distance), to, what, file, line,
                 __builtin_return_address(0));
    }
}

static void store_box(const void *map, int at_x, int at_y, const void *shared, int add, const char *what, const char *file,
                      int line, void *pc) {
    fiber *f = simt_me->self;
    maybe_switch();
    const tensor_box b = read_map(map, at_x, at_y, what, file, line);
    const unsigned bytes = box_bytes(&b);
    const char *from = (const char *)shared;
    if (add && b.element != 4) simt_fail(file, line, "%s: elements of %u bytes; the engine adds floats alone", what, b.element);
    check_box(shared, &b, what, file, line);
    simt_check_source(from, bytes, what, file, line);
    simt_copier_access(READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    simt_copier_access(FENCED_READER, from, NULL, bytes, &f->read_tag[f->bulk_groups & 3], pc);
    copier_box(WRITER, &b, NULL, !add, &f->write_tag[f->bulk_groups & 3], pc);
    const store x = {NULL, from, bytes, f->bulk_groups, 0, simt_hash(from, bytes), f, {what, file, line}, b, add};
    simt_add_store(&x);
}
void simt_tensor_store(const void *map, int x, int y, const void *shared, const char *file, int line) {
    store_box(map, x, y, shared, 0, "cp.async.bulk.tensor.2d.global.shared::cta", file, line, __builtin_return_address(0));
}
void simt_tensor_add(const void *map, int x, int y, const void *shared, const char *file, int line) {
    store_box(map, x, y, shared, 1, "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add", file, line,
              __builtin_return_address(0));
}
