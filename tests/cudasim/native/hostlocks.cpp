// Page-locked memory of the host.
//
// The device reaches locked pages through a second mapping of theirs, where the kernel can make one (shared
// mappings: every arena). So a lock that outlives its mapping is what it is on a real machine: bytes go to the pages
// that were there, not to those that are at the address now.
#include "sim.h"
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace sim {

struct Lock { size_t bytes; bool owned; char* seen; bool mapped_twice; };
static std::mutex& m = *new std::mutex;
static auto& locks = *new std::map<uintptr_t, Lock>;
static size_t locked_bytes;

static bool is_mapped(const void* p, size_t n) {
    auto first = (uintptr_t)p / 4096 * 4096;
    size_t length = (uintptr_t)p + n - first;
    std::string present((length + 4095) / 4096, 0);
    return mincore((void*)first, length, (unsigned char*)present.data()) == 0;
}

/// The lock that touches the range and has the lowest address; end() if none does.
static std::map<uintptr_t, Lock>::iterator touching(const void* p, size_t n) {
    auto i = locks.upper_bound((uintptr_t)p);
    if (i != locks.begin()) {
        auto before = std::prev(i);
        if (before->first + before->second.bytes > (uintptr_t)p) return before;
    }
    return i != locks.end() && i->first < (uintptr_t)p + n ? i : locks.end();
}

static char* map_again(void* p, size_t n, bool* twice) {
    *twice = false;
    if ((uintptr_t)p % 4096) return (char*)p;
    void* at = mremap(p, 0, n, MREMAP_MAYMOVE);  // of length 0: a second mapping of the same pages, if they are shared
    if (at == MAP_FAILED) return (char*)p;
    *twice = true;
    return (char*)at;
}

int lock_range(void* p, size_t n, bool owned) {
    if (!p || !n || !is_mapped(p, n)) return INVALID_VALUE;
    std::lock_guard guard(m);
    if (touching(p, n) != locks.end()) return HOST_ALREADY_REGISTERED;
    if (locked_bytes + n > settings().lock_limit_bytes) return OUT_OF_MEMORY;
    bool twice = false;
    char* seen = owned ? (char*)p : map_again(p, n, &twice);
    locks[(uintptr_t)p] = {n, owned, seen, twice};
    locked_bytes += n;
    return OK;
}

int unlock_range(void* p, bool owned) {
    drain_all();  // the driver does not let pages go that a copy still uses
    std::lock_guard guard(m);
    auto i = locks.find((uintptr_t)p);
    if (i == locks.end() || i->second.owned != owned) return owned ? INVALID_VALUE : HOST_NOT_REGISTERED;
    if (owned) munmap(p, i->second.bytes);
    if (i->second.mapped_twice) munmap(i->second.seen, i->second.bytes);
    locked_bytes -= i->second.bytes;
    locks.erase(i);
    return OK;
}

Host host_range(const void* p, size_t n, char** seen) {
    std::lock_guard guard(m);
    *seen = (char*)p;
    auto i = touching(p, n);
    if (i == locks.end()) return Host::PAGEABLE;
    if (i->first > (uintptr_t)p || (uintptr_t)p + n > i->first + i->second.bytes) return Host::CROSSING;
    *seen = i->second.seen + ((uintptr_t)p - i->first);
    return Host::LOCKED;
}

extern "C" uint64_t cudasim_locked_bytes() {
    std::lock_guard guard(m);
    return locked_bytes;
}
}  // namespace sim
