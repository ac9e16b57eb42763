// libcuda.so.1: contexts, copies and streams of the driver API, as PyTorch and gpuslice use them; the core is libcudart's.
#include "sim.h"
#include <csignal>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <vector>

#define API extern "C" int
#define CALL                   \
    sim::Call call_(__func__); \
    if (call_.code) return call_.code
#define QUERY                 \
    sim::Call call_(__func__, true); \
    if (call_.code) return call_.code
typedef unsigned long long Address;

static int contexts[sim::MAX_DEVICES];  // a context is the address of its device's place in here
static thread_local std::vector<int> pushed;
static bool exists(int device) { return device >= 0 && device < sim::settings().devices; }
static void* current_context() { return sim::device_is_bound ? &contexts[sim::current_device] : nullptr; }
static int make_current(void* context) {
    sim::device_is_bound = context != nullptr;
    if (context) sim::current_device = (int)((int*)context - contexts);
    return sim::OK;
}

// A thread of the driver's own, which takes signals as any thread does: whoever waits for one blocks it in vain.
static void start_thread() {
    std::thread([] {
        sigset_t none;
        sigemptyset(&none);
        pthread_sigmask(SIG_SETMASK, &none, nullptr);
        for (;;) pause();
    }).detach();
}
API cuInit(unsigned flags) {
    QUERY;
    if (flags) return sim::INVALID_VALUE;
    if (!sim::settings().devices) return sim::NO_DEVICE;
    static std::once_flag once;
    std::call_once(once, start_thread);
    return sim::OK;
}
API cuDriverGetVersion(int* version) {
    *version = 13000;
    return sim::OK;
}
API cuDeviceGetCount(int* count) {
    if (!sim::begun()) return sim::NOT_INITIALIZED;
    QUERY;
    *count = sim::settings().devices;
    return sim::OK;
}
API cuDeviceGet(int* device, int index) {
    QUERY;
    *device = index;
    return exists(index) ? sim::OK : sim::INVALID_DEVICE;
}
API cuDeviceGetAttribute(int* value, int attribute, int device) {
    QUERY;
    if (!exists(device)) return sim::INVALID_DEVICE;
    switch (attribute) {
        case 1: *value = 1024; break;   // threads per block
        case 16: *value = 132; break;   // multiprocessors
        case 75: *value = 9; break;     // compute capability, major
        case 102: *value = 1; break;    // virtual memory management
        default: *value = 0;
    }
    return sim::OK;
}
API cuGetErrorString(int, const char** text) {
    *text = "an error of the simulated driver";
    return sim::OK;
}
API cuGetErrorName(int, const char** text) {
    *text = "CUDA_ERROR_SIMULATED";
    return sim::OK;
}

// Contexts

API cuCtxGetCurrent(void** context) {
    QUERY;
    *context = current_context();
    return sim::OK;
}
API cuCtxSetCurrent(void* context) {
    QUERY;
    return make_current(context);
}
API cuCtxGetDevice(int* device) {
    QUERY;
    *device = sim::current_device;
    return sim::device_is_bound ? sim::OK : sim::INVALID_CONTEXT;
}
API cuCtxPushCurrent_v2(void* context) {
    QUERY;
    pushed.push_back(sim::device_is_bound ? sim::current_device : -1);
    return make_current(context);
}
API cuCtxPopCurrent_v2(void** context) {
    QUERY;
    if (pushed.empty()) return sim::INVALID_CONTEXT;
    if (context) *context = current_context();
    int before = pushed.back();
    pushed.pop_back();
    return make_current(before < 0 ? nullptr : &contexts[before]);
}
API cuCtxSynchronize() {
    CALL;
    if (!sim::device_is_bound) return sim::INVALID_CONTEXT;
    if (int code = sim::waiting_call(nullptr, sim::current_device)) return code;
    sim::drain_device(sim::current_device);
    return sim::sticky_error;
}
API cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    QUERY;
    if (!exists(device)) return sim::INVALID_DEVICE;
    *flags = 0;
    *active = sim::active(device);
    return sim::OK;
}
API cuDevicePrimaryCtxRetain(void** context, int device) {
    CALL;
    if (!exists(device)) return sim::INVALID_DEVICE;
    sim::activate(device);
    *context = &contexts[device];
    return sim::OK;
}
API cuPointerGetAttribute(void* value, int attribute, Address address) {
    CALL;
    sim::Block block;
    if (!sim::find_block((void*)address, 1, &block)) return sim::INVALID_VALUE;
    if (attribute == 1) *(void**)value = &contexts[block.device];
    else if (attribute == 9) *(int*)value = block.device;
    else return sim::NOT_SUPPORTED;
    return sim::OK;
}

// Streams and copies

static int find(void* handle, sim::StreamRef* stream) {
    if (!sim::device_is_bound) return sim::INVALID_CONTEXT;
    *stream = sim::find_stream(handle, sim::current_device);
    return *stream ? sim::OK : sim::INVALID_HANDLE;
}
API cuStreamCreate(void** stream, unsigned flags) {
    CALL;
    if (!sim::device_is_bound) return sim::INVALID_CONTEXT;
    *stream = sim::new_stream(sim::current_device, flags, 0).get();
    return sim::OK;
}
API cuStreamDestroy_v2(void* stream) {
    CALL;
    return sim::close_stream(stream);
}
API cuStreamSynchronize(void* handle) {
    CALL;
    sim::StreamRef stream;
    if (int code = find(handle, &stream)) return code;
    if (int code = sim::waiting_call(stream.get(), 0)) return code;
    stream->drain();
    return sim::sticky_error;
}
static int copy(void* to, const void* from, size_t n, void* handle) {
    sim::StreamRef stream;
    if (int code = find(handle, &stream)) return code;
    return sim::copy(to, from, n, *stream, true);
}
API cuMemcpyDtoHAsync_v2(void* to, Address from, size_t n, void* stream) {
    CALL;
    return copy(to, (void*)from, n, stream);
}
API cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t n, void* stream) {
    CALL;
    return copy((void*)to, from, n, stream);
}

/// Whatever else is asked for by name.
API cudasim_unsupported() {
    sim::Call call("unsupported driver call");
    return sim::NOT_SUPPORTED;
}
