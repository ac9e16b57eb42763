// CUDA C++ on the host: the same kernel source, its threads one after the other.
// Exact for kernels without __syncthreads, whose threads may run in any order.
#include <stddef.h>

#define __global__
#define __device__

struct Index { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct ulonglong2 { unsigned long long x, y; };
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;

static unsigned long long atomicAdd(unsigned long long *at, unsigned long long more) {
    unsigned long long before = *at;
    *at += more;
    return before;
}

static unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned __int128)x * y >> 64;
}

template <typename Kernel> static void launch(unsigned grid_x, unsigned grid_y, unsigned block_x, Kernel kernel) {
    gridDim = {grid_x, grid_y, 1};
    blockDim = {block_x, 1, 1};
    for (unsigned y = 0; y < grid_y; y++)
        for (unsigned x = 0; x < grid_x; x++)
            for (unsigned t = block_x; t-- > 0;) { // backwards: whoever relies on an order is found out
                blockIdx = {x, y, 0};
                threadIdx = {t, 0, 0};
                kernel();
            }
}
