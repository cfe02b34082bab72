// A GPU that computes nothing, for torch and Triton on a machine that has none: CUDA's runtime, driver and cuBLAS as far
// as these call them. Memory, streams, events, captures and copies are real to the caller; kernels take a set time and
// leave memory as it is. So what the host does for a GPU can be run and timed, and nothing that it computes is right.
//
// Loaded by LD_PRELOAD, and under the name of libcuda.so.1. Settings in microseconds: NULL_GPU_KERNEL, of the device for a
// kernel; NULL_GPU_LAUNCH and NULL_GPU_GRAPH, of the host for a launch of a kernel and of a graph. NULL_GPU_MEMORY is the
// memory in MiB. With NULL_GPU_LOG each launch and each wait is written to stderr.

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define NAME "null GPU"
#define CAPABILITY 9  // major; minor 0: what an H100 and an H200 have, as the numbers below
#define MULTIPROCESSORS 132
#define L2_BYTES (50 << 20)
#define SHARED_BYTES 232448
#define COPIED_BYTES (64ull << 20)  // larger copies and fills take time and do nothing

typedef int64_t nanoseconds;

static nanoseconds kernel_time, launch_time, graph_time;
static size_t memory = 141ull << 30;
static int logging;

static nanoseconds setting(const char *name, double microseconds) {
    const char *value = getenv(name);
    return (nanoseconds)(1000 * (value ? atof(value) : microseconds));
}

__attribute__((constructor)) static void read_settings(void) {
    kernel_time = setting("NULL_GPU_KERNEL", 5);
    launch_time = setting("NULL_GPU_LAUNCH", 2.5);
    graph_time = setting("NULL_GPU_GRAPH", 10);
    if (getenv("NULL_GPU_MEMORY")) memory = strtoull(getenv("NULL_GPU_MEMORY"), NULL, 10) << 20;
    logging = getenv("NULL_GPU_LOG") != NULL;
}

#define LOG(...) do { if (logging) fprintf(stderr, NAME ": " __VA_ARGS__); } while (0)
#define WARN(...) fprintf(stderr, NAME ": " __VA_ARGS__)

// The clock. A device is busy until a time; who waits for it sleeps until then.

static nanoseconds now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void wait_until(nanoseconds end) {
    for (nanoseconds left; (left = end - now()) > 0;) {
        if (left < 60000) continue;  // a sleep ends too late
        struct timespec pause = {left / 1000000000, left % 1000000000 - (left < 1000000000 ? 50000 : 0)};
        nanosleep(&pause, NULL);
    }
}

typedef struct {
    nanoseconds busy_until;
    int capturing, nodes;
    unsigned long long capture;
} Stream;
typedef struct { nanoseconds at; } Event;
typedef struct { int nodes; } Graph;
enum { LAUNCHES, GRAPHS, NODES, COPIES, WAITS, BUSY, COUNTS };

static Stream default_stream;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t counts[COUNTS];
static unsigned long long captures;
static __thread Stream *captured;  // by this thread
static __thread int relaxed;       // its captures allow everything

// Launches of kernels, of graphs, nodes of the last graph that was launched, copies, waits of the host, nanoseconds that the device was busy.
void null_gpu_counts(int64_t *out) { memcpy(out, counts, sizeof counts); }

static Stream *stream_of(const void *handle) { return (uintptr_t)handle < 16 ? &default_stream : (Stream *)handle; }

static void enqueue(void *handle, nanoseconds takes, nanoseconds host, const char *what) {
    Stream *stream = stream_of(handle);
    if (stream->capturing) {
        stream->nodes++;
        return;
    }
    LOG("%s\n", what);
    nanoseconds start = now();
    pthread_mutex_lock(&lock);
    stream->busy_until = (stream->busy_until > start ? stream->busy_until : start) + takes;
    counts[BUSY] += takes;
    pthread_mutex_unlock(&lock);
    while (now() < start + host) {
    }
}

static __thread cudaError_t last_error;
static const char *lacking = "";

// The call of CUDA or cuBLAS, or the kernel, that finds too little memory from now on; empty: none.
void null_gpu_lack(const char *call) { lacking = strdup(call); }

static int lacks(const char *call) { return strcmp(lacking, call) == 0; }

static cudaError_t failed(cudaError_t error) { return last_error = error; }

// What may not be called by a thread that captures a stream.
static cudaError_t forbidden(const char *call) {
    if (!captured || relaxed) return cudaSuccess;
    WARN("%s while a stream is captured\n", call);
    return failed(cudaErrorStreamCaptureUnsupported);
}

#define ALLOWED(call) do { if (forbidden(call)) return last_error; } while (0)

static cudaError_t host_waits(nanoseconds end, const char *call) {
    ALLOWED(call);
    LOG("waits in %s\n", call);
    __sync_fetch_and_add(&counts[WAITS], 1);
    wait_until(end);
    return cudaSuccess;
}

// Memory of the device and pinned memory, both of the host's.

typedef struct {
    char *begin, *end;
    enum { FREE, DEVICE, PINNED } kind;
} Range;

static Range *ranges;
static int num_ranges;
static size_t used;

static void add_range(void *begin, size_t size, int kind) {
    pthread_mutex_lock(&lock);
    int place = 0;
    while (place < num_ranges && ranges[place].kind != FREE) place++;
    if (place == num_ranges) ranges = realloc(ranges, ++num_ranges * sizeof *ranges);
    ranges[place] = (Range){begin, (char *)begin + size, kind};
    pthread_mutex_unlock(&lock);
}

static size_t remove_range(const void *begin) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].kind != FREE && ranges[i].begin == begin) {
            size = ranges[i].end - ranges[i].begin;
            ranges[i].kind = FREE;
        }
    pthread_mutex_unlock(&lock);
    return size;
}

static int kind_of(const void *place) {
    int kind = FREE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges && kind == FREE; i++)
        if ((char *)place >= ranges[i].begin && (char *)place < ranges[i].end) kind = ranges[i].kind;
    pthread_mutex_unlock(&lock);
    return kind;
}

static cudaError_t allocate(void **place, size_t size, int kind) {
    *place = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*place == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    add_range(*place, size, kind);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **place, size_t size) {
    ALLOWED("cudaMalloc");
    if (lacks("cudaMalloc") || used + size > memory) return failed(cudaErrorMemoryAllocation);
    used += size;
    return allocate(place, size, DEVICE);
}

cudaError_t cudaFree(void *place) {
    size_t size = remove_range(place);
    used -= size;
    if (size) munmap(place, size);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **place, size_t size, unsigned flags) {
    ALLOWED("cudaHostAlloc");
    if (lacks("cudaHostAlloc")) return failed(cudaErrorMemoryAllocation);
    return allocate(place, size, PINNED);
}

cudaError_t cudaFreeHost(void *place) {
    munmap(place, remove_range(place));
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *place, size_t size, unsigned flags) {
    add_range(place, size, PINNED);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *place) {
    remove_range(place);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **place, size_t size, cudaStream_t stream) { return cudaMalloc(place, size); }
cudaError_t cudaFreeAsync(void *place, cudaStream_t stream) { return cudaFree(place); }
cudaError_t cudaGetSymbolAddress(void **place, const void *symbol) { return cudaMalloc(place, 4096); }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = memory - used;
    *total = memory;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *place) {
    int kind = kind_of(place);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = kind == FREE ? -1 : 0;
    attributes->type = kind == DEVICE ? cudaMemoryTypeDevice : kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->devicePointer = kind == FREE ? NULL : (void *)place;
    attributes->hostPointer = kind == PINNED ? (void *)place : NULL;
    return cudaSuccess;
}

// Copies: 2 TB/s on the device, 50 GB/s between host and device.

static cudaError_t copy(void *target, const void *source, size_t size, void *handle, int waits) {
    int to = kind_of(target), from = kind_of(source);
    int pageable = to == FREE || from == FREE;
    if (stream_of(handle)->capturing && pageable) {
        WARN("a copy of pageable memory while a stream is captured\n");
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    __sync_fetch_and_add(&counts[COPIES], 1);
    enqueue(handle, 2000 + size / (to == DEVICE && from == DEVICE ? 2000 : 50), launch_time, "copy");
    if (stream_of(handle)->capturing) return cudaSuccess;
    if (size <= COPIED_BYTES) memmove(target, source, size);
    return pageable || waits ? host_waits(stream_of(handle)->busy_until, "a copy of pageable memory") : cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    ALLOWED("cudaMemcpy");
    return copy(target, source, size, NULL, 1);
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(target, source, size, stream, 0);
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    enqueue(stream, 2000 + width * height / 2000, launch_time, "copy of rows");
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *place, int value, size_t size, cudaStream_t stream) {
    enqueue(stream, 2000 + size / 2000, launch_time, "fill");
    if (!stream_of(stream)->capturing && size <= COPIED_BYTES) memset(place, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *place, int value, size_t size) { return cudaMemsetAsync(place, value, size, NULL); }

// The device.

static int attribute(int name) {
    switch (name) {
        case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return INT32_MAX;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_BYTES;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return SHARED_BYTES + 1024;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrClockRate: return 1980000;
        case cudaDevAttrMultiProcessorCount: return MULTIPROCESSORS;
        case cudaDevAttrL2CacheSize: return L2_BYTES;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
        case cudaDevAttrComputeCapabilityMajor: return CAPABILITY;
        case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported: return 1;
        default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
    *value = attribute(name);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    *properties = (struct cudaDeviceProp){
        .name = NAME, .uuid = {.bytes = {1}}, .totalGlobalMem = memory, .sharedMemPerBlock = 48 << 10,
        .regsPerBlock = 65536, .warpSize = 32, .memPitch = INT32_MAX, .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {INT32_MAX, 65535, 65535}, .major = CAPABILITY,
        .textureAlignment = 512, .multiProcessorCount = MULTIPROCESSORS, .canMapHostMemory = 1, .concurrentKernels = 1,
        .asyncEngineCount = 3, .unifiedAddressing = 1, .l2CacheSize = L2_BYTES, .maxThreadsPerMultiProcessor = 2048,
        .sharedMemPerMultiprocessor = SHARED_BYTES + 1024, .regsPerMultiprocessor = 65536,
        .sharedMemPerBlockOptin = SHARED_BYTES, .maxBlocksPerMultiProcessor = 32, .cooperativeLaunch = 1,
    };
    return cudaSuccess;
}

#define ANSWER(function, place, value) { *place = value; return function; }
cudaError_t cudaGetDeviceCount(int *count) ANSWER(cudaSuccess, count, 1)
cudaError_t cudaGetDevice(int *device) ANSWER(cudaSuccess, device, 0)
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) ANSWER(cudaSuccess, can, 0)
cudaError_t cudaDriverGetVersion(int *version) ANSWER(cudaSuccess, version, CUDART_VERSION)
cudaError_t cudaRuntimeGetVersion(int *version) ANSWER(cudaSuccess, version, CUDART_VERSION)
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return host_waits(default_stream.busy_until, "cudaDeviceSynchronize"); }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
static const char *error_text(int error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : error ? "an error of the null GPU" : "success";
}

const char *cudaGetErrorName(cudaError_t error) { return error_text(error); }
const char *cudaGetErrorString(cudaError_t error) { return error_text(error); }

// Streams, events and graphs.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
    ANSWER(cudaSuccess, stream, calloc(1, sizeof(Stream)))
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) ANSWER(cudaSuccess, priority, 0)
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return host_waits(stream_of(stream)->busy_until, "cudaStreamSynchronize"); }

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ALLOWED("cudaStreamQuery");
    return stream_of(stream)->busy_until <= now() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) ANSWER(cudaSuccess, event, calloc(1, sizeof(Event)))
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return host_waits(((Event *)event)->at, "cudaEventSynchronize"); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    Stream *stream = stream_of(handle);
    nanoseconds time = now();
    if (!stream->capturing) ((Event *)event)->at = stream->busy_until > time ? stream->busy_until : time;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
    ALLOWED("cudaEventQuery");
    return ((Event *)event)->at <= now() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
    ANSWER(cudaSuccess, milliseconds, (((Event *)to)->at - ((Event *)from)->at) / 1e6)

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    Stream *stream = stream_of(handle);
    if (!stream->capturing && ((Event *)event)->at > stream->busy_until) stream->busy_until = ((Event *)event)->at;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    captured = stream_of(handle);
    captured->capturing = 1;
    captured->capture = ++captures;
    captured->nodes = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Graph *result = malloc(sizeof *result);
    result->nodes = stream_of(handle)->nodes;
    stream_of(handle)->capturing = 0;
    captured = NULL;
    *graph = (cudaGraph_t)result;
    LOG("captured %d nodes\n", result->nodes);
    return cudaSuccess;
}

static enum cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
    return stream_of(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
    ANSWER(cudaSuccess, status, capture_status(stream))

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *capture,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *status = capture_status(stream);
    if (capture) *capture = stream_of(stream)->capture;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    int before = relaxed;
    relaxed = *mode == cudaStreamCaptureModeRelaxed;
    *mode = before ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeThreadLocal;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    if (lacks("cudaGraphInstantiate")) return failed(cudaErrorMemoryAllocation);
    Graph *copied = malloc(sizeof *copied);
    *copied = *(Graph *)graph;
    *executable = (cudaGraphExec_t)copied;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    __sync_fetch_and_add(&counts[GRAPHS], 1);
    counts[NODES] = ((Graph *)executable)->nodes;
    enqueue(stream, ((Graph *)executable)->nodes * kernel_time, graph_time, "graph");
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) ANSWER(cudaSuccess, count, ((Graph *)graph)->nodes)
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { free(graph); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { free(executable); return cudaSuccess; }

// Kernels that are compiled into torch.

typedef struct { dim3 grid, block; size_t shared; void *stream; } Configuration;

static __thread Configuration configuration;
static struct { const void *function; const char *name; } *kernels;
static int num_kernels;

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t size, int constant, int global) {}
char __cudaInitModule(void **handle) { return 1; }

void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit, uint3 *thread,
                            uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp) {
    if (num_kernels % 4096 == 0) kernels = realloc(kernels, (num_kernels + 4096) * sizeof *kernels);
    kernels[num_kernels].function = function;
    kernels[num_kernels++].name = name;
}

static const char *kernel_name(const void *function) {
    for (int i = 0; logging && i < num_kernels; i++)
        if (kernels[i].function == function) return kernels[i].name;
    return "a kernel";
}

static cudaError_t launch(const char *name, void *stream) {
    if (lacks(name)) return failed(cudaErrorMemoryAllocation);
    __sync_fetch_and_add(&counts[LAUNCHES], 1);
    enqueue(stream, kernel_time, launch_time, name);
    return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration = (Configuration){grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) ANSWER(cudaSuccess, kernel, (cudaKernel_t)function)

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(kernel_name(kernel), stream);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(kernel_name(function), stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *launched, const void *function, void **arguments) {
    return launch(kernel_name(function), launched->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){
        .ptxVersion = 10 * CAPABILITY, .binaryVersion = 10 * CAPABILITY, .maxThreadsPerBlock = 1024, .numRegs = 64,
        .maxDynamicSharedSizeBytes = 48 << 10,
    };
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute name, int value) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads, size_t shared, unsigned flags)
    ANSWER(cudaSuccess, count, 2)

// The driver, which Triton launches by.

typedef struct { char name[128]; } Function;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) ANSWER(CUDA_SUCCESS, version, CUDART_VERSION)
CUresult cuDeviceGetCount(int *count) ANSWER(CUDA_SUCCESS, count, 1)
CUresult cuDeviceGet(CUdevice *device, int ordinal) ANSWER(CUDA_SUCCESS, device, ordinal)
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) ANSWER(CUDA_SUCCESS, value, attribute(name))
CUresult cuCtxGetCurrent(CUcontext *context) ANSWER(CUDA_SUCCESS, context, (CUcontext)&default_stream)
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) ANSWER(CUDA_SUCCESS, device, 0)
CUresult cuCtxGetLimit(size_t *value, CUlimit name) ANSWER(CUDA_SUCCESS, value, 1 << 20)
CUresult cuCtxSetLimit(CUlimit name, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) ANSWER(CUDA_SUCCESS, text, error_text(error))
CUresult cuModuleLoadData(CUmodule *module, const void *image)
    ANSWER(lacks("cuModuleLoadData") ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS, module, calloc(1, 1))
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function)
    ANSWER(CUDA_SUCCESS, value, name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0)

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    Function *result = calloc(1, sizeof *result);
    snprintf(result->name, sizeof result->name, "%s", name);
    *function = (CUfunction)result;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute name, CUdeviceptr place) {
    if (name != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
    if (kind_of((void *)place) == FREE) return CUDA_ERROR_INVALID_VALUE;  // what a kernel is given must be the device's
    *(CUdeviceptr *)value = place;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    const char *name = ((Function *)function)->name;
    unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
    if (config->sharedMemBytes > SHARED_BYTES || threads > 1024 || config->gridDimY > 65535 || config->gridDimZ > 65535) {
        WARN("no launch of %s: %u threads, %u bytes of shared memory, grid of %u, %u, %u\n", name, threads,
             config->sharedMemBytes, config->gridDimX, config->gridDimY, config->gridDimZ);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (lacks(name)) return CUDA_ERROR_OUT_OF_MEMORY;
    launch(name, config->hStream);
    return CUDA_SUCCESS;
}

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static void *symbol(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : (void *)not_supported;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *function = symbol(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
    *function = symbol(name);
    if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

// cuBLAS, by its binary interface: torch brings no headers of it along. A handle holds its stream.

typedef struct { void *stream; } Handle;

int cublasCreate_v2(Handle **handle) ANSWER(lacks("cublasCreate") ? 3 : 0, handle, calloc(1, sizeof(Handle)))
int cublasDestroy_v2(Handle *handle) { return 0; }
int cublasSetStream_v2(Handle *handle, void *stream) ANSWER(0, (&handle->stream), stream)
int cublasSetWorkspace_v2(Handle *handle, void *place, size_t size) { return 0; }
int cublasSetMathMode(Handle *handle, int mode) { return 0; }
int cublasGetMathMode(Handle *handle, int *mode) ANSWER(0, mode, 0)
int cublasGetPointerMode_v2(Handle *handle, int *mode) ANSWER(0, mode, 0)
int cublasSetPointerMode_v2(Handle *handle, int mode) { return 0; }
int cublasGemmEx(Handle *handle) { return launch("cublasGemmEx", handle->stream); }
int cublasGemmStridedBatchedEx(Handle *handle) { return launch("cublasGemmStridedBatchedEx", handle->stream); }
int cublasSgemm_v2(Handle *handle) { return launch("cublasSgemm", handle->stream); }
int cublasSgemmStridedBatched(Handle *handle) { return launch("cublasSgemmStridedBatched", handle->stream); }
int cublasDgemm_v2(Handle *handle) { return launch("cublasDgemm", handle->stream); }

int cublasLtMatmulDescCreate(void **description, int compute, int type) ANSWER(0, description, calloc(1, 1))
int cublasLtMatmulDescDestroy(void *description) { free(description); return 0; }
int cublasLtMatmulDescSetAttribute(void *description, int name, const void *value, size_t size) { return 0; }
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) ANSWER(0, layout, calloc(1, 1))
int cublasLtMatrixLayoutDestroy(void *layout) { free(layout); return 0; }
int cublasLtMatrixLayoutSetAttribute(void *layout, int name, const void *value, size_t size) { return 0; }
int cublasLtMatmulPreferenceCreate(void **preference) ANSWER(0, preference, calloc(1, 1))
int cublasLtMatmulPreferenceDestroy(void *preference) { free(preference); return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int name, const void *value, size_t size) { return 0; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   void *results, int *count) ANSWER(0, count, 1)

int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                   const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *algorithm, void *place,
                   size_t size, void *stream) {
    return launch("cublasLtMatmul", stream);
}
