// libcudart.so.13: devices, memory, streams, events and graphs of the CUDA runtime API, as PyTorch's libraries use it.
#include "sim.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

#define API extern "C" cudaError_t
#define CALL                   \
    sim::Call call_(__func__); \
    if (call_.code) return (cudaError_t)call_.code
#define QUERY                 \
    sim::Call call_(__func__, true); \
    if (call_.code) return (cudaError_t)call_.code
#define CHECK(condition, error) \
    if (!(condition)) return result(sim::error)
#define FIND_STREAM(name, handle)                            \
    auto name = sim::find_stream(handle, sim::current_device); \
    CHECK(name, INVALID_HANDLE)
#define FIND_EVENT(name, handle)            \
    auto name = sim::find_event(handle);    \
    CHECK(name, INVALID_HANDLE)
/// A call that a capture in progress forbids.
#define UNSAFE \
    if (int code_ = sim::unsafe_call()) return result(code_)

static cudaError_t result(int code) { return (cudaError_t)sim::said(code); }
/// How a call that waits ends: with what happened on the device meanwhile.
static cudaError_t waited() { return result(sim::sticky_error); }
static bool exists(int device) { return device >= 0 && device < sim::settings().devices; }

// Devices

API cudaGetDeviceCount(int* count) {
    QUERY;
    *count = sim::settings().devices;
    return result(*count ? sim::OK : sim::NO_DEVICE);
}
API cudaGetDevice(int* device) {
    QUERY;
    *device = sim::current_device;
    return cudaSuccess;
}
API cudaSetDevice(int device) {
    CALL;
    CHECK(exists(device), INVALID_DEVICE);
    sim::current_device = device;
    sim::here();
    return cudaSuccess;
}
API cudaDeviceSynchronize() {
    CALL;
    if (int code = sim::waiting_call(nullptr, sim::current_device)) return result(code);
    sim::drain_device(sim::here());
    return waited();
}
API cudaDriverGetVersion(int* version) {
    QUERY;
    *version = 13000;
    return cudaSuccess;
}
API cudaRuntimeGetVersion(int* version) {
    QUERY;
    *version = 13000;
    return cudaSuccess;
}
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    QUERY;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
static bool peers[sim::MAX_DEVICES][sim::MAX_DEVICES];
API cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    QUERY;
    CHECK(exists(device) && exists(peer), INVALID_DEVICE);
    *can = device != peer;
    return cudaSuccess;
}
API cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    CALL;
    CHECK(!flags, INVALID_VALUE);
    CHECK(exists(peer) && peer != sim::current_device, INVALID_DEVICE);
    CHECK(!peers[sim::here()][peer], PEER_ALREADY_ENABLED);
    peers[sim::current_device][peer] = true;
    sim::activate(peer);
    return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* text, int room, int device) {
    QUERY;
    CHECK(exists(device), INVALID_DEVICE);
    snprintf(text, room, "0000:%02x:00.0", sim::settings().physical[device] + 1);
    return cudaSuccess;
}
API cudaMemGetInfo(size_t* unused, size_t* total) {
    CALL;
    *total = sim::settings().memory_bytes;
    size_t used = sim::used_bytes(sim::settings().physical[sim::here()]);
    *unused = used > *total ? 0 : *total - used;
    return cudaSuccess;
}
API cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    QUERY;
    CHECK(exists(device), INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    int physical = sim::settings().physical[device];
    snprintf(p->name, sizeof p->name, "Simulated GPU");
    for (int i = 0; i < 16; i++) p->uuid.bytes[i] = (char)(i == 15 ? physical : 0xC0 + i);
    p->totalGlobalMem = sim::settings().memory_bytes;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 5120;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->hostRegisterSupported = 1;
    p->asyncEngineCount = 3;
    p->pciBusID = physical + 1;
    return cudaSuccess;
}
API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    QUERY;
    CHECK(exists(device), INVALID_DEVICE);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrUnifiedAddressing: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

// Errors

API cudaGetLastError() {
    int error = sim::last_error;
    sim::last_error = sim::sticky_error;  // a sticky one cannot be spent
    return (cudaError_t)error;
}
API cudaPeekAtLastError() { return (cudaError_t)sim::last_error; }

// Memory

API cudaMalloc(void** p, size_t n) {
    CALL;
    UNSAFE;
    return result(sim::allocate(p, n, sim::here()));
}
API cudaFree(void* p) {
    CALL;
    if (p) UNSAFE;
    sim::here();
    return result(sim::release(p));
}
API cudaHostAlloc(void** p, size_t n, unsigned) {
    CALL;
    UNSAFE;
    sim::here();
    size_t whole = (n + 4095) / 4096 * 4096;
    *p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(*p != MAP_FAILED, OUT_OF_MEMORY);
    int code = sim::lock_range(*p, whole, true);
    if (code) munmap(*p, whole);
    return result(code);
}
API cudaFreeHost(void* p) {
    CALL;
    UNSAFE;
    return result(p ? sim::unlock_range(p, true) : sim::OK);
}
API cudaHostRegister(void* p, size_t n, unsigned) {
    CALL;
    UNSAFE;
    sim::here();
    return result(sim::lock_range(p, n, false));
}
API cudaHostUnregister(void* p) {
    CALL;
    UNSAFE;
    return result(sim::unlock_range(p, false));
}
API cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    CALL;
    memset(a, 0, sizeof *a);
    a->device = -2;
    a->hostPointer = (void*)p;
    sim::Block block;
    char* seen;
    if (sim::is_device(p) && sim::find_block(p, 1, &block)) {
        a->type = cudaMemoryTypeDevice;
        a->device = block.device;
        a->devicePointer = (void*)p;
        a->hostPointer = nullptr;
    } else if (!sim::is_device(p) && sim::host_range(p, 1, &seen) == sim::Host::LOCKED) {
        a->type = cudaMemoryTypeHost;
        a->device = 0;
        a->devicePointer = (void*)p;
    }
    return cudaSuccess;
}
API cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t stream) {
    CALL;
    sim::here();
    FIND_STREAM(s, stream);
    return result(sim::copy(to, from, n, *s, true));
}
API cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
    CALL;
    UNSAFE;
    sim::here();
    FIND_STREAM(s, nullptr);
    return result(sim::copy(to, from, n, *s, false));
}
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t stream) {
    CALL;
    FIND_STREAM(s, stream);
    return result(sim::copy(to, from, n, *s, true, true));
}
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      cudaMemcpyKind, cudaStream_t stream) {
    CALL;
    FIND_STREAM(s, stream);
    return result(sim::copy_rows(to, to_pitch, from, from_pitch, width, height, *s));
}
API cudaMemset(void* p, int value, size_t n) {
    CALL;
    UNSAFE;
    sim::here();
    FIND_STREAM(s, nullptr);
    return result(sim::fill(p, value, n, *s));
}
API cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
    CALL;
    FIND_STREAM(s, stream);
    return result(sim::fill(p, value, n, *s));
}

// Streams

API cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    CALL;
    *stream = (cudaStream_t)sim::new_stream(sim::here(), flags, priority).get();
    return cudaSuccess;
}
API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamDestroy(cudaStream_t stream) {
    CALL;
    return result(sim::close_stream(stream));
}
API cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    CALL;
    FIND_STREAM(s, stream);
    *priority = s->priority;
    return cudaSuccess;
}
API cudaStreamSynchronize(cudaStream_t stream) {
    CALL;
    FIND_STREAM(s, stream);
    if (int code = sim::waiting_call(s.get(), 0)) return result(code);
    s->drain();
    return waited();
}
API cudaStreamQuery(cudaStream_t stream) {
    CALL;
    FIND_STREAM(s, stream);
    if (int code = sim::waiting_call(s.get(), 0)) return result(code);
    return result(s->idle() ? sim::OK : sim::NOT_READY);
}
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    CALL;
    FIND_STREAM(s, stream);
    FIND_EVENT(e, event);
    return result(sim::wait_event(*s, *e));
}
API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    CALL;
    FIND_STREAM(s, stream);
    if (s->capture) {
        sim::record(*s, [=] { function(data); }, {}, false);
        return cudaSuccess;
    }
    s->push([=, self = s.get()] {
        self->linger();
        function(data);
    });
    return cudaSuccess;
}
API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    CALL;
    UNSAFE;
    FIND_STREAM(s, stream);
    s->push([=] { function(stream, cudaSuccess, data); });
    return cudaSuccess;
}

// Events

API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    CALL;
    *event = (cudaEvent_t)sim::new_event(flags).get();
    return cudaSuccess;
}
API cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventDestroy(cudaEvent_t event) {
    CALL;
    FIND_EVENT(e, event);
    sim::forget_event(event);
    return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    CALL;
    FIND_EVENT(e, event);
    FIND_STREAM(s, stream);
    return result(sim::record_event(*e, *s));
}
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALL;
    return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaEventQuery(cudaEvent_t event) {
    CALL;
    FIND_EVENT(e, event);
    CHECK(!e->capture, CAPTURED_EVENT);
    UNSAFE;
    if (!e->stream) return cudaSuccess;
    std::lock_guard guard(e->stream->m);
    return result(e->stream->done < e->ticket ? sim::NOT_READY : sim::OK);
}
API cudaEventSynchronize(cudaEvent_t event) {
    CALL;
    FIND_EVENT(e, event);
    CHECK(!e->capture, CAPTURED_EVENT);
    UNSAFE;
    if (e->stream) e->stream->wait(e->ticket);
    return waited();
}
API cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    CALL;
    FIND_EVENT(a, start);
    FIND_EVENT(b, end);
    CHECK(a->stream && b->stream && !(a->flags & 2) && !(b->flags & 2), INVALID_HANDLE);
    for (auto& e : {a, b}) {
        std::lock_guard guard(e->stream->m);
        CHECK(e->stream->done >= e->ticket, NOT_READY);
    }
    *ms = *b->time_ms - *a->time_ms;
    return cudaSuccess;
}
