// Device memory: blocks in the shadow. What is freed is unmapped, and its address is never used again.
#include "sim.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>

namespace sim {

thread_local int current_device;
thread_local bool device_is_bound;
static std::mutex& m = *new std::mutex;
static auto& blocks = *new std::map<uintptr_t, Block>;
static uintptr_t next_address = BASE + GRANULE;
/// Poisoning touches every page, so larger blocks are not poisoned: nobody has that much memory for a test.
constexpr size_t LARGEST_POISONED = size_t(256) << 20;

int here() {
    device_is_bound = true;
    activate(current_device);
    return current_device;
}

static void reserve_span() {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    for (uintptr_t at : {BASE, BASE + SPAN})
        if (mmap((void*)at, SPAN, PROT_NONE, flags, -1, 0) != (void*)at) {
            perror("cudasim: addresses");
            abort();
        }
    madvise((void*)BASE, 2 * SPAN, MADV_DONTDUMP);
}

static size_t whole(size_t n) { return (n + GRANULE - 1) / GRANULE * GRANULE; }

/// With a gap behind it, so that an overrun does not end in the next block.
uintptr_t reserve_addresses(size_t n) {
    static std::once_flag once;
    std::call_once(once, reserve_span);
    std::lock_guard guard(m);
    uintptr_t at = next_address;
    next_address += whole(n) + GRANULE;
    if (next_address > BASE + SPAN) {
        fprintf(stderr, "cudasim: out of device addresses\n");
        abort();
    }
    return at;
}

void poison(uintptr_t address, size_t n) {  // NaN, or -1: what was never written shows
    if (settings().poison && n <= LARGEST_POISONED) memset((void*)(address + SPAN), 0xFF, n);
}

void fence(uintptr_t address, size_t n) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap((void*)(address + SPAN), whole(n), PROT_NONE, flags, -1, 0) == MAP_FAILED) abort();
}

void add_block(uintptr_t address, size_t n, int device, uint64_t mapped_for) {
    std::lock_guard guard(m);
    blocks[address] = {n, device, mapped_for};
}

void remove_block(uintptr_t address) {
    std::lock_guard guard(m);
    blocks.erase(address);
}

int allocate(void** p, size_t n, int device) {
    *p = nullptr;
    if (!n) return OK;
    if (int code = charge(device, whole(n))) return code;
    uintptr_t at = reserve_addresses(n);
    if (mprotect((void*)(at + SPAN), whole(n), PROT_READ | PROT_WRITE)) {
        charge(device, -(int64_t)whole(n));
        return OUT_OF_MEMORY;
    }
    poison(at, n);
    add_block(at, n, device);
    *p = (void*)at;
    return OK;
}

int release(void* p) {
    if (!p) return OK;
    Block block;
    if (!find_block(p, 1, &block)) return INVALID_VALUE;
    {
        std::lock_guard guard(m);
        if (!blocks.count((uintptr_t)p)) return INVALID_VALUE;  // an address inside of a block
    }
    drain_device(block.device);  // as cudaFree waits for all kernels
    remove_block((uintptr_t)p);
    fence((uintptr_t)p, block.bytes);
    charge(block.device, -(int64_t)whole(block.bytes));
    return OK;
}

bool find_block(const void* p, size_t n, Block* found) {
    std::lock_guard guard(m);
    auto i = blocks.upper_bound((uintptr_t)p);
    if (i == blocks.begin()) return false;
    --i;
    if ((uintptr_t)p + n > i->first + i->second.bytes) return false;
    if (found) *found = i->second;
    return true;
}

void protect_all(bool accessible) {
    std::lock_guard guard(m);
    for (auto& [at, block] : blocks)
        mprotect((void*)(at + SPAN), whole(block.bytes), accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}

extern "C" {
void* cudasim_shadow(const void* p) { return shadow(p); }
/// 0, or the error of a kernel on `device` that uses this memory.
int cudasim_access(const void* p, size_t n, int device) {
    Block block;
    if (!is_device(p) || !find_block(p, n, &block)) {
        fprintf(stderr, "cudasim: a kernel uses %zu bytes at %p, which is no device memory\n", n, p);
        return stuck(ILLEGAL_ADDRESS);
    }
    return block.device == device ? OK : INVALID_DEVICE;
}
}
}  // namespace sim
