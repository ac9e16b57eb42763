// A 128-bit mark of every piece of a buffer, to find out which pieces have changed. Not cryptographic.
//
// Two sums modulo 2^64, over the piece's 8-byte little-endian words (the last one filled up with zeros) and its
// length n, the words salted with their places:
//
//     low  = mix(n).low  + sum of mix(word[i] ^ (i + 1) * GOLDEN).low
//     high = mix(n).high + sum of mix(word[i] ^ (i + 1) * GOLDEN).high
//
// Both halves of `mix` are bijections of the word, so a single changed word always shows. A sum does not depend on the
// order of its terms, so any grid gives the same bits; tests/kernels/marks.py has the same in NumPy.
//
// Grid: x covers the words of a piece, y the pieces; both may be smaller than the work (strided loops). Pieces are
// aligned to 8 bytes, their `offset` is not used, and marks begin at 0: low and high of each piece.

struct Mix {
    unsigned long long low, high;
};

__device__ static Mix mix(unsigned long long x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;  // the finalizer of splitmix64 (Steele, Lea, Flood 2014)
    Mix mixed;
    mixed.low = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    mixed.low ^= mixed.low >> 31;
    mixed.high = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;  // the last round of MurmurHash3's finalizer (Appleby)
    mixed.high ^= mixed.high >> 33;
    return mixed;
}

extern "C" __global__ void mark(const Piece *pieces, unsigned count, unsigned long long *marks) {
    const unsigned long long golden = 0x9e3779b97f4a7c15ULL;
    const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    const unsigned long long stride = gridDim.x * (unsigned long long)blockDim.x;
    for (unsigned p = blockIdx.y; p < count; p += gridDim.y) {
        const unsigned char *bytes = (const unsigned char *)pieces[p].address;
        const unsigned long long n = pieces[p].nbytes;
        unsigned long long low = 0, high = 0;
        for (unsigned long long i = first; i < n / 8; i += stride) {
            const Mix term = mix(((const unsigned long long *)bytes)[i] ^ (i + 1) * golden);
            low += term.low;
            high += term.high;
        }
        if (first == 0) {
            const Mix length = mix(n);
            low += length.low;
            high += length.high;
            if (n % 8 != 0) {
                unsigned long long last = 0;
                for (unsigned long long k = 0; k < n % 8; k++)
                    last |= (unsigned long long)bytes[n - n % 8 + k] << 8 * k;
                const Mix term = mix(last ^ (n / 8 + 1) * golden);
                low += term.low;
                high += term.high;
            }
        }
        atomicAdd(&marks[2 * p], low);
        atomicAdd(&marks[2 * p + 1], high);
    }
}
