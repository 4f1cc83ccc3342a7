// SPDX-License-Identifier: MIT
/* lk_check.cuh - the checks of arguments, by the host: each op writes a table of its tensors and a list of checks, and gets the
 * status of the first that fails, with its sentence in lk_last_error. Compiled with -DLK_CHECK also what a call cannot see in its
 * arguments alone: where the memory behind a pointer lies, and where it ends.
 *
 *     lk_checks checks = lk_check_begin(op, device);
 *     lk_tensor list[] = {{"x", a->x, sizeof(T), LK_REQUIRED, a->cols, {{a->rows, &a->x_stride, "x_stride"}}}, ...,
 *                         lk_workspace(a->workspace, needed)};
 *     const int count = lk_used_tensors(list, LK_COUNT(list));
 *     lk_check_size(&checks, "rows", a->rows, 0, INT64_MAX);
 *     lk_check_shapes(&checks, list, count, query);
 *     lk_check_workspace(&checks, a->workspace, a->workspace_bytes, needed);
 *     lk_check_end(&checks, list, count);
 *     return checks.status;
 *
 * Needs: lk_base.cuh.
 */
#ifndef LK_CHECK_CUH
#define LK_CHECK_CUH

#include "lk_base.cuh"

#if defined(__CUDACC_RTC__)
#error "NVRTC takes lk_row.cuh and lk_loss.cuh; ops need nvcc, or lk as a library: packages/README.md"
#endif
#if defined(__CUDACC__) || defined(LK_SIMT)

/* The architecture of checks that look at shapes and options alone: those of a workspace function. */
#define LK_QUERY INT32_MAX

/* The checks of a call. LK_ERR_NULL to LK_ERR_WORKSPACE fall by one from rule to rule of lk/README.md, so whatever the order in
 * which an op checks, the status is that of the first rule that is broken: of one rule's checks the first that failed. The
 * arguments of later checks are still computed, so an op returns before it divides by a size that may be bad. */
typedef struct lk_checks {
    const char *op;
    lk_status status;
    int arch = 0;                    /* lk_device's, or LK_QUERY */
    cudaError_t asked = cudaSuccess; /* what CUDA said when it was asked for the device */
} lk_checks;

/* Begins the checks of a call. device: it becomes the current device; NULL in a workspace function, for LK_QUERY. Where CUDA has
 * no device, no path is refused for want of one: lk_check_end says so, behind all that is wrong with the arguments. */
LK_HOST lk_checks lk_check_begin(const char *op, lk_device *device)
{
    const cudaError_t asked = device ? lk_current_device(device) : cudaSuccess;
    return {op, LK_OK, !device ? LK_QUERY : asked ? 90 : device->arch, asked};
}

/* Whether this rule, or one before it, is broken: its other checks need not look. */
LK_HOST bool lk_rejected(const lk_checks *checks, lk_status rule)
{
    return checks->status > 0 || (checks->status && checks->status >= rule);
}

/* A check that fails: keeps "op: sentence" for lk_last_error, unless one of its rule, or of one before it, has failed. */
__attribute__((format(printf, 3, 4))) LK_HOST void lk_reject(lk_checks *checks, lk_status status, const char *format, ...)
{
    if (lk_rejected(checks, status)) return;
    va_list list;
    va_start(list, format);
    checks->status = lk_fail_list(status, checks->op, format, list);
    va_end(list);
}

/* Fails if CUDA could not say which device is current. */
LK_HOST void lk_check_device(lk_checks *checks, cudaError_t error)
{
    if (!checks->status) checks->status = lk_asked_device(checks->op, error);
}

/* What a call does with a tensor. */
enum {
    LK_IN = 0,
    LK_OUT = 1,
    LK_REQUIRED = 2,    /* it may not be NULL where it has elements */
    LK_MAY_OVERLAP = 4, /* an input whose elements may share addresses */
    LK_UNUSED = 8,      /* this call does not have it */
    LK_SCRATCH = 16     /* the workspace: no output, and it shares no memory with any tensor */
};

/* A dimension of a tensor: its size, the field that holds its stride in elements, and that field's name. */
typedef struct {
    int64_t size, *stride;
    const char *name;
} lk_dim;

/* A tensor of a call. Each op writes a table of its tensors; the functions below check them all, in one order and with one
 * wording. The elements are rows of `width` contiguous ones, one for each index of up to three outer dimensions. A tensor that
 * may be in place of another stands behind it in the table. */
typedef struct lk_tensor {
    const char *name;
    const void *pointer;
    int bytes;                    /* of an element */
    int use;                      /* LK_IN or LK_OUT, and what else holds of it */
    int64_t width;
    lk_dim dim[3] = {};           /* outermost first; without a stride: none */
    const char *in_place[2] = {}; /* the tensors that it may be: the same pointer, rows that start at the same bytes */
} lk_tensor;

/* A workspace in its op's table. bytes: those that the call takes of it, or before they are known those that it is given; 0: the
 * call has none, and the field may be anything. */
LK_HOST lk_tensor lk_workspace(const void *workspace, size_t bytes)
{
    const size_t most = (size_t)1 << 62; /* of a tensor */
    return {"workspace", workspace, 1, LK_SCRATCH, (int64_t)(bytes < most ? bytes : most)};
}

/* Takes the unused tensors out of a table; returns how many are left. */
LK_HOST int lk_used_tensors(lk_tensor *list, int count)
{
    int used = 0;
    for (int i = 0; i < count; i++)
        if (!(list[i].use & LK_UNUSED)) list[used++] = list[i];
    return used;
}

LK_HOST bool lk_has_elements(const lk_tensor *t)
{
    bool some = t->width != 0;
    for (int d = 0; d < 3; d++) some = some && (!t->dim[d].stride || t->dim[d].size != 0);
    return some;
}

/* The elements from the first to one past the last, once the strides are checked. */
LK_HOST int64_t lk_span(const lk_tensor *t)
{
    int64_t span = t->width;
    if (!lk_has_elements(t)) return 0;
    for (int d = 0; d < 3; d++)
        if (t->dim[d].stride) span += (t->dim[d].size - 1) * *t->dim[d].stride;
    return span;
}

/* Fails if a required tensor is NULL, or if a call has work and no output. A required output without elements counts as
 * given, even if it is NULL. */
LK_HOST void lk_check_null(lk_checks *checks, const lk_tensor *list, int count)
{
    if (lk_rejected(checks, LK_ERR_NULL)) return;
    bool work = false, output = false;
    for (int i = 0; i < count; i++) {
        const bool needed = list[i].use & LK_REQUIRED && lk_has_elements(&list[i]);
        if (needed && !list[i].pointer) return lk_reject(checks, LK_ERR_NULL, "%s is NULL", list[i].name);
        const bool empty = list[i].use & LK_REQUIRED && !needed;
        work = work || needed, output = output || (list[i].use & LK_OUT && (list[i].pointer || empty));
    }
    if (work && !output) lk_reject(checks, LK_ERR_NULL, "every output is NULL");
}

LK_HOST void lk_check_size(lk_checks *checks, const char *name, int64_t size, int64_t least, int64_t most)
{
    if (size >= least && size <= most) return;
    int log2 = 0;
    while (log2 < 62 && (int64_t)1 << log2 < most) log2++;
    if (most == INT64_MAX)
        return lk_reject(checks, LK_ERR_SHAPE, "%s is %lld; it must be at least %lld", name, (long long)size, (long long)least);
    if (most >= 1 << 16 && most == (int64_t)1 << log2)
        return lk_reject(checks, LK_ERR_SHAPE, "%s is %lld; it must be %lld to 2^%d", name, (long long)size, (long long)least,
                         log2);
    lk_reject(checks, LK_ERR_SHAPE, "%s is %lld; it must be %lld to %lld", name, (long long)size, (long long)least,
              (long long)most);
}

/* Whether t may be the same memory as other. */
LK_HOST bool lk_may_be(const lk_tensor *t, const lk_tensor *other)
{
    for (int k = 0; k < 2; k++)
        if (t->in_place[k] && !strcmp(t->in_place[k], other->name)) return true;
    return false;
}

/* The first tensor that t is in place of; NULL: none. */
LK_HOST const lk_tensor *lk_in_place_of(const lk_tensor *list, const lk_tensor *t)
{
    for (const lk_tensor *other = list; t->pointer && other < t; other++)
        if (other->pointer == t->pointer && lk_may_be(t, other)) return other;
    return NULL;
}

/* Whether the rows of two tensors with the same pointer start at the same bytes, once the strides are checked. */
LK_HOST bool lk_same_rows(const lk_tensor *t, const lk_tensor *other)
{
    bool same = true;
    for (int d = 0; d < 3; d++)
        if (t->dim[d].stride && t->dim[d].size > 1)
            same = same && lk_count(*t->dim[d].stride, t->bytes) == lk_count(*other->dim[d].stride, other->bytes);
    return same;
}

/* Checks the strides of a tensor and fills in those that are 0, or of a dimension of one element: packed, or, in place of
 * `other`, its strides. Fails if one is negative, does not fit `other`, spans too much, or makes elements overlap. */
LK_HOST void lk_check_stride(lk_checks *checks, const lk_tensor *t, const lk_tensor *other)
{
    if (lk_rejected(checks, LK_ERR_SHAPE)) return;
    __extension__ typedef __int128 wide;
    const wide limit = (wide)1 << 62;
    wide packed = t->width, span = t->width;
    if (span > limit) return lk_reject(checks, LK_ERR_SHAPE, "%s has more than 2^62 elements", t->name);
    for (int d = 2; d >= 0; d--) {
        const lk_dim dim = t->dim[d];
        if (!dim.stride) continue;
        const int64_t given = *dim.stride;
        if (given < 0) return lk_reject(checks, LK_ERR_SHAPE, "%s is %lld; it must be at least 0", dim.name, (long long)given);
        const wide same = other ? (wide)*other->dim[d].stride * other->bytes / t->bytes : packed;
        if (given == 0 || dim.size <= 1) *dim.stride = (int64_t)(same < limit ? same : limit);
        else if (other && given != same)
            return lk_reject(checks, LK_ERR_SHAPE, "%s is %s, so %s must be 0 or %lld; it is %lld", t->name, other->name, dim.name,
                             (long long)same, (long long)given);
        packed = (wide)*dim.stride * (dim.size > 1 ? dim.size : 1);
        span += (wide)*dim.stride * (dim.size > 1 ? dim.size - 1 : 0);
        if (packed > limit || span > limit)
            return lk_reject(checks, LK_ERR_SHAPE, "%s spans more than 2^62 elements; %s is %lld", t->name, dim.name,
                             (long long)given);
    }
    wide reach = t->width; /* of the dimensions seen, by rising stride */
    bool seen[3] = {};
    for (int round = 0; round < 3 && !(t->use & LK_MAY_OVERLAP) && lk_has_elements(t); round++) {
        int next = -1;
        for (int d = 2; d >= 0; d--)
            if (t->dim[d].stride && t->dim[d].size > 1 && !seen[d] && (next < 0 || *t->dim[d].stride < *t->dim[next].stride))
                next = d;
        if (next < 0) break;
        const lk_dim dim = t->dim[next];
        if (*dim.stride < reach)
            return lk_reject(checks, LK_ERR_SHAPE, "%s is %lld; it must be 0 or at least %lld, or elements of %s overlap", dim.name,
                             (long long)*dim.stride, (long long)reach, t->name);
        reach += (wide)*dim.stride * (dim.size - 1);
        seen[next] = true;
    }
}

/* Fails if a tensor is larger than memory can be, or an output overlaps another tensor for certain: the same pointer, or ranges
 * without gaps that intersect. Rows with gaps between them may lie in each other's gaps. */
LK_HOST void lk_check_overlap(lk_checks *checks, const lk_tensor *list, int count)
{
    if (lk_rejected(checks, LK_ERR_SHAPE)) return;
    struct {
        const lk_tensor *tensor;
        uintptr_t first, end;
        bool dense;
    } range[40];
    int n = 0;
    for (int i = 0; i < count && n < LK_COUNT(range); i++) {
        const lk_tensor *const t = &list[i];
        if (!t->pointer || !lk_has_elements(t)) continue;
        const int64_t span = lk_span(t);
        if (lk_count(span, t->bytes) > (int64_t)1 << 62)
            return lk_reject(checks, LK_ERR_SHAPE, "%s spans more than 2^62 bytes", t->name);
        int64_t elements = t->width;
        for (int d = 0; d < 3; d++)
            if (t->dim[d].stride) elements = lk_count(elements, t->dim[d].size); /* may be more than the span */
        const uintptr_t first = (uintptr_t)t->pointer;
        range[n++] = {t, first, first + (uintptr_t)span * (uintptr_t)t->bytes, elements == span};
        for (int j = 0; j < n - 1; j++) {
            if (!((t->use | range[j].tensor->use) & (LK_OUT | LK_SCRATCH))) continue;
            if (first >= range[j].end || range[j].first >= range[n - 1].end) continue;
            const bool same = first == range[j].first, dense = range[j].dense && range[n - 1].dense;
            if (same ? !lk_may_be(t, range[j].tensor) || !lk_same_rows(t, range[j].tensor) : dense)
                return lk_reject(checks, LK_ERR_SHAPE, "%s and %s overlap", t->name, range[j].tensor->name);
        }
    }
}

/* The shapes of all tensors, once the sizes are checked, and what is NULL. query: pointers mean nothing. */
LK_HOST void lk_check_shapes(lk_checks *checks, const lk_tensor *list, int count, bool query)
{
    if (!query) lk_check_null(checks, list, count);
    for (int i = 0; i < count; i++) lk_check_stride(checks, &list[i], query ? NULL : lk_in_place_of(list, &list[i]));
    if (!query) lk_check_overlap(checks, list, count);
}

/* Fails unless the number is good. rule: the end of the sentence "it must be ...". */
LK_HOST void lk_check_number(lk_checks *checks, const char *name, double number, bool good, const char *rule)
{
    if (!good) lk_reject(checks, LK_ERR_VALUE, "%s is %g; it must be %s", name, number, rule);
}

/* Fails unless value is 0 to most. names: the enum's, for example LK_REDUCTION_*. */
LK_HOST void lk_check_enum(lk_checks *checks, const char *name, int value, int most, const char *names)
{
    if (value < 0 || value > most) lk_reject(checks, LK_ERR_VALUE, "%s is %d; it must be one of %s", name, value, names);
}

/* Fails if a field is given that this call does not take. why: the end of the sentence. */
LK_HOST void lk_check_absent(lk_checks *checks, const char *name, bool given, const char *why)
{
    if (given) lk_reject(checks, LK_ERR_VALUE, "%s is given; %s", name, why);
}

/* A <tensor>_dtype that may be T or f32. */
template <class T> LK_HOST void lk_check_dtype(lk_checks *checks, const char *name, int dtype)
{
    if (dtype != LK_DTYPE_T && dtype != LK_DTYPE_F32 && dtype != lk_dtype<T>)
        lk_reject(checks, LK_ERR_VALUE, "%s is %d; it must be T (0) or f32 (%d)", name, dtype, LK_DTYPE_F32);
}

/* Fails if these are too many rows for a path with a block or more per row: more than LK_TEAM_ROWS. */
LK_HOST void lk_check_rows(lk_checks *checks, int path, bool too_many, const char *name, int64_t rows)
{
    if (too_many) lk_reject(checks, LK_ERR_PATH, "path %d takes 2^27 rows at most; %s is %lld", path, name, (long long)rows);
}

/* Fails for more rows than LK_TEAM_ROWS, which have teams of their own. */
LK_HOST void lk_check_invariant(lk_checks *checks, bool too_many, int64_t rows)
{
    if (too_many) lk_reject(checks, LK_ERR_PATH, "batch_invariant takes 2^27 rows at most; rows is %lld", (long long)rows);
}

/* Fails if a path needs clusters and the code has none. */
LK_HOST void lk_check_cluster(lk_checks *checks, int path, bool lacks)
{
    if (lacks) lk_reject(checks, LK_ERR_PATH, "path %d (cluster) needs code for sm_90 or later", path);
}

LK_HOST void lk_check_alignment(lk_checks *checks, const lk_tensor *list, int count)
{
    if (lk_rejected(checks, LK_ERR_ALIGNMENT)) return;
    for (int i = 0; i < count; i++)
        if ((uintptr_t)list[i].pointer % (unsigned)list[i].bytes)
            return lk_reject(checks, LK_ERR_ALIGNMENT, "%s is not aligned to its element of %d bytes", list[i].name, list[i].bytes);
}

/* Whether a workspace will do for a call that needs `needed` bytes. */
LK_HOST void lk_check_workspace(lk_checks *checks, const void *workspace, size_t given, size_t needed)
{
    if (checks->arch == LK_QUERY || !needed || lk_rejected(checks, LK_ERR_WORKSPACE)) return;
    if (!workspace) return lk_reject(checks, LK_ERR_WORKSPACE, "workspace is NULL; this call needs %zu bytes", needed);
    if (given < needed) return lk_reject(checks, LK_ERR_WORKSPACE, "workspace_bytes is %zu; this call needs %zu", given, needed);
    if ((uintptr_t)workspace % LK_WORKSPACE_ALIGNMENT)
        return lk_reject(checks, LK_ERR_WORKSPACE, "workspace is not aligned to %d bytes", LK_WORKSPACE_ALIGNMENT);
}

/* Compiled with -DLK_CHECK every launcher calls this before it launches, to find wrong pointers where they are made; otherwise
 * it is empty. An error: memory of the host or of another device, and a tensor that ends behind the allocation it begins in. A
 * line on stderr: an allocation of exactly twice the tensor, which may be f32 data given to a function of 16 bits. It sees
 * CUDA's allocations; a framework's pool of memory is one large allocation and hides its tensors. */
LK_HOST void lk_check_allocations(lk_checks *checks, const lk_tensor *list, int count)
{
    if (checks->status) return;
    (void)list, (void)count;
#if defined(LK_CHECK)
    typedef int range_function(uintptr_t *base, size_t *bytes, uintptr_t pointer); /* CUresult (CUdeviceptr *, ...) */
    void *found = NULL;
    int current = 0;
    cudaError_t error = cudaGetDevice(&current);
    if (!error) error = lk_driver_function("cuMemGetAddressRange", &found);
    if (error) return lk_check_device(checks, error);
    for (int i = 0; i < count; i++) {
        const lk_tensor *const t = &list[i];
        const int64_t elements = lk_span(t);
        if (!t->pointer || elements == 0) continue;
        cudaPointerAttributes about = {};
        error = cudaPointerGetAttributes(&about, t->pointer);
        if (error) return lk_check_device(checks, error);
        if (about.type == cudaMemoryTypeUnregistered || about.type == cudaMemoryTypeHost)
            return lk_reject(checks, LK_ERR_VALUE, "%s is a pointer to host memory; it must be memory of the device", t->name);
        if (about.type == cudaMemoryTypeDevice && about.device != current)
            return lk_reject(checks, LK_ERR_VALUE, "%s lies on device %d; the current device is %d", t->name, about.device,
                             current);
        uintptr_t base = 0;
        size_t all = 0;
        if (!found || ((range_function *)found)(&base, &all, (uintptr_t)t->pointer)) continue;
        const size_t left = all - (size_t)((uintptr_t)t->pointer - base), needed = (size_t)elements * (size_t)t->bytes;
        if (needed > left)
            return lk_reject(checks, LK_ERR_SHAPE,
                             "%s needs %zu bytes, %lld elements of %d, but its allocation ends after %zu; are its sizes, its "
                             "stride and its type right?", t->name, needed, (long long)elements, t->bytes, left);
        if (t->bytes == 2 && left == all && left == 2 * needed)
            fprintf(stderr, "%s: %s is an allocation of %zu bytes, twice what %lld elements of 2 bytes take; is it f32?\n",
                    checks->op, t->name, all, (long long)elements);
    }
#endif
}

/* The last checks, of what a query has not: pointers and a device. */
LK_HOST void lk_check_end(lk_checks *checks, const lk_tensor *list, int count)
{
    if (checks->arch == LK_QUERY) return;
    lk_check_alignment(checks, list, count);
    lk_check_allocations(checks, list, count);
    lk_check_device(checks, checks->asked);
}

/* With -DLK_CHECK a line on stderr about a call that is allowed and seldom intended. */
LK_HOST void lk_check_warn(const lk_checks *checks, bool suspect, const char *sentence)
{
    (void)checks, (void)suspect, (void)sentence;
#if defined(LK_CHECK)
    if (suspect && !checks->status && checks->arch != LK_QUERY) fprintf(stderr, "%s: %s\n", checks->op, sentence);
#endif
}

#endif /* __CUDACC__ || LK_SIMT */

#endif /* LK_CHECK_CUH */
