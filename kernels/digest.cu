// A 64-bit digest of every chunk of a buffer, to find out which chunks have changed. Not cryptographic.
//
// digest = mix(n) + sum over i of mix(word[i] ^ (i + 1) * GOLDEN), modulo 2^64, where word[i] are the chunk's
// 8-byte little-endian words, the last one filled up with zeros, and n the chunk's bytes. A sum does not depend
// on the order of its terms, so any grid gives the same bits; `gpu_kernels.digest_reference` is the same in NumPy.
//
// One block per chunk at a time; the buffer is aligned to 8 bytes, chunks are multiples of 8, digests begin at 0.

__device__ static unsigned long long mix(unsigned long long x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;  // the finalizer of splitmix64 (Steele, Lea, Flood 2014)
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

extern "C" __global__ void digest(const unsigned char *bytes, unsigned long long nbytes,
                                  unsigned long long chunk_bytes, unsigned long long *digests) {
    const unsigned long long golden = 0x9e3779b97f4a7c15ULL;
    const unsigned long long chunks = (nbytes + chunk_bytes - 1) / chunk_bytes;
    for (unsigned long long c = blockIdx.x; c < chunks; c += gridDim.x) {
        const unsigned char *chunk = bytes + c * chunk_bytes;
        const unsigned long long rest = nbytes - c * chunk_bytes;
        const unsigned long long n = rest < chunk_bytes ? rest : chunk_bytes;
        unsigned long long sum = threadIdx.x == 0 ? mix(n) : 0;
        for (unsigned long long i = threadIdx.x; i < n / 8; i += blockDim.x)
            sum += mix(((const unsigned long long *)chunk)[i] ^ (i + 1) * golden);
        if (threadIdx.x == 0 && n % 8 != 0) {
            unsigned long long last = 0;
            for (unsigned long long k = 0; k < n % 8; k++) last |= (unsigned long long)chunk[n - n % 8 + k] << 8 * k;
            sum += mix(last ^ (n / 8 + 1) * golden);
        }
        atomicAdd(&digests[c], sum);
    }
}
