// libnvidia-ml.so.1: what gpuslice and, when memory runs out, PyTorch ask of NVML. It reads the account that the
// runtime keeps, so both say the same; no context is made.
#include "sim.h"
#include <cstdio>
#include <cstring>

#define API extern "C" int
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
struct Memory { unsigned long long total, free, used; };
struct Process { unsigned pid; unsigned long long used; };
struct ProcessV3 { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static unsigned count() { return (unsigned)sim::number_setting("CUDASIM_DEVICES", 2); }
static int index_of(void* handle) { return (int)(uintptr_t)handle - 1; }

API nvmlInit_v2() { return SUCCESS; }
API nvmlInitWithFlags(unsigned) { return SUCCESS; }
API nvmlShutdown() { return SUCCESS; }
extern "C" const char* nvmlErrorString(int) { return "an error of the simulated NVML"; }
API nvmlSystemGetDriverVersion(char* text, unsigned room) {
    snprintf(text, room, "580.65.06");
    return SUCCESS;
}
API nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = 13000;
    return SUCCESS;
}
API nvmlDeviceGetCount_v2(unsigned* n) {
    *n = count();
    return SUCCESS;
}
API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
    *handle = (void*)(uintptr_t)(index + 1);
    return index < count() ? SUCCESS : INVALID_ARGUMENT;
}
API nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** handle) {
    unsigned bus = 0;
    if (sscanf(text, "%*x:%x", &bus) != 1 || bus == 0 || bus > count()) return INVALID_ARGUMENT;
    *handle = (void*)(uintptr_t)bus;
    return SUCCESS;
}
API nvmlDeviceGetName(void*, char* text, unsigned room) {
    snprintf(text, room, "Simulated GPU");
    return SUCCESS;
}
API nvmlDeviceGetUUID(void* handle, char* text, unsigned room) {
    snprintf(text, room, "GPU-c0c1c2c3-c4c5-c6c7-c8c9-cacbcccdce%02x", index_of(handle));
    return SUCCESS;
}
API nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
    *major = 9;
    *minor = 0;
    return SUCCESS;
}
API nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
    memory->total = sim::number_setting("CUDASIM_MEMORY_MIB", 2048) << 20;
    memory->used = sim::used_bytes(index_of(handle));
    memory->free = memory->used > memory->total ? 0 : memory->total - memory->used;
    return SUCCESS;
}

template <typename Entry> static int list(void* handle, unsigned* n, Entry* entries) {
    unsigned found = 0, room = *n;
    for (int i = 0; i < sim::MAX_PROCESSES; i++) {
        sim::ProcessEntry& entry = sim::all_entries()[i];
        long long used = entry.used_bytes[index_of(handle)];
        if (!used || !sim::entry_of(entry.pid)) continue;
        if (found++ >= room || !entries) continue;
        memset(&entries[found - 1], 0, sizeof *entries);
        entries[found - 1].pid = entry.pid;
        entries[found - 1].used = used;
    }
    *n = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
API nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* n, Process* entries) { return list(handle, n, entries); }
API nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* n, ProcessV3* entries) { return list(handle, n, entries); }
API nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
API nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
