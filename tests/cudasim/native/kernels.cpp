// Put behind the source of gpuslice's kernels: their launches on the simulated device, in stream order.
// A table is read as the kernel would read it when it runs, its addresses taken to where their bytes are.
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {
void *cudasim_shadow(const void *address);
int cudasim_access(const void *address, size_t bytes, int device);
int cudasim_driver_launch(void *stream);
void cudasim_push(void *stream, void (*run)(void *), void *data);
int cudaGetDevice(int *device);
}

struct PendingLaunch {
    unsigned grid_x, grid_y, block;
    const void *table;
    unsigned count;
    void *target;
    int device;
};

static bool accessible(const PendingLaunch &l, std::vector<Piece> &pieces) {
    if (l.count && cudasim_access(l.table, l.count * sizeof(Piece), l.device)) return false;
    pieces.resize(l.count);
    if (l.count) memcpy(pieces.data(), cudasim_shadow(l.table), l.count * sizeof(Piece));
    for (Piece &piece : pieces) {
        if (piece.nbytes && cudasim_access((const void *)piece.address, piece.nbytes, l.device)) return false;
        piece.address = (unsigned long long)cudasim_shadow((const void *)piece.address);
    }
    return true;
}

static unsigned long long staged(const std::vector<Piece> &pieces) {
    unsigned long long end = 0;
    for (const Piece &piece : pieces) end = piece.offset + piece.nbytes > end ? piece.offset + piece.nbytes : end;
    return end;
}

template <typename Run> static void carry_out(void *data, Run run, bool into_staging) {
    PendingLaunch *l = (PendingLaunch *)data;
    std::vector<Piece> pieces;
    bool sound = accessible(*l, pieces);
    unsigned long long room = into_staging ? staged(pieces) : l->count * 16ull;
    if (sound && room && cudasim_access(l->target, room, l->device)) sound = false;
    if (sound) run(*l, pieces.data(), (unsigned char *)cudasim_shadow(l->target));
    delete l;
}

#define LAUNCH(name, into_staging, call)                                                                               \
    static void run_##name(void *data) {                                                                               \
        carry_out(                                                                                                     \
            data,                                                                                                      \
            [](const PendingLaunch &l, const Piece *pieces, unsigned char *target) {                                   \
                launch(l.grid_x, l.grid_y, l.block, [&] { call; });                                                    \
            },                                                                                                         \
            into_staging);                                                                                             \
    }                                                                                                                  \
    extern "C" int cudasim_launch_##name(unsigned x, unsigned y, unsigned block, const void *table, unsigned count,    \
                                         void *target, void *stream) {                                                 \
        if (int code = cudasim_driver_launch(stream)) return code;                                                            \
        int device = 0;                                                                                                \
        cudaGetDevice(&device);                                                                                        \
        cudasim_push(stream, run_##name, new PendingLaunch{x, y, block, table, count, target, device});                \
        return 0;                                                                                                      \
    }

LAUNCH(gather, true, gather(pieces, l.count, target))
LAUNCH(scatter, true, scatter(pieces, l.count, target))
LAUNCH(checksum, false, checksum(pieces, l.count, (unsigned long long *)target))
