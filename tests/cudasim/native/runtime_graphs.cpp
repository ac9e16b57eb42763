// libcudart.so.13: capture, graphs, and what a program asks of its kernels.
//
// Kernels of the GPU cannot run here. PyTorch's operators are carried out by operators.cpp; a launch that was missed is
// an error that names the kernel, never silence.
#include "sim.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <unordered_map>
#undef cudaStreamGetCaptureInfo
#undef cudaGetDriverEntryPointByVersion

#define API extern "C" cudaError_t
#define CALL                   \
    sim::Call call_(__func__); \
    if (call_.code) return (cudaError_t)call_.code
#define QUERY                 \
    sim::Call call_(__func__, true); \
    if (call_.code) return (cudaError_t)call_.code

static cudaError_t result(int code) { return (cudaError_t)sim::said(code); }

// Capture and graphs

API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    CALL;
    auto s = sim::find_stream(stream, sim::current_device);
    if (!s) return result(sim::INVALID_HANDLE);
    if (!stream) return result(sim::CAPTURE_UNSUPPORTED);  // the legacy stream
    return result(sim::begin_capture(*s, (sim::CaptureMode)mode));
}
API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    CALL;
    auto s = sim::find_stream(stream, sim::current_device);
    if (!s) return result(sim::INVALID_HANDLE);
    return result(sim::end_capture(*s, (sim::Graph**)graph));
}
static cudaStreamCaptureStatus status_of(const sim::Stream& stream) {
    if (!stream.capture) return cudaStreamCaptureStatusNone;
    return stream.capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
API cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    CALL;
    auto s = sim::find_stream(stream, sim::current_device);
    if (!s) return result(sim::INVALID_HANDLE);
    *status = status_of(*s);
    return cudaSuccess;
}
API cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                             const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    CALL;
    auto s = sim::find_stream(stream, sim::current_device);
    if (!s) return result(sim::INVALID_HANDLE);
    *status = status_of(*s);
    if (id) *id = s->capture ? s->capture->id : 0;
    if (graph) *graph = s->capture ? (cudaGraph_t)s->capture->graph : nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    CALL;
    auto before = sim::capture_mode;
    sim::capture_mode = (sim::CaptureMode)*mode;
    *mode = (cudaStreamCaptureMode)before;
    return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    CALL;
    *executable = (cudaGraphExec_t) new sim::Graph(*(sim::Graph*)graph);
    return cudaSuccess;
}
API cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    CALL;
    auto s = sim::find_stream(stream, sim::current_device);
    if (!s) return result(sim::INVALID_HANDLE);
    return result(sim::launch(*(sim::Graph*)executable, *s));
}
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    CALL;
    *count = ((sim::Graph*)graph)->nodes.size();
    return cudaSuccess;
}
API cudaGraphDestroy(cudaGraph_t graph) {
    CALL;
    delete (sim::Graph*)graph;
    return cudaSuccess;
}
API cudaGraphExecDestroy(cudaGraphExec_t executable) {
    CALL;
    delete (sim::Graph*)executable;
    return cudaSuccess;
}

// Kernels

static auto& kernels = *new std::unordered_map<const void*, const char*>;
static cudaError_t missed(const void* function) {
    auto found = kernels.find(function);
    const char* name = found == kernels.end() ? "of a library that nobody registered" : found->second;
    int status;
    char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    fprintf(stderr, "cudasim: nothing stands in for the kernel %.300s\n", plain ? plain : name);
    free(plain);
    return result(sim::NOT_SUPPORTED);
}

struct Pushed { dim3 grid, block; size_t shared; void* stream; };
static thread_local Pushed pushed;
extern "C" {
void** __cudaRegisterFatBinary(void*) {
    static void* handle[1];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    kernels[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void**)stream = pushed.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    sim::Call call("cudaLaunchKernel");
    return call.code ? (cudaError_t)call.code : missed(kernel);
}
/// What a stand-in for a kernel calls instead of the launch: counted, fails if ordered, and on the stream's device only.
int cudasim_launch(void* stream) {
    sim::Call call("cudaLaunchKernel");
    if (call.code) return call.code;
    auto s = sim::find_stream(stream, sim::current_device);
    return result(s && s->device == sim::here() ? sim::OK : sim::INVALID_HANDLE);
}
/// The same for CuPy, which launches through the driver.
int cudasim_driver_launch(void* stream) {
    sim::Call call("cuLaunchKernel");
    if (call.code) return call.code;
    auto s = sim::find_stream(stream, sim::current_device);
    return s && s->device == sim::here() ? sim::OK : sim::INVALID_HANDLE;
}
}
API cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
    CALL;
    return missed(function);
}
API cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
    CALL;
    return missed(function);
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
    CALL;
    return missed(function);
}
API cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    CALL;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->ptxVersion = a->binaryVersion = 90;
    return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    CALL;
    return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    CALL;
    *blocks = 8;
    return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    CALL;
    *blocks = 8;
    return cudaSuccess;
}

// Texts of errors

static const struct { int code; const char *name, *text; } ERRORS[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
};
extern "C" const char* cudaGetErrorName(cudaError_t code) {
    for (auto& error : ERRORS)
        if (error.code == code) return error.name;
    return "cudaErrorUnknown";
}
extern "C" const char* cudaGetErrorString(cudaError_t code) {
    for (auto& error : ERRORS)
        if (error.code == code) return error.text;
    static thread_local char text[40];
    snprintf(text, sizeof text, "simulated error %d", (int)code);
    return text;
}

// The driver's functions by name

API cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                     cudaDriverEntryPointQueryResult* found) {
    QUERY;
    static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = nullptr;
    for (const char* suffix : {"_v2", ""})
        if (driver && !*function) *function = dlsym(driver, (std::string(name) + suffix).c_str());
    if (driver && !*function) *function = dlsym(driver, "cudasim_unsupported");  // PyTorch wants all of its names to exist
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return result(*function ? sim::OK : sim::NOT_FOUND);
}

// What nothing here needs: memory pools, IPC, symbols, the profiler.
#define UNSUPPORTED(name)                 \
    extern "C" int name##_() __asm__(#name); \
    extern "C" int name##_() {            \
        sim::Call call(#name);            \
        return call.code ? call.code : result(sim::NOT_SUPPORTED); \
    }
UNSUPPORTED(cudaDeviceGetDefaultMemPool)
UNSUPPORTED(cudaFreeAsync)
UNSUPPORTED(cudaGetSymbolAddress)
UNSUPPORTED(cudaGraphDebugDotPrint)
UNSUPPORTED(cudaGraphNodeGetDependencies)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaMallocAsync)
UNSUPPORTED(cudaMemPoolGetAttribute)
UNSUPPORTED(cudaMemPoolSetAccess)
UNSUPPORTED(cudaMemPoolSetAttribute)
UNSUPPORTED(cudaMemPoolTrimTo)
UNSUPPORTED(cudaMemcpyToSymbol)
UNSUPPORTED(cudaProfilerStart)
UNSUPPORTED(cudaProfilerStop)
