/* A CUDA runtime over the fake driver, with the real one's SONAME and symbol version. */
#include <stdlib.h>

void fake_set_device(int device);

static int device;
static long allocations;

long fake_runtime_allocations(void) { return allocations; }
int cudaSetDevice(int wanted) {
    device = wanted;
    fake_set_device(wanted);
    return 0;
}
int cudaGetDevice(int *present) {
    *present = device;
    return 0;
}
int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    static int enabled[8][8];
    if (flags || peer == device) return 1;
    return enabled[device][peer]++ ? 704 : 0;
}
int cudaMalloc(void **address, size_t nbytes) {
    allocations += nbytes > 0;
    *address = nbytes ? malloc(nbytes) : NULL;
    return 0;
}
int cudaFree(void *address) {
    if (!address) {
        fake_set_device(device);
        return 0;
    }
    allocations--;
    free(address);
    return 0;
}
