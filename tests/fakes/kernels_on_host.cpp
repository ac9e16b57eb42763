// The GPU kernels as host functions, for exact comparison with NumPy.
#include "cuda_host.h"
#include "pack.cu"
#include "checksum.cu"

extern "C" void host_gather(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                            unsigned char *staging) {
    launch(gx, gy, block, [&] { gather(pieces, count, staging); });
}
extern "C" void host_scatter(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                             const unsigned char *staging) {
    launch(gx, gy, block, [&] { scatter(pieces, count, staging); });
}
extern "C" void host_checksum(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                          unsigned long long *results) {
    launch(gx, gy, block, [&] { checksum(pieces, count, results); });
}
