/* Stands for torch: linked against the runtime, asks it for memory and writes there. */
#include <stddef.h>
#include <string.h>

int cudaMalloc(void **address, size_t nbytes);
int cudaFree(void *address);
int cudaDeviceEnablePeerAccess(int peer, unsigned flags);

int take(void **address, size_t nbytes) { return cudaMalloc(address, nbytes); }
int enable(int peer) { return cudaDeviceEnablePeerAccess(peer, 0); }
int give(void *address) { return cudaFree(address); }
void fill(void *address, int byte, size_t nbytes) { memset(address, byte, nbytes); }
