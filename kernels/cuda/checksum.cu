// The checksums of chunks where they are: XXH3-128 without a seed, as xxHash 0.8 (Yann Collet) defines it for inputs
// of more than 240 bytes; here always a multiple of 64.
//
// XXH3 reads its input in stripes of 64 bytes, as eight words for eight sums. Sums 2q and 2q + 1 depend on nothing but
// words 2q and 2q + 1, so four threads share a chunk: each reads 16 bytes of every stripe, and adds its half of the
// result at the end. After 16 stripes, a block, the sums are scrambled, so blocks come one after the other; many chunks
// at a time keep the memory busy, and every thread loads the next block before it adds up the present one.
//
// Pieces are aligned to 16 bytes; `offset` is the chunk's length with the zeros that follow its `nbytes`. The results
// begin at 0: low and high half of each chunk, but for XXH3's last step, which `combine` in kernels.py does. Any grid
// gives the same.

#define STRIPE 64
#define STRIPES 16  // in a block
#define BLOCK (STRIPE * STRIPES)
#define SECRET_BYTES 192

typedef unsigned long long Word;

__device__ static const unsigned char SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

__device__ static const Word START[8] = {
    0x00000000c2b2ae3dULL, 0x9e3779b185ebca87ULL, 0xc2b2ae3d27d4eb4fULL, 0x165667b19e3779f9ULL,
    0x85ebca77c2b2ae63ULL, 0x0000000085ebca77ULL, 0x27d4eb2f165667c5ULL, 0x000000009e3779b1ULL};

__device__ static Word secret(unsigned at) {
    Word word = 0;
    for (unsigned k = 8; k-- > 0;) word = word << 8 | SECRET[at + k];
    return word;
}

// 16 bytes of a chunk; zeros from `end` on.
__device__ static ulonglong2 load(const unsigned char *bytes, Word at, Word end) {
    if (at + 16 <= end) return *(const ulonglong2 *)(bytes + at);
    Word words[2] = {0, 0};
    for (unsigned k = 0; k < 16 && at + k < end; k++) words[k / 8] |= (Word)bytes[at + k] << 8 * (k % 8);
    return {words[0], words[1]};
}

__device__ static Word product_of_halves(Word x) { return (x & 0xffffffffULL) * (x >> 32); }

__device__ static void accumulate(ulonglong2 &sums, ulonglong2 data, Word key0, Word key1) {
    sums.x += data.y + product_of_halves(data.x ^ key0);
    sums.y += data.x + product_of_halves(data.y ^ key1);
}

__device__ static void add_block(ulonglong2 &sums, const ulonglong2 *data, const Word *keys) {
#pragma unroll
    for (unsigned s = 0; s < STRIPES; s++) accumulate(sums, data[s], keys[s], keys[s + 1]);
    sums.x = (sums.x ^ sums.x >> 47 ^ keys[STRIPES]) * 0x9e3779b1ULL;
    sums.y = (sums.y ^ sums.y >> 47 ^ keys[STRIPES + 1]) * 0x9e3779b1ULL;
}

__device__ static void load_block(ulonglong2 *data, const unsigned char *bytes) {
#pragma unroll
    for (unsigned s = 0; s < STRIPES; s++) data[s] = *(const ulonglong2 *)(bytes + s * STRIPE);
}

__device__ static Word folded_product(Word x, Word y) { return x * y ^ __umul64hi(x, y); }

// The sums of one thread over a whole chunk; `mine` is where its 16 bytes of a stripe begin.
__device__ static ulonglong2 sums_of(const unsigned char *bytes, Word nbytes, Word length, unsigned mine) {
    ulonglong2 sums = {START[mine / 8], START[mine / 8 + 1]};
    Word keys[STRIPES + 2];
#pragma unroll
    for (unsigned k = 0; k < STRIPES + 2; k++) keys[k] = secret(mine + 8 * k);
    const Word blocks = (length - 1) / BLOCK;
    const Word whole = nbytes / BLOCK < blocks ? nbytes / BLOCK : blocks;
    ulonglong2 data[STRIPES], next[STRIPES];
    if (whole > 0) load_block(next, bytes + mine);
    for (Word b = 0; b < whole; b++) {
#pragma unroll
        for (unsigned s = 0; s < STRIPES; s++) data[s] = next[s];
        if (b + 1 < whole) load_block(next, bytes + (b + 1) * BLOCK + mine);
        add_block(sums, data, keys);
    }
    for (Word b = whole; b < blocks; b++) {
        for (unsigned s = 0; s < STRIPES; s++) data[s] = load(bytes, b * BLOCK + s * STRIPE + mine, nbytes);
        add_block(sums, data, keys);
    }
    for (Word at = blocks * BLOCK; at + STRIPE < length; at += STRIPE) {
        const unsigned key = mine + (unsigned)(at % BLOCK) / STRIPE * 8;
        accumulate(sums, load(bytes, at + mine, nbytes), secret(key), secret(key + 8));
    }
    const unsigned last = SECRET_BYTES - STRIPE - 7 + mine;
    accumulate(sums, load(bytes, length - STRIPE + mine, nbytes), secret(last), secret(last + 8));
    return sums;
}

extern "C" __global__ void checksum(const Piece *pieces, unsigned count, Word *results) {
    const Word first = (blockIdx.y * (Word)gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    const Word stride = (Word)gridDim.x * gridDim.y * blockDim.x;
    for (Word thread = first; thread < 4ULL * count; thread += stride) {
        const Piece piece = pieces[thread / 4];
        const Word length = piece.offset;
        const unsigned mine = thread % 4 * 16;
        const ulonglong2 sums = sums_of((const unsigned char *)piece.address, piece.nbytes, length, mine);
        const unsigned key0 = 11 + mine, key1 = SECRET_BYTES - STRIPE - 11 + mine;
        Word low = folded_product(sums.x ^ secret(key0), sums.y ^ secret(key0 + 8));
        Word high = folded_product(sums.x ^ secret(key1), sums.y ^ secret(key1 + 8));
        if (mine == 0) {
            low += length * 0x9e3779b185ebca87ULL;
            high += ~(length * 0xc2b2ae3d27d4eb4fULL);
        }
        atomicAdd(&results[thread / 4 * 2], low);
        atomicAdd(&results[thread / 4 * 2 + 1], high);
    }
}
