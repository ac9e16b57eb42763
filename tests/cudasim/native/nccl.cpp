// libnccl.so.2: communicators between processes of one machine. A collective runs in stream order, as a kernel would, and
// exchanges its data through a segment of shared memory. Values are added in the order of the ranks, so all have the same.
#include "sim.h"
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#define API extern "C" ncclResult_t
#define CALL                   \
    sim::Call call_(__func__); \
    if (call_.code) return ncclUnhandledCudaError

// Not in the header of NCCL 2.28.
enum ncclCommMemStat_t { ncclStatGpuMemSuspend, ncclStatGpuMemSuspended, ncclStatGpuMemPersist, ncclStatGpuMemTotal };
constexpr int NCCL_SUSPEND_MEM = 1;

namespace {
constexpr size_t SLOT = size_t(1) << 16;
constexpr int MAX_RANKS = 16;

/// All ranks meet; of two barriers in a row nobody can be in the second before all have left the first.
struct Barrier { std::atomic<uint64_t> arrived; };
struct Shared {
    std::atomic<int> pids[MAX_RANKS];
    Barrier joined, on_host, on_device;
    char slots[MAX_RANKS][SLOT];
};

thread_local std::string last_words;
ncclResult_t refuse(ncclResult_t code, const std::string& words) {
    last_words = "cudasim: " + words;
    return code;
}
/// A line for tests that check the order of calls, if they want one: in a file of each rank.
void note(int rank, const char* verb) {
    const char* path = getenv("CUDASIM_NCCL_LOG");
    if (!path) return;
    if (FILE* file = fopen((std::string(path) + "." + std::to_string(rank)).c_str(), "a")) {
        fprintf(file, "%s\n", verb);
        fclose(file);
    }
}
size_t mebibytes(const char* name, size_t otherwise) { return sim::number_setting(name, otherwise) << 20; }
}  // namespace

struct ncclComm {
    Shared* shared;
    int ranks, rank, device;
    size_t scratch_bytes, persistent_bytes;
    uint64_t met_on_host = 0, met_on_device = 0;
    bool suspended = false;
    std::atomic<bool> aborted{false};

    /// False if another rank is dead, or this one has given up.
    bool meet(Barrier& barrier, uint64_t& met) {
        const uint64_t all = ++met * ranks;
        barrier.arrived++;
        while (barrier.arrived < all) {
            if (aborted) return false;
            for (int r = 0; r < ranks; r++)
                if (kill(shared->pids[r], 0)) return false;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        return true;
    }
    bool meet_on_host() { return meet(shared->on_host, met_on_host); }

    /// Each rank gives `n` bytes in pieces; `take(offset, bytes)` is called while all pieces are in their slots.
    template <typename Take> void exchange(const char* give, size_t n, Take take) {
        for (size_t at = 0; at < n; at += SLOT) {
            size_t bytes = std::min(SLOT, n - at);
            if (give) memcpy(shared->slots[rank], give + at, bytes);
            if (!meet(shared->on_device, met_on_device)) return;
            take(at, bytes);
            if (!meet(shared->on_device, met_on_device)) return;
        }
    }
};

namespace {
size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 0;
    }
}

template <typename T> void reduce(const ncclComm& comm, char* to, size_t bytes, ncclRedOp_t op) {
    for (size_t i = 0; i < bytes / sizeof(T); i++) {
        auto of = [&](int r) { return ((const T*)comm.shared->slots[r])[i]; };
        T value = of(0);
        for (int r = 1; r < comm.ranks; r++)
            value = op == ncclProd ? T(value * of(r)) : op == ncclMax ? std::max(value, of(r))
                  : op == ncclMin ? std::min(value, of(r)) : T(value + of(r));
        ((T*)to)[i] = op == ncclAvg ? T(value / comm.ranks) : value;
    }
}

using Reduce = void (*)(const ncclComm&, char*, size_t, ncclRedOp_t);
/// Null for what the simulation cannot add.
Reduce reducer(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: return reduce<int8_t>;
        case ncclUint8: return reduce<uint8_t>;
        case ncclInt32: return reduce<int32_t>;
        case ncclInt64: return reduce<int64_t>;
        case ncclFloat32: return reduce<float>;
        case ncclFloat64: return reduce<double>;
        default: return nullptr;
    }
}

ncclResult_t launch(ncclComm* comm, cudaStream_t handle, std::function<void()> kernel) {
    note(comm->rank, "collective");
    if (comm->suspended) return refuse(ncclInvalidUsage, "the communicator is suspended");
    sim::StreamRef stream = sim::find_stream(handle, comm->device);
    if (!stream) return refuse(ncclInvalidArgument, "no such stream");
    stream->push([stream = stream.get(), kernel = std::move(kernel)] {
        stream->linger();
        kernel();
    });
    return ncclSuccess;
}

ncclResult_t take_memory(ncclComm* comm, int64_t bytes) {
    if (sim::charge(comm->device, bytes)) return refuse(ncclUnhandledCudaError, "out of memory");
    return ncclSuccess;
}

ncclResult_t join(ncclComm** made, int ranks, const ncclUniqueId& id, int rank) {
    if (ranks > MAX_RANKS) return refuse(ncclInvalidArgument, "too many ranks");
    int fd = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Shared))) return refuse(ncclSystemError, "no shared memory");
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return refuse(ncclSystemError, "no shared memory");
    auto comm = new ncclComm{(Shared*)at, ranks, rank, sim::here()};
    comm->scratch_bytes = mebibytes("CUDASIM_NCCL_MIB", 8);
    comm->persistent_bytes = mebibytes("CUDASIM_NCCL_PERSISTENT_MIB", 2);
    if (auto code = take_memory(comm, comm->scratch_bytes + comm->persistent_bytes)) return code;
    comm->shared->pids[rank] = getpid();
    note(rank, "init");
    comm->shared->joined.arrived++;
    while (comm->shared->joined.arrived < (uint64_t)ranks) std::this_thread::sleep_for(std::chrono::microseconds(100));
    shm_unlink(id.internal);  // all have it
    *made = comm;
    return ncclSuccess;
}

void leave(ncclComm* comm) {
    sim::charge(comm->device, -(int64_t)(comm->persistent_bytes + (comm->suspended ? 0 : comm->scratch_bytes)));
    munmap(comm->shared, sizeof(Shared));
    delete comm;
}
}  // namespace

// ---- the library and its communicators

API ncclGetVersion(int* version) {
    *version = (int)sim::number_setting("CUDASIM_NCCL_VERSION", 22907);
    return ncclSuccess;
}
API ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> made;
    unsigned long long now = std::chrono::steady_clock::now().time_since_epoch().count();
    snprintf(id->internal, sizeof id->internal, "/cudasim-nccl-%d-%d-%llx", getpid(), made++, now);
    return ncclSuccess;
}
API ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
    CALL;
    return join(comm, ranks, id, rank);
}
API ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) { return join(comm, ranks, id, rank); }
API ncclCommFinalize(ncclComm_t comm) {
    sim::drain_device(comm->device);
    return ncclSuccess;
}
API ncclCommDestroy(ncclComm_t comm) {
    CALL;
    note(comm->rank, "destroy");
    sim::drain_device(comm->device);
    leave(comm);
    return ncclSuccess;
}
API ncclCommAbort(ncclComm_t comm) {
    CALL;
    comm->aborted = true;
    sim::drain_device(comm->device);
    leave(comm);
    return ncclSuccess;
}
API ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
API ncclCommCount(const ncclComm_t comm, int* ranks) {
    *ranks = comm->ranks;
    return ncclSuccess;
}
API ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
extern "C" const char* ncclGetErrorString(ncclResult_t) { return "an error of the simulated NCCL"; }
extern "C" const char* ncclGetLastError(ncclComm_t) { return last_words.c_str(); }
API ncclGroupStart() { return ncclSuccess; }
API ncclGroupEnd() { return ncclSuccess; }  // nothing in a group waits for anything else in it: all is queued

// ---- memory: both verbs wait for all ranks, and so does NCCL (src/mem_manager.cc)

API ncclCommSuspend(ncclComm_t comm, int flags) {
    CALL;
    note(comm->rank, "suspend");
    if (flags != NCCL_SUSPEND_MEM || comm->suspended) return refuse(ncclInvalidUsage, "suspended already, or other flags");
    sim::drain_device(comm->device);
    if (!comm->meet_on_host()) return refuse(ncclRemoteError, "another rank is gone");
    comm->suspended = true;
    return take_memory(comm, -(int64_t)comm->scratch_bytes);
}
API ncclCommResume(ncclComm_t comm) {
    CALL;
    note(comm->rank, "resume");
    if (!comm->suspended) return refuse(ncclInvalidUsage, "not suspended");
    if (auto code = take_memory(comm, comm->scratch_bytes)) return code;
    if (!comm->meet_on_host()) return refuse(ncclRemoteError, "another rank is gone");
    comm->suspended = false;
    return ncclSuccess;
}
API ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t what, uint64_t* value) {
    switch (what) {
        case ncclStatGpuMemSuspend: *value = comm->scratch_bytes; break;
        case ncclStatGpuMemSuspended: *value = comm->suspended; break;
        case ncclStatGpuMemPersist: *value = comm->persistent_bytes; break;
        case ncclStatGpuMemTotal: *value = comm->scratch_bytes + comm->persistent_bytes; break;
        default: return ncclInvalidArgument;
    }
    return ncclSuccess;
}

// ---- collectives

API ncclAllReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    CALL;
    Reduce add = reducer(type);
    if (!add || op > ncclAvg) return refuse(ncclInvalidArgument, "it cannot reduce that");
    return launch(comm, stream, [=, bytes = count * bytes_of(type)] {
        auto* out = sim::shadow(to);
        comm->exchange(sim::shadow(from), bytes, [=](size_t at, size_t n) { add(*comm, out + at, n, op); });
    });
}
API ncclReduceScatter(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    CALL;
    Reduce add = reducer(type);
    if (!add || op > ncclAvg) return refuse(ncclInvalidArgument, "it cannot reduce that");
    return launch(comm, stream, [=, bytes = count * bytes_of(type)] {
        // In place, a rank's part may begin where another's is still to be given: all is given first.
        std::vector<char> given(sim::shadow(from), sim::shadow(from) + comm->ranks * bytes);
        for (int r = 0; r < comm->ranks; r++)
            comm->exchange(given.data() + r * bytes, bytes, [=](size_t at, size_t n) {
                if (r == comm->rank) add(*comm, sim::shadow(to) + at, n, op);
            });
    });
}
API ncclReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
    cudaStream_t stream) {
    CALL;
    Reduce add = reducer(type);
    if (!add || op > ncclAvg) return refuse(ncclInvalidArgument, "it cannot reduce that");
    return launch(comm, stream, [=, bytes = count * bytes_of(type)] {
        comm->exchange(sim::shadow(from), bytes, [=](size_t at, size_t n) {
            if (comm->rank == root) add(*comm, sim::shadow(to) + at, n, op);
        });
    });
}
API ncclAllGather(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    CALL;
    return launch(comm, stream, [=, bytes = count * bytes_of(type)] {
        comm->exchange(sim::shadow(from), bytes, [=](size_t at, size_t n) {
            for (int r = 0; r < comm->ranks; r++) memcpy(sim::shadow(to) + r * bytes + at, comm->shared->slots[r], n);
        });
    });
}
API ncclBroadcast(
    const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    CALL;
    return launch(comm, stream, [=, bytes = count * bytes_of(type)] {
        comm->exchange(comm->rank == root ? sim::shadow(from) : nullptr, bytes, [=](size_t at, size_t n) {
            memcpy(sim::shadow(to) + at, comm->shared->slots[root], n);
        });
    });
}
API ncclBcast(void* at, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(at, at, count, type, root, comm, stream);
}

// ---- what torch is linked to and the simulation does not have

#define ABSENT(name, ...) \
    API name(__VA_ARGS__) { return refuse(ncclInvalidUsage, "the simulation has no " #name); }
ABSENT(ncclCommInitAll, ncclComm_t*, int, const int*)
ABSENT(ncclCommInitRankScalable, ncclComm_t*, int, int, int, ncclUniqueId*, ncclConfig_t*)
ABSENT(ncclCommSplit, ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*)
ABSENT(ncclCommShrink, ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int)
ABSENT(ncclCommRegister, const ncclComm_t, void*, size_t, void**)
ABSENT(ncclCommDeregister, const ncclComm_t, void*)
ABSENT(ncclCommWindowRegister, ncclComm_t, void*, size_t, ncclWindow_t*, int)
ABSENT(ncclCommWindowDeregister, ncclComm_t, ncclWindow_t)
ABSENT(ncclDevCommCreate)
ABSENT(ncclDevCommDestroy)
ABSENT(ncclGroupSimulateEnd, ncclSimInfo_t*)
ABSENT(ncclMemAlloc, void**, size_t)
ABSENT(ncclMemFree, void*)
ABSENT(ncclRedOpCreatePreMulSum, ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t)
ABSENT(ncclRedOpDestroy, ncclRedOp_t, ncclComm_t)
ABSENT(ncclAlltoAll, const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t)
ABSENT(ncclSend, const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
ABSENT(ncclRecv, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
