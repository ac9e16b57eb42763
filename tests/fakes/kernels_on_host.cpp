// The GPU kernels as host functions, for exact comparison with NumPy.
#include "cuda_host.h"
#include "digest.cu"
#include "pack.cu"

extern "C" void host_gather(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                            unsigned char *staging) {
    launch(gx, gy, block, [&] { gather(pieces, count, staging); });
}
extern "C" void host_scatter(unsigned gx, unsigned gy, unsigned block, const Piece *pieces, unsigned count,
                             const unsigned char *staging) {
    launch(gx, gy, block, [&] { scatter(pieces, count, staging); });
}
extern "C" void host_digest(unsigned gx, unsigned block, const unsigned char *bytes, unsigned long long nbytes,
                            unsigned long long chunk_bytes, unsigned long long *digests) {
    launch(gx, 1, block, [&] { digest(bytes, nbytes, chunk_bytes, digests); });
}
