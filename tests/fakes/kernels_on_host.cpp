// The GPU kernels as host functions, for exact comparison with NumPy.
#include "cuda_host.h"
#include "pack.cu"
#include "digest.cu"

extern "C" void host_gather(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                            unsigned char *staging) {
    launch(gx, gy, block, [&] { gather(pieces, count, staging); });
}
extern "C" void host_scatter(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                             const unsigned char *staging) {
    launch(gx, gy, block, [&] { scatter(pieces, count, staging); });
}
extern "C" void host_mark(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                          unsigned long long *marks) {
    launch(gx, gy, block, [&] { mark(pieces, count, marks); });
}
