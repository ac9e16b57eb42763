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
    unsigned long number = (unsigned long)handle;
    if (number > 100) /* of a MIG instance: 100 * (GPU + 1) + instance + 1 */
        snprintf(text, room, "MIG-00000000-0000-0000-%04lu-%012lu", number / 100 - 1, number % 100 - 1);
    else
        snprintf(text, room, "GPU-00000000-0000-0000-0000-%012lu", number - 1);
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
/* What the instruments show; the second GPU is a model that cannot tell its power. */
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
typedef struct {
    unsigned field, scope;
    long long at, latency;
    unsigned type, result;
    union { double d; unsigned long long ull; } value;
} field_t;

int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    *rates = (utilization_t){handle == (void *)1 ? 87 : 0, 40};
    return 0;
}
int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
    (void)handle;
    *celsius = 61;
    return sensor;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatt) {
    *milliwatt = 305500;
    return handle == (void *)1 ? 0 : 3; /* not supported */
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatt) {
    (void)handle;
    *milliwatt = 700000;
    return 0;
}
int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *mhz) {
    (void)handle;
    *mhz = kind == 1 ? 1980 : 2619;
    return 0;
}
int nvmlDeviceGetPcieThroughput(void *handle, unsigned counter, unsigned *kb_per_s) {
    (void)handle;
    *kb_per_s = counter ? 2000 : 1000;
    return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *bits) {
    (void)handle;
    *bits = 0x4 | 0x20;
    return 0;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    *current = *pending = handle != (void *)1;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    const char *text = getenv("FAKE_NVML_MIG");
    (void)handle;
    *count = text ? 7 : 0;
    return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    const char *text = getenv("FAKE_NVML_MIG");
    if (!text || index >= (unsigned)atoi(text)) return 6; /* not found */
    *instance = (void *)((unsigned long)handle * 100 + index + 1);
    return 0;
}
int nvmlDeviceGetComputeMode(void *handle, int *mode) {
    const char *text = getenv("FAKE_NVML_COMPUTE_MODE");
    (void)handle;
    *mode = text ? atoi(text) : 0;
    return 0;
}
static int processes(unsigned *room, process_t *found) {
    unsigned had = *room;
    *room = 1;
    if (had < 1) return 7; /* insufficient size */
    const char *pid = getenv("FAKE_NVML_PID");
    *found = (process_t){pid ? (unsigned)atoi(pid) : 1, 512ULL << 20, -1, -1};
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *room, process_t *found) {
    (void)handle;
    return processes(room, found);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *room, process_t *found) {
    if (handle != (void *)1) return processes(room, found);
    *room = 0;
    return 0;
}
int nvmlDeviceGetFieldValues(void *handle, int count, field_t *values) {
    static unsigned long long kib;
    (void)handle;
    for (int i = 0; i < count; i++) {
        kib += 1024;
        values[i].value.ull = kib;
        values[i].result = values[i].scope == 0xFFFFFFFFu ? 0 : 2;
    }
    return 0;
}
#endif
