/* NVML without a GPU, for the real pynvml. FAKE_NVML_GPUS says how many there are; FAKE_NVML_DRIVER
 * the driver's version. Built with OLD_DRIVER, it lacks what old drivers lack. */
#include <stdio.h>
#include <stdlib.h>

typedef struct { unsigned long long total, free, used; } memory_t;

static unsigned gpus(void) {
    const char *text = getenv("FAKE_NVML_GPUS");
    return text ? (unsigned)atoi(text) : 1;
}

int nvmlInitWithFlags(unsigned flags) {
    if (getenv("FAKE_NVML_BROKEN")) return 18; /* driver and library differ */
    return flags ? 2 : 0;
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = gpus();
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned room) {
    const char *version = getenv("FAKE_NVML_DRIVER");
    snprintf(text, room, "%s", version ? version : "580.65.06");
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= gpus()) return 2;
    *handle = (void *)(unsigned long)(index + 1);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned room) {
    snprintf(text, room, "Fake GPU %lu", (unsigned long)handle - 1);
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned room) {
    snprintf(text, room, "GPU-00000000-0000-0000-0000-%012lu", (unsigned long)handle - 1);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    (void)handle;
    *memory = (memory_t){80000000000ULL, 79000000000ULL, 1000000000ULL};
    return 0;
}
#ifndef OLD_DRIVER
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = 9;
    *minor = 0;
    return 0;
}
#endif
