// SPDX-License-Identifier: MIT
// The CUDA runtime calls of the simulator: memory, launches and their checks, streams, events, graphs, the device it claims to be.
// Everything runs at the call; a stream being captured collects closures instead, which cudaGraphLaunch runs.
#include "cuda_runtime.h"
#include "cudaTypedefs.h"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

typedef std::function<cudaError_t()> step;

struct CUgraph_st { std::vector<step> steps; };
struct CUgraphExec_st { std::vector<step> steps; };
struct CUevent_st { double ms; int timed, recorded; };
struct CUstream_st {
    cudaGraph_t capture;                // NULL unless being captured
    cudaStreamCaptureMode mode;
    int invalidated;
};

enum { THREADS_PER_SM = 2048, BLOCKS_PER_SM = 32, BLOCK_SHARED_BYTES = 48 << 10 };

struct kernel_options { int dynamic_bytes, opted_in, big_cluster; };

static std::recursive_mutex state_mutex;
static std::map<uintptr_t, size_t> allocations;         // by the complement of the address, so that LeakSanitizer still sees leaks
static size_t allocated_bytes;
static std::map<const void *, kernel_options> kernels;
static std::vector<cudaStream_t> capturing;
static __thread cudaError_t last_error;

#define LOCK std::lock_guard<std::recursive_mutex> lock(state_mutex)

static cudaError_t note(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

static int environment_number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? (int)strtol(text, NULL, 0) : otherwise;
}

int simt_poison_byte(void) {
    static int byte = environment_number("SIMT_POISON", 0xFF);
    return byte;
}

static int sm_shared_bytes(void) {
    static int kib = environment_number("SIMT_SMEM", 228);
    return kib << 10;
}

static int optin_shared_bytes(void) {
    return sm_shared_bytes() - 1024;
}

static int device_sms(void) {
    static int count = environment_number("SIMT_SMS", 4);
    return count;
}

/* ---- errors -------------------------------------------------------------------------------------------------------------------------------- */

static const struct { cudaError_t error; const char *name, *text; } error_table[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorCooperativeLaunchTooLarge, "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "the capture was not initiated in this stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorInvalidClusterSize, "cudaErrorInvalidClusterSize", "cluster misconfiguration"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorName(cudaError_t error) {
    for (auto &e : error_table) if (e.error == error) return e.name;
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (auto &e : error_table) if (e.error == error) return e.text;
    return "unrecognized error code";
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

/* The kernel's name from the executable's own symbol table, which has static functions too; only reports ask. */
static int note_base(struct dl_phdr_info *info, size_t, void *base) {
    *(uintptr_t *)base = info->dlpi_addr;
    return 1;                                           // the first object is the executable
}
std::string simt_symbol_name(const void *address) {
    std::string found = "?";
    uintptr_t base = 0;
    dl_iterate_phdr(note_base, &base);
    FILE *f = fopen("/proc/self/exe", "rb");
    if (!f) return found;
    Elf64_Ehdr header;
    std::vector<Elf64_Shdr> sections;
    if (fread(&header, sizeof header, 1, f) == 1 && !fseek(f, header.e_shoff, SEEK_SET)) {
        sections.resize(header.e_shnum);
        if (fread(sections.data(), sizeof(Elf64_Shdr), sections.size(), f) != sections.size()) sections.clear();
    }
    for (const Elf64_Shdr &s : sections) {
        if (s.sh_type != SHT_SYMTAB) continue;
        std::vector<Elf64_Sym> symbols(s.sh_size / sizeof(Elf64_Sym));
        std::vector<char> names(sections[s.sh_link].sh_size + 1);
        fseek(f, s.sh_offset, SEEK_SET);
        if (fread(symbols.data(), sizeof(Elf64_Sym), symbols.size(), f) != symbols.size()) break;
        fseek(f, sections[s.sh_link].sh_offset, SEEK_SET);
        if (fread(names.data(), 1, names.size() - 1, f) != names.size() - 1) break;
        for (const Elf64_Sym &symbol : symbols) {
            if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || base + symbol.st_value != (uintptr_t)address) continue;
            int status = 0;
            char *plain = abi::__cxa_demangle(&names[symbol.st_name], NULL, NULL, &status);
            found = plain ? plain : &names[symbol.st_name];
            free(plain);
        }
    }
    fclose(f);
    return found;
}

/* ---- streams and capture -------------------------------------------------------------------------------------------------------------------- */

static bool is_default(cudaStream_t stream) { return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread; }

/* Runs the step now, or records it where the stream is being captured. */
static cudaError_t enqueue(cudaStream_t stream, const step &what) {
    {
        LOCK;
        if (!is_default(stream) && stream->capture) {
            if (stream->invalidated) return note(cudaErrorStreamCaptureInvalidated);
            stream->capture->steps.push_back(what);
            return cudaSuccess;
        }
        if (is_default(stream) && stream != cudaStreamPerThread && !capturing.empty()) {
            for (cudaStream_t s : capturing) s->invalidated = 1;
            return note(cudaErrorStreamCaptureImplicit);
        }
    }
    return note(what());
}

/* For calls that CUDA forbids while any stream is being captured: they spoil the capture. */
static cudaError_t outside_capture(void) {
    LOCK;
    cudaError_t error = cudaSuccess;
    for (cudaStream_t s : capturing) {
        if (s->mode == cudaStreamCaptureModeRelaxed) continue;
        s->invalidated = 1;
        error = cudaErrorStreamCaptureUnsupported;
    }
    return note(error);
}

static cudaError_t synchronize_stream(cudaStream_t stream) {
    LOCK;
    if (is_default(stream)) return outside_capture();
    if (!stream->capture) return cudaSuccess;
    stream->invalidated = 1;
    return note(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    *stream = new CUstream_st();
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (is_default(stream)) return note(cudaErrorInvalidResourceHandle);
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return synchronize_stream(stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return synchronize_stream(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return outside_capture(); }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    LOCK;
    if (is_default(stream)) return note(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return note(cudaErrorInvalidValue);
    stream->capture = new CUgraph_st();
    stream->mode = mode;
    stream->invalidated = 0;
    capturing.push_back(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    LOCK;
    *graph = NULL;
    if (is_default(stream) || !stream->capture) return note(cudaErrorStreamCaptureUnmatched);
    for (size_t i = 0; i < capturing.size(); i++)
        if (capturing[i] == stream) capturing.erase(capturing.begin() + i--);
    cudaGraph_t captured = stream->capture;
    stream->capture = NULL;
    if (stream->invalidated) {
        delete captured;
        return note(cudaErrorStreamCaptureInvalidated);
    }
    *graph = captured;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    LOCK;
    *status = is_default(stream) || !stream->capture ? cudaStreamCaptureStatusNone
              : stream->invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    if (!graph) return note(cudaErrorInvalidValue);
    *executable = new CUgraphExec_st{graph->steps};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    if (!executable) return note(cudaErrorInvalidValue);
    for (const step &s : executable->steps) {
        cudaError_t error = enqueue(stream, s);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes) return note(cudaErrorNotSupported);
    *count = graph->steps.size();
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return cudaSuccess;
}

/* ---- events ----------------------------------------------------------------------------------------------------------------------------------- */

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new CUevent_st{0, !(flags & cudaEventDisableTiming), 0};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return enqueue(stream, [=] {
        event->ms = now_ms();
        event->recorded = 1;
        return cudaSuccess;
    });
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return outside_capture(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return outside_capture(); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    if (!from->timed || !to->timed || !from->recorded || !to->recorded) return note(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(to->ms - from->ms);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

/* ---- memory ----------------------------------------------------------------------------------------------------------------------------------- */

static cudaError_t allocate(void **pointer, size_t bytes) {
    *pointer = NULL;
    if (!bytes) return cudaSuccess;
    // Exactly `bytes`: ASan then catches the first byte beyond.
    if (bytes > (size_t)1 << 46 || posix_memalign(pointer, 256, bytes)) return note(cudaErrorMemoryAllocation);
    memset(*pointer, simt_poison_byte(), bytes);
    LOCK;
    allocations[~(uintptr_t)*pointer] = bytes;
    allocated_bytes += bytes;
    return cudaSuccess;
}
static cudaError_t deallocate(void *pointer) {
    if (!pointer) return cudaSuccess;
    {
        LOCK;
        auto it = allocations.find(~(uintptr_t)pointer);
        if (it == allocations.end()) return note(cudaErrorInvalidValue);
        allocated_bytes -= it->second;
        allocations.erase(it);
    }
    free(pointer);
    return cudaSuccess;
}
/* A range that starts in an allocation of ours ends in it. Other ranges are the host's. */
static bool range_fits(const void *at, size_t bytes) {
    LOCK;
    auto it = allocations.lower_bound(~(uintptr_t)at);      // the largest address at or below
    if (it == allocations.end()) return true;
    uintptr_t base = ~it->first;
    if ((uintptr_t)at >= base + it->second) return true;
    return (uintptr_t)at + bytes <= base + it->second;
}
bool simt_range_fits(const void *at, size_t bytes) { return range_fits(at, bytes); }
cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    cudaError_t error = outside_capture();
    return error ? error : allocate(pointer, bytes);
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFree(void *pointer) {
    cudaError_t error = outside_capture();
    return error ? error : deallocate(pointer);
}
cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return cudaFree(pointer); }

static cudaError_t copy_now(void *to, const void *from, size_t bytes) {
    if (!range_fits(to, bytes) || !range_fits(from, bytes) || (bytes && (!to || !from))) return cudaErrorInvalidValue;
    memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind) {
    cudaError_t error = outside_capture();
    return error ? error : note(copy_now(to, from, bytes));
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind, cudaStream_t stream) {
    return enqueue(stream, [=] { return copy_now(to, from, bytes); });
}
static cudaError_t set_now(void *at, int value, size_t bytes) {
    if (!range_fits(at, bytes) || (bytes && !at)) return cudaErrorInvalidValue;
    memset(at, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *at, int value, size_t bytes) {
    cudaError_t error = outside_capture();
    return error ? error : note(set_now(at, value, bytes));
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    return enqueue(stream, [=] { return set_now(at, value, bytes); });
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    LOCK;
    *total_bytes = (size_t)8 << 30;
    *free_bytes = *total_bytes > allocated_bytes ? *total_bytes - allocated_bytes : 0;
    return cudaSuccess;
}

/* ---- the device ------------------------------------------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return note(device ? cudaErrorInvalidDevice : cudaSuccess); }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (device) return note(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = BLOCK_SHARED_BYTES; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1000000; break;
    case cudaDevAttrMultiProcessorCount: *value = device_sms(); break;
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 64; break;
    case cudaDevAttrL2CacheSize: *value = 1 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS_PER_SM; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = sm_shared_bytes(); break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = optin_shared_bytes(); break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = BLOCKS_PER_SM; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrClusterLaunch: *value = 1; break;
    default: return note(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device) return note(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "simulator");
    p->totalGlobalMem = (size_t)8 << 30;
    p->sharedMemPerBlock = BLOCK_SHARED_BYTES;
    p->sharedMemPerMultiprocessor = sm_shared_bytes();
    p->sharedMemPerBlockOptin = optin_shared_bytes();
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->major = 9;
    p->minor = 0;
    p->multiProcessorCount = device_sms();
    p->l2CacheSize = 1 << 20;
    p->maxThreadsPerMultiProcessor = THREADS_PER_SM;
    p->memoryBusWidth = 64;
    p->cooperativeLaunch = p->clusterLaunch = 1;
    p->maxBlocksPerMultiProcessor = BLOCKS_PER_SM;
    return cudaSuccess;
}

/* ---- tensor maps ------------------------------------------------------------------------------------------------------- */

static_assert(sizeof(simt_tensor) <= sizeof(CUtensorMap), "a map holds its description");

/* Checks what CUDA's documentation demands, and refuses as not supported what it allows and the engine does not know. */
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
    t.magic = SIMT_TENSOR_MAGIC;
    t.base = (char *)address;
    t.rank = rank;
    t.type = type;
    t.span = spans[swizzle];
    memset(map, 0, sizeof *map);
    memcpy(map, &t, sizeof t);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_tiled;
    if (!symbol || !function || flags > cudaEnablePerThreadDefaultStream) return note(cudaErrorInvalidValue);
    const bool known = !strcmp(symbol, "cuTensorMapEncodeTiled"), old = version < 12000;
    *function = known && !old ? (void *)encode : NULL;
    if (result)
        *result = !known ? cudaDriverEntryPointSymbolNotFound
                  : old ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- kernels: attributes, occupancy, launch ------------------------------------------------------------------------------------------------- */

cudaError_t simt_func_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    LOCK;
    kernel_options &k = kernels[kernel];
    switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
        if (value < 0 || value > optin_shared_bytes()) return note(cudaErrorInvalidValue);
        k.dynamic_bytes = value;
        k.opted_in = 1;
        return cudaSuccess;
    case cudaFuncAttributeNonPortableClusterSizeAllowed:
        k.big_cluster = value;
        return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
        return cudaSuccess;
    }
    return note(cudaErrorInvalidValue);
}

static kernel_options options_of(const void *kernel) {
    LOCK;
    auto it = kernels.find(kernel);
    return it == kernels.end() ? kernel_options{BLOCK_SHARED_BYTES, 0, 0} : it->second.opted_in ? it->second
           : kernel_options{BLOCK_SHARED_BYTES, 0, it->second.big_cluster};
}

/* What a kernel's static shared memory takes is known only when it runs: 0 here. */
cudaError_t simt_func_get_attributes(struct cudaFuncAttributes *a, const void *kernel) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->ptxVersion = environment_number("SIMT_CODE", 90);
    a->binaryVersion = 90;
    if (a->ptxVersion > 90) return note(cudaErrorNoKernelImageForDevice);
    a->maxDynamicSharedSizeBytes = options_of(kernel).dynamic_bytes;
    return cudaSuccess;
}

cudaError_t simt_max_active_blocks(int *blocks, int threads, size_t dynamic_bytes) {
    if (threads < 1) return note(cudaErrorInvalidValue);
    size_t by_threads = threads > 1024 ? 0 : THREADS_PER_SM / ((threads + 31) / 32 * 32);
    size_t by_memory = dynamic_bytes > (size_t)optin_shared_bytes() ? 0 : sm_shared_bytes() / (dynamic_bytes + 1024);
    size_t most = by_threads < by_memory ? by_threads : by_memory;
    *blocks = most < BLOCKS_PER_SM ? (int)most : BLOCKS_PER_SM;
    return cudaSuccess;
}

static cudaError_t check_launch(const cudaLaunchConfig_t *c, const void *kernel, simt_launch_shape *shape) {
    dim3 grid = c->grid_, block = c->block_, cluster(1, 1, 1);
    kernel_options k = options_of(kernel);
    int cooperative = 0;
    for (unsigned i = 0; i < c->numAttrs; i++) {
        const cudaLaunchAttribute *a = &c->attrs[i];
        if (a->id == cudaLaunchAttributeClusterDimension) cluster = dim3(a->val.clusterDim.x, a->val.clusterDim.y, a->val.clusterDim.z);
        else if (a->id == cudaLaunchAttributeCooperative) cooperative = a->val.cooperative;
        else if (a->id != cudaLaunchAttributeIgnore && a->id != cudaLaunchAttributeProgrammaticStreamSerialization) return cudaErrorInvalidValue;
    }
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
    unsigned long long threads = (unsigned long long)block.x * block.y * block.z;
    if (!threads || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) return cudaErrorInvalidConfiguration;
    unsigned long long blocks = (unsigned long long)cluster.x * cluster.y * cluster.z;
    if (!blocks || blocks > 16 || (blocks > 8 && !k.big_cluster)) return cudaErrorInvalidClusterSize;
    if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z) return cudaErrorInvalidClusterSize;
    if (c->dynamicSmemBytes > (size_t)k.dynamic_bytes) return cudaErrorInvalidValue;
    if (cooperative) {
        int each = 0;
        simt_max_active_blocks(&each, (int)threads, c->dynamicSmemBytes);
        if ((unsigned long long)grid.x * grid.y * grid.z > (unsigned long long)each * device_sms()) return cudaErrorCooperativeLaunchTooLarge;
    }
    *shape = {kernel, grid, block, cluster, c->dynamicSmemBytes, k.opted_in};
    return cudaSuccess;
}

cudaError_t simt_max_active_clusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config) {
    simt_launch_shape s;
    cudaError_t error = check_launch(config, kernel, &s);
    if (error) return note(error);
    int each = 0;
    simt_max_active_blocks(&each, (int)(s.block.x * s.block.y * s.block.z), s.dynamic_bytes);
    *clusters = each * device_sms() / (int)(s.cluster.x * s.cluster.y * s.cluster.z);
    return cudaSuccess;
}

cudaError_t simt_launch(const cudaLaunchConfig_t *config, const void *kernel, const std::function<void()> &body) {
    simt_launch_shape shape;
    cudaError_t error = check_launch(config, kernel, &shape);
    if (error) return note(error);
    return enqueue(config->stream, [=] { return simt_run(&shape, body) ? cudaErrorLaunchFailure : cudaSuccess; });
}
