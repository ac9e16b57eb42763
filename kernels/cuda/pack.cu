// Many pieces of device memory to and from one contiguous staging buffer, in one launch.
//
// Grid: x covers the bytes of a piece, y the pieces; both may be smaller than the work (strided loops).
// Where both ends allow it, 16 bytes are moved at a time: torch's blocks and the staging layout always do.

struct Piece {
    unsigned long long address;  // on the device
    unsigned long long offset;   // in the staging buffer
    unsigned long long nbytes;
};

__device__ static void copy(unsigned char *to, const unsigned char *from, unsigned long long nbytes) {
    const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    const unsigned long long stride = gridDim.x * (unsigned long long)blockDim.x;
    const bool aligned = (((unsigned long long)to | (unsigned long long)from) & 15) == 0;
    const unsigned long long vectors = aligned ? nbytes / 16 : 0;
    for (unsigned long long i = first; i < vectors; i += stride) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    for (unsigned long long i = vectors * 16 + first; i < nbytes; i += stride) to[i] = from[i];
}

extern "C" __global__ void gather(const Piece *pieces, unsigned count, unsigned char *staging) {
    for (unsigned p = blockIdx.y; p < count; p += gridDim.y)
        copy(staging + pieces[p].offset, (const unsigned char *)pieces[p].address, pieces[p].nbytes);
}

extern "C" __global__ void scatter(const Piece *pieces, unsigned count, const unsigned char *staging) {
    for (unsigned p = blockIdx.y; p < count; p += gridDim.y)
        copy((unsigned char *)pieces[p].address, staging + pieces[p].offset, pieces[p].nbytes);
}
