// SPDX-License-Identifier: MIT
// The CUDA runtime calls of the simulator: memory, launches and their checks, streams, events, graphs, the simulated device.
// Everything runs at the call. While a stream is being captured it collects closures instead, which cudaGraphLaunch runs.
#include "cuda_runtime.h"
#include "cudaTypedefs.h"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

typedef std::function<cudaError_t()> step;

struct needed { const void *kernel; int device; size_t dynamic_bytes; };    // what a kernel in a graph was captured with
struct CUgraph_st { std::vector<step> steps; std::vector<needed> kernels; };
struct CUgraphExec_st { std::vector<step> steps; std::vector<needed> kernels; };
struct CUevent_st { double ms; int timed, recorded; };
struct CUstream_st {
    int device;                         // the current one when it was made
    cudaGraph_t capture;                // NULL unless being captured
    cudaStreamCaptureMode mode;
    const void *thread;                 // that began the capture: the address of its last_error
    int invalidated;
};

enum { THREADS_PER_SM = 2048, BLOCKS_PER_SM = 32, BLOCK_SHARED_BYTES = 48 << 10, MOST_DEVICES = 8 };

struct kernel_options { int dynamic_bytes, opted_in, big_cluster; };
struct allocation { size_t bytes; int device, host; };

static simt_mutex state_mutex;
static std::map<uintptr_t, allocation> allocations;     // by the complement of the address, so that LeakSanitizer still sees leaks
static size_t allocated_bytes;
static std::map<std::pair<int, const void *>, kernel_options> kernels; // of each device
static std::vector<cudaStream_t> capturing;
static __thread cudaError_t last_error;
static __thread int current_device;
static __thread cudaStreamCaptureMode thread_mode;

#define LOCK std::lock_guard<simt_mutex> lock(state_mutex)

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

static int device_count(void) {
    static int count = environment_number("SIMT_DEVICES", 1);
    return count < 1 ? 1 : count > MOST_DEVICES ? MOST_DEVICES : count;
}

/* Devices with odd numbers are older: compute capability 8.0, more multiprocessors, with less shared memory. */
static bool older(int device) { return device % 2; }

static int sm_shared_bytes(int device) {
    static int kib = environment_number("SIMT_SMEM", 228);
    return older(device) ? 100 << 10 : kib << 10;
}

static int optin_shared_bytes(int device) {
    return sm_shared_bytes(device) - 1024;
}

static int device_sms(int device) {
    static int count = environment_number("SIMT_SMS", 4);
    return count + (older(device) ? 3 : 0);
}

static int device_code(int device) {
    const int code = environment_number("SIMT_CODE", 90); // again each time: tests change it
    return older(device) && code > 80 ? 80 : code;
}

/* ---- errors ---------------------------------------------------------------------------------------------------------- */

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
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
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

/* ---- streams and capture --------------------------------------------------------------------------------------------- */

static bool is_default(cudaStream_t stream) { return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread; }

/* SIMT_PLAN=1: streams run nothing, and launches are printed. */
bool simt_plans(void) {
    static const int number = environment_number("SIMT_PLAN", 0);
    return number != 0;
}

/* Runs the step now, or records it where the stream is being captured. */
static cudaError_t enqueue(cudaStream_t stream, const step &what) {
    if (simt_plans()) return cudaSuccess;
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

/* For calls that CUDA forbids during a capture of mode Global, from any thread, and during one of this thread that is not
   Relaxed; less where cudaThreadExchangeStreamCaptureMode says so. They spoil the capture. */
static cudaError_t outside_capture(void) {
    LOCK;
    cudaError_t error = cudaSuccess;
    for (cudaStream_t s : capturing) {
        const bool mine = s->thread == &last_error && s->mode != cudaStreamCaptureModeRelaxed;
        if (thread_mode == cudaStreamCaptureModeRelaxed) continue;
        if (!mine && (thread_mode != cudaStreamCaptureModeGlobal || s->mode != cudaStreamCaptureModeGlobal)) continue;
        s->invalidated = 1;
        error = cudaErrorStreamCaptureUnsupported;
    }
    return note(error);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    if (!mode || *mode > cudaStreamCaptureModeRelaxed) return note(cudaErrorInvalidValue);
    std::swap(*mode, thread_mode);
    return cudaSuccess;
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
    (*stream)->device = current_device;
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
    stream->thread = &last_error;
    stream->invalidated = 0;
    capturing.push_back(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    LOCK;
    *graph = NULL;
    if (is_default(stream) || !stream->capture) return note(cudaErrorStreamCaptureUnmatched);
    if (stream->mode != cudaStreamCaptureModeRelaxed && stream->thread != &last_error) return note(cudaErrorStreamCaptureWrongThread);
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
static kernel_options options_of(int device, const void *kernel);
/* A kernel's limit of dynamic shared memory is still what it was captured with, or more. CUDA does not promise a check at each
   of these two places, so a program that lowers a limit cannot rely on it. */
static bool limits_hold(const std::vector<needed> &list) {
    for (const needed &n : list)
        if (n.dynamic_bytes > (size_t)options_of(n.device, n.kernel).dynamic_bytes) return false;
    return true;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    if (!graph || !limits_hold(graph->kernels)) return note(cudaErrorInvalidValue);
    *executable = new CUgraphExec_st{graph->steps, graph->kernels};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    if (!executable || !limits_hold(executable->kernels)) return note(cudaErrorInvalidValue);
    for (const step &s : executable->steps) {
        cudaError_t error = enqueue(stream, s);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t) {
    return executable ? cudaSuccess : note(cudaErrorInvalidValue);
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

/* ---- events ---------------------------------------------------------------------------------------------------------- */

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

/* ---- memory ---------------------------------------------------------------------------------------------------------- */

static cudaError_t allocate(void **pointer, size_t bytes, int host) {
    *pointer = NULL;
    if (!bytes) return cudaSuccess;
    // Exactly `bytes`: ASan then catches the first byte beyond.
    if (bytes > (size_t)1 << 46 || posix_memalign(pointer, 256, bytes)) return note(cudaErrorMemoryAllocation);
    memset(*pointer, simt_poison_byte(), bytes);
    LOCK;
    allocations[~(uintptr_t)*pointer] = {bytes, current_device, host};
    allocated_bytes += bytes;
    return cudaSuccess;
}
static cudaError_t deallocate(void *pointer) {
    if (!pointer) return cudaSuccess;
    {
        LOCK;
        auto it = allocations.find(~(uintptr_t)pointer);
        if (it == allocations.end()) return note(cudaErrorInvalidValue);
        allocated_bytes -= it->second.bytes;
        allocations.erase(it);
    }
    free(pointer);
    return cudaSuccess;
}
/* The allocation of ours that `at` lies in; its bytes are 0 if there is none. */
static allocation allocation_of(const void *at, uintptr_t *base) {
    LOCK;
    auto it = allocations.lower_bound(~(uintptr_t)at);      // the largest address at or below
    *base = it == allocations.end() ? 0 : ~it->first;
    return it == allocations.end() || (uintptr_t)at >= *base + it->second.bytes ? allocation{0, 0, 0} : it->second;
}
/* A range that starts in an allocation of ours ends in it. Other ranges are the host's. */
static bool range_fits(const void *at, size_t bytes) {
    uintptr_t base;
    const allocation a = allocation_of(at, &base);
    return !a.bytes || (uintptr_t)at + bytes <= base + a.bytes;
}
bool simt_range_fits(const void *at, size_t bytes) { return range_fits(at, bytes); }
cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    cudaError_t error = outside_capture();
    return error ? error : allocate(pointer, bytes, 0);
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    cudaError_t error = outside_capture();
    return error ? error : allocate(pointer, bytes, 1);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer) {
    uintptr_t base;
    const allocation of = allocation_of(pointer, &base);
    if (!a) return note(cudaErrorInvalidValue);
    *a = {of.bytes ? of.host ? cudaMemoryTypeHost : cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, of.bytes ? of.device : -2,
          of.bytes ? (void *)pointer : NULL, of.bytes && !of.host ? NULL : (void *)pointer};
    return cudaSuccess;
}
static CUresult address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
    uintptr_t from;
    const allocation of = allocation_of((const void *)pointer, &from);
    if (!of.bytes || of.host) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = from;
    if (bytes) *bytes = of.bytes;
    return CUDA_SUCCESS;
}
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
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind) {
    cudaError_t error = width > to_pitch || width > from_pitch ? cudaErrorInvalidValue : outside_capture();
    for (size_t row = 0; row < height && !error; row++)
        error = copy_now((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return note(error);
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
cudaError_t cudaMemset2DAsync(void *at, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
    return enqueue(stream, [=] {
        cudaError_t error = cudaSuccess;
        for (size_t row = 0; row < height && !error; row++) error = set_now((char *)at + row * pitch, value, width);
        return error;
    });
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    LOCK;
    *total_bytes = (size_t)8 << 30;
    *free_bytes = *total_bytes > allocated_bytes ? *total_bytes - allocated_bytes : 0;
    return cudaSuccess;
}

/* ---- the device ------------------------------------------------------------------------------------------------------ */

static bool no_such_device(int device) { return device < 0 || device >= device_count(); }
cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (no_such_device(device)) return note(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) { *count = device_count(); return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (no_such_device(device)) return note(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = BLOCK_SHARED_BYTES; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1000000; break;
    case cudaDevAttrMultiProcessorCount: *value = device_sms(device); break;
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 64; break;
    case cudaDevAttrL2CacheSize: *value = 1 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS_PER_SM; break;
    case cudaDevAttrComputeCapabilityMajor: *value = older(device) ? 8 : 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = sm_shared_bytes(device); break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = optin_shared_bytes(device); break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = BLOCKS_PER_SM; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrClusterLaunch: *value = !older(device); break;
    default: return note(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (no_such_device(device)) return note(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "simulator");
    p->totalGlobalMem = (size_t)8 << 30;
    p->sharedMemPerBlock = BLOCK_SHARED_BYTES;
    p->sharedMemPerMultiprocessor = sm_shared_bytes(device);
    p->sharedMemPerBlockOptin = optin_shared_bytes(device);
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->major = older(device) ? 8 : 9;
    p->minor = 0;
    p->multiProcessorCount = device_sms(device);
    p->l2CacheSize = 1 << 20;
    p->maxThreadsPerMultiProcessor = THREADS_PER_SM;
    p->memoryBusWidth = 64;
    p->cooperativeLaunch = 1;
    p->clusterLaunch = !older(device);
    p->maxBlocksPerMultiProcessor = BLOCKS_PER_SM;
    return cudaSuccess;
}

/* ---- functions of the driver ----------------------------------------------------------------------------------------- */

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    if (!symbol || !function || flags > cudaEnablePerThreadDefaultStream) return note(cudaErrorInvalidValue);
    const bool range = !strcmp(symbol, "cuMemGetAddressRange"), known = range || !strcmp(symbol, "cuTensorMapEncodeTiled");
    const bool old = version < (range ? 3020 : 12000);
    *function = !known || old ? NULL : range ? (void *)address_range : simt_tensor_encoder();
    if (result)
        *result = !known ? cudaDriverEntryPointSymbolNotFound
                  : old ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- kernels: attributes, occupancy, launch -------------------------------------------------------------------------- */

cudaError_t simt_func_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    {
        LOCK;
        kernel_options &k = kernels[{current_device, kernel}];
        switch (attribute) {
        case cudaFuncAttributeMaxDynamicSharedMemorySize:
            if (value < 0 || value > optin_shared_bytes(current_device)) return note(cudaErrorInvalidValue);
            k.dynamic_bytes = value;
            k.opted_in = 1;
            break;
        case cudaFuncAttributeNonPortableClusterSizeAllowed:
            k.big_cluster = value;
            break;
        case cudaFuncAttributePreferredSharedMemoryCarveout:
            break;
        default:
            return note(cudaErrorInvalidValue);
        }
    }
    usleep(500); // so that other host threads run between this call and its launch
    return cudaSuccess;
}

static kernel_options options_of(int device, const void *kernel) {
    LOCK;
    auto it = kernels.find({device, kernel});
    return it == kernels.end() ? kernel_options{BLOCK_SHARED_BYTES, 0, 0} : it->second.opted_in ? it->second
           : kernel_options{BLOCK_SHARED_BYTES, 0, it->second.big_cluster};
}

/* The size of a kernel's static shared memory is known only when it runs: 0 here. */
cudaError_t simt_func_get_attributes(struct cudaFuncAttributes *a, const void *kernel) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->ptxVersion = device_code(current_device);
    a->binaryVersion = older(current_device) ? 80 : 90;
    if (a->ptxVersion > a->binaryVersion) return note(cudaErrorNoKernelImageForDevice);
    a->maxDynamicSharedSizeBytes = options_of(current_device, kernel).dynamic_bytes;
    return cudaSuccess;
}

cudaError_t simt_max_active_blocks(int *blocks, int threads, size_t dynamic_bytes) {
    if (threads < 1) return note(cudaErrorInvalidValue);
    size_t by_threads = threads > 1024 ? 0 : THREADS_PER_SM / ((threads + 31) / 32 * 32);
    size_t by_memory = dynamic_bytes > (size_t)optin_shared_bytes(current_device) ? 0 : sm_shared_bytes(current_device) / (dynamic_bytes + 1024);
    size_t most = by_threads < by_memory ? by_threads : by_memory;
    *blocks = most < BLOCKS_PER_SM ? (int)most : BLOCKS_PER_SM;
    return cudaSuccess;
}

static cudaError_t check_launch(const cudaLaunchConfig_t *c, const void *kernel, simt_launch_shape *shape) {
    dim3 grid = c->grid_, block = c->block_, cluster(1, 1, 1);
    const int device = current_device;
    kernel_options k = options_of(device, kernel);
    int cooperative = 0, dependent = 0;
    for (unsigned i = 0; i < c->numAttrs; i++) {
        const cudaLaunchAttribute *a = &c->attrs[i];
        if (a->id == cudaLaunchAttributeClusterDimension) cluster = dim3(a->val.clusterDim.x, a->val.clusterDim.y, a->val.clusterDim.z);
        else if (a->id == cudaLaunchAttributeCooperative) cooperative = a->val.cooperative;
        else if (a->id == cudaLaunchAttributeProgrammaticStreamSerialization) dependent = a->val.programmaticStreamSerializationAllowed;
        else if (a->id != cudaLaunchAttributeIgnore) return cudaErrorInvalidValue;
    }
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
    unsigned long long threads = (unsigned long long)block.x * block.y * block.z;
    if (!threads || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) return cudaErrorInvalidConfiguration;
    unsigned long long blocks = (unsigned long long)cluster.x * cluster.y * cluster.z;
    if (!blocks || blocks > 16 || (blocks > 8 && !k.big_cluster)) return cudaErrorInvalidClusterSize;
    if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z) return cudaErrorInvalidClusterSize;
    if (older(device) && (blocks > 1 || dependent)) return cudaErrorNotSupported;
    if (!is_default(c->stream) && c->stream->device != device) return cudaErrorInvalidResourceHandle;
    if (c->dynamicSmemBytes > (size_t)k.dynamic_bytes) return cudaErrorInvalidValue;
    if (cooperative) {
        int each = 0;
        simt_max_active_blocks(&each, (int)threads, c->dynamicSmemBytes);
        if ((unsigned long long)grid.x * grid.y * grid.z > (unsigned long long)each * device_sms(device)) return cudaErrorCooperativeLaunchTooLarge;
    }
    *shape = {kernel, grid, block, cluster, c->dynamicSmemBytes,
              k.opted_in ? (size_t)optin_shared_bytes(device) : (size_t)BLOCK_SHARED_BYTES};
    return cudaSuccess;
}

cudaError_t simt_max_active_clusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config) {
    simt_launch_shape s;
    cudaError_t error = check_launch(config, kernel, &s);
    if (error) return note(error);
    int each = 0;
    simt_max_active_blocks(&each, (int)(s.block.x * s.block.y * s.block.z), s.dynamic_bytes);
    *clusters = each * device_sms(current_device) / (int)(s.cluster.x * s.cluster.y * s.cluster.z);
    return cudaSuccess;
}

/* What a launch would be, where none runs. */
static void print_launch(const simt_launch_shape &s) {
    std::string name = simt_symbol_name(s.kernel);
    const size_t behind = name.rfind('(');
    if (name.compare(0, 5, "void ") == 0) name = name.substr(5, behind - 5);
    else name = name.substr(0, behind);
    const unsigned cluster = s.cluster.x * s.cluster.y * s.cluster.z, block = s.block.x * s.block.y * s.block.z;
    printf("%s\n    %u x %u x %u blocks", name.c_str(), s.grid.x, s.grid.y, s.grid.z);
    if (cluster > 1) printf(" in clusters of %u", cluster);
    printf(", %u threads each, %zu bytes of dynamic shared memory\n", block, s.dynamic_bytes);
}

cudaError_t simt_launch(const cudaLaunchConfig_t *config, const void *kernel, const std::function<void()> &body) {
    simt_launch_shape shape;
    cudaError_t error = check_launch(config, kernel, &shape);
    if (error) return note(error);
    if (simt_plans()) print_launch(shape);
    if (!is_default(config->stream)) {
        LOCK;
        if (config->stream->capture) config->stream->capture->kernels.push_back({kernel, current_device, config->dynamicSmemBytes});
    }
    return enqueue(config->stream, [=] { return simt_run(&shape, body) ? cudaErrorLaunchFailure : cudaSuccess; });
}
