/* A CUDA driver without a GPU: device memory is a memfd, a device address is an address of this process.
 *
 * Enough for kernels/vmm/vmm.c and kernels/driver.py. FAKE_CUDA_BYTES limits the memory of a device;
 * FAKE_CUDA_FAIL="cuMemCreate:3:2" makes the third call of cuMemCreate return 2. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DEVICES = 2, PROCESS = 4242 };
static const size_t GRANULE = 2 << 20;

static uint64_t live_bytes[DEVICES];
static long live_handles, live_ranges;
static __thread long stack[8];
static __thread int depth;
static int process_state;
static unsigned char last_pair[32];
static unsigned last_pairs;

/* A handle is a memfd, its size and its device. */
struct memory { int fd, device; size_t nbytes; };

static int scripted(const char *name) {
    static struct { char name[48]; int calls; } seen[64];
    const char *script = getenv("FAKE_CUDA_FAIL");
    char wanted[48];
    int nth, code;
    int i = 0;
    while (seen[i].name[0] && strcmp(seen[i].name, name) != 0) i++;
    snprintf(seen[i].name, sizeof seen[i].name, "%s", name);
    seen[i].calls++;
    if (!script || sscanf(script, "%47[^:]:%d:%d", wanted, &nth, &code) != 3) return 0;
    return strcmp(wanted, name) == 0 && nth == seen[i].calls ? code : 0;
}

#define SCRIPTED                                                                                                   \
    do {                                                                                                           \
        int code_ = scripted(__func__);                                                                            \
        if (code_) return code_;                                                                                   \
    } while (0)

long fake_live_handles(void) { return live_handles; }
long fake_live_ranges(void) { return live_ranges; }
uint64_t fake_live_bytes(int device) { return live_bytes[device]; }
int fake_context_depth(void) { return depth; }

int cuInit(unsigned flags) { SCRIPTED; return flags ? 1 : 0; }

int cuCtxGetCurrent(void **context) {
    *context = depth ? (void *)(stack[depth - 1] + 1) : NULL;
    return 0;
}
int cuCtxGetDevice(int *device) {
    if (!depth) return 201;
    *device = (int)stack[depth - 1];
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    SCRIPTED;
    stack[depth++] = (long)context - 1;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return 201;
    *context = (void *)(stack[--depth] + 1);
    return 0;
}
void fake_set_device(int device) {
    if (!depth) depth = 1;
    stack[depth - 1] = device;
}
int cuCtxSynchronize(void) { SCRIPTED; return depth ? 0 : 201; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 102 || device >= DEVICES) return 1;
    *value = getenv("FAKE_CUDA_NO_VMM") == NULL;
    return 0;
}
int cuMemGetAllocationGranularity(size_t *granularity, const int *properties, int option) {
    if (properties[0] != 1 || properties[2] != 1 || option != 0) return 1;
    *granularity = GRANULE;
    return 0;
}
int cuMemCreate(uint64_t *handle, size_t nbytes, const int *properties, unsigned long long flags) {
    SCRIPTED;
    int device = properties[3];
    const char *limit = getenv("FAKE_CUDA_BYTES");
    if (properties[0] != 1 || properties[2] != 1 || device >= DEVICES || flags || nbytes % GRANULE) return 1;
    if (limit && live_bytes[device] + nbytes > strtoull(limit, NULL, 10)) return 2;
    struct memory *memory = malloc(sizeof *memory);
    *memory = (struct memory){memfd_create("device-memory", MFD_CLOEXEC), device, nbytes};
    if (memory->fd < 0 || ftruncate(memory->fd, (off_t)nbytes)) return 2;
    live_bytes[device] += nbytes;
    live_handles++;
    *handle = (uint64_t)memory;
    return 0;
}
int cuMemRelease(uint64_t handle) {
    SCRIPTED;
    struct memory *memory = (struct memory *)handle;
    close(memory->fd);
    live_bytes[memory->device] -= memory->nbytes;
    live_handles--;
    free(memory);
    return 0;
}
int cuMemAddressReserve(uint64_t *address, size_t nbytes, size_t alignment, uint64_t hint, unsigned long long flags) {
    SCRIPTED;
    if (alignment || hint || flags) return 1;
    void *range = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return 2;
    live_ranges++;
    *address = (uint64_t)range;
    return 0;
}
int cuMemAddressFree(uint64_t address, size_t nbytes) {
    SCRIPTED;
    live_ranges--;
    return munmap((void *)address, nbytes) ? 1 : 0;
}
int cuMemMap(uint64_t address, size_t nbytes, size_t offset, uint64_t handle, unsigned long long flags) {
    SCRIPTED;
    struct memory *memory = (struct memory *)handle;
    if (offset || flags || nbytes != memory->nbytes) return 1;
    void *at = mmap((void *)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
    return at == MAP_FAILED ? 1 : 0;
}
int cuMemUnmap(uint64_t address, size_t nbytes) {
    SCRIPTED;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)address, nbytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? 1 : 0;
}
static long last_access;
/* A bit for each device that the last call gave access. */
long fake_last_access(void) { return last_access; }
int cuMemSetAccess(uint64_t address, size_t nbytes, const int *access, size_t count) {
    SCRIPTED;
    if (!count) return 1;
    for (size_t i = 0; i < count; i++)
        if (access[3 * i] != 1 || access[3 * i + 2] != 3) return 1;
    last_access = 0;
    for (size_t i = 0; i < count; i++) last_access |= 1L << access[3 * i + 1];
    return mprotect((void *)address, nbytes, PROT_READ | PROT_WRITE) ? 1 : 0;
}

/* One process can be checkpointed: PROCESS. A verb in the wrong state is refused, as the driver does. */
static int step(int pid, int from, int to) {
    if (pid != PROCESS) return 1;
    if (process_state != from) return 401;
    process_state = to;
    return 0;
}
#ifndef FAKE_OLD_DRIVER
int cuCheckpointProcessGetState(int pid, int *state) {
    SCRIPTED;
    *state = process_state;
    return pid == PROCESS ? 0 : 1;
}
int cuCheckpointProcessGetRestoreThreadId(int pid, int *thread) {
    *thread = PROCESS + 1;
    return pid == PROCESS ? 0 : 1;
}
int cuCheckpointProcessLock(int pid, const unsigned *args) {
    SCRIPTED;
    if (args[0] == 1) return 600; /* one millisecond is never enough here */
    for (int i = 1; i < 16; i++)
        if (args[i]) return 1;
    return step(pid, 0, 1);
}
int cuCheckpointProcessCheckpoint(int pid, const void *args) {
    SCRIPTED;
    return args ? 1 : step(pid, 1, 2);
}
int cuCheckpointProcessRestore(int pid, const void *args) {
    SCRIPTED;
    last_pairs = 0;
    if (args) {
        last_pairs = *(const unsigned *)((const char *)args + 8);
        memcpy(last_pair, *(unsigned char *const *)args, 32);
    }
    return step(pid, 2, 1);
}
int cuCheckpointProcessUnlock(int pid, const void *args) {
    SCRIPTED;
    return args ? 1 : step(pid, 1, 0);
}
#endif
unsigned fake_last_pairs(unsigned char *pair) {
    memcpy(pair, last_pair, sizeof last_pair);
    return last_pairs;
}
