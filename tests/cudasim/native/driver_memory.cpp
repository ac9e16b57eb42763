// libcuda.so.1: virtual memory management. Physical memory is a memfd; to map it is to map the shadow of an address.
#include "sim.h"
#include <map>
#include <sys/mman.h>
#include <unistd.h>

#define API extern "C" int
#define CALL                   \
    sim::Call call_(__func__); \
    if (call_.code) return call_.code
typedef unsigned long long Address;

namespace {
struct Location { int type, id; };
struct Properties { int type, handle_types; Location location; };
struct Access { Location location; int flags; };
enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3 };

/// Charged until it is released and mapped nowhere.
struct Physical { size_t bytes; int device, fd, mappings; bool released; };
struct Mapping { size_t bytes; Address handle; };
std::mutex& m = *new std::mutex;
auto& physical = *new std::map<Address, Physical>;
auto& mappings = *new std::map<Address, Mapping>;
auto& reserved = *new std::map<Address, size_t>;
Address next_handle = 1;

void let_go(Address handle) {
    Physical& memory = physical[handle];
    if (!memory.released || memory.mappings) return;
    close(memory.fd);
    sim::charge(memory.device, -(int64_t)memory.bytes);
    physical.erase(handle);
}

bool mapped_within(Address at, size_t n) {
    auto i = mappings.lower_bound(at);
    return i != mappings.end() && i->first < at + n;
}
}  // namespace

API cuMemGetAllocationGranularity(size_t* bytes, const Properties* properties, int) {
    CALL;
    if (properties->type != PINNED || properties->location.type != ON_DEVICE) return sim::INVALID_VALUE;
    *bytes = sim::GRANULE;
    return sim::OK;
}
API cuMemAddressReserve(Address* at, size_t n, size_t, Address, unsigned long long flags) {
    CALL;
    if (!n || n % sim::GRANULE || flags) return sim::INVALID_VALUE;
    std::lock_guard guard(m);
    *at = sim::reserve_addresses(n);
    reserved[*at] = n;
    return sim::OK;
}
API cuMemAddressFree(Address at, size_t n) {
    CALL;
    std::lock_guard guard(m);
    auto found = reserved.find(at);
    if (found == reserved.end() || found->second != n || mapped_within(at, n)) return sim::INVALID_VALUE;
    reserved.erase(found);
    return sim::OK;
}
API cuMemCreate(Address* handle, size_t n, const Properties* properties, unsigned long long flags) {
    CALL;
    if (int code = sim::unsafe_call()) return code;
    const Location& location = properties->location;
    if (properties->type != PINNED || location.type != ON_DEVICE || flags || !n || n % sim::GRANULE) return sim::INVALID_VALUE;
    if (location.id < 0 || location.id >= sim::settings().devices) return sim::INVALID_DEVICE;
    if (int code = sim::charge(location.id, n)) return code;
    int fd = memfd_create("cudasim", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, n)) return sim::OUT_OF_MEMORY;
    std::lock_guard guard(m);
    *handle = next_handle++;
    physical[*handle] = {n, location.id, fd, 0, false};
    return sim::OK;
}
API cuMemRelease(Address handle) {
    CALL;
    std::lock_guard guard(m);
    auto found = physical.find(handle);
    if (found == physical.end() || found->second.released) return sim::INVALID_VALUE;
    found->second.released = true;
    let_go(handle);
    return sim::OK;
}
API cuMemMap(Address at, size_t n, size_t offset, Address handle, unsigned long long flags) {
    CALL;
    std::lock_guard guard(m);
    auto memory = physical.find(handle);
    auto range = reserved.upper_bound(at);
    if (memory == physical.end() || memory->second.released || range == reserved.begin()) return sim::INVALID_VALUE;
    --range;
    bool fits = at + n <= range->first + range->second && offset == 0 && n == memory->second.bytes;
    if (!fits || flags || mapped_within(at, n)) return sim::INVALID_VALUE;
    int how = MAP_SHARED | MAP_FIXED;
    if (mmap(sim::shadow((void*)at), n, PROT_NONE, how, memory->second.fd, 0) == MAP_FAILED) return sim::OUT_OF_MEMORY;
    memory->second.mappings++;
    mappings[at] = {n, handle};
    return sim::OK;
}
API cuMemSetAccess(Address at, size_t n, const Access* access, size_t count) {
    CALL;
    uint64_t devices = 0;
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != ON_DEVICE || access[i].flags != READ_WRITE) return sim::INVALID_VALUE;
        if (access[i].location.id < 0 || access[i].location.id >= sim::settings().devices) return sim::INVALID_DEVICE;
        devices |= uint64_t(1) << access[i].location.id;
    }
    std::lock_guard guard(m);
    if (!mapped_within(at, n)) return sim::INVALID_VALUE;
    for (auto i = mappings.lower_bound(at); i != mappings.end() && i->first < at + n; ++i) {
        sim::Block block{};
        if (!sim::find_block((void*)i->first, 1, &block)) {  // nobody has had access yet
            if (mprotect(sim::shadow((void*)i->first), i->second.bytes, PROT_READ | PROT_WRITE)) return sim::OUT_OF_MEMORY;
            sim::poison(i->first, i->second.bytes);
        }
        sim::add_block(i->first, i->second.bytes, physical[i->second.handle].device, block.mapped_for | devices);
    }
    return sim::OK;
}
/// Waits for nobody: who unmaps memory that a kernel still uses has made a mistake, and the simulation dies of it.
API cuMemUnmap(Address at, size_t n) {
    CALL;
    std::lock_guard guard(m);
    auto i = mappings.find(at);
    if (i == mappings.end() || i->second.bytes != n) return sim::INVALID_VALUE;
    sim::remove_block(at);
    sim::fence(at, n);
    Address handle = i->second.handle;
    mappings.erase(i);
    physical[handle].mappings--;
    let_go(handle);
    return sim::OK;
}

extern "C" size_t cudasim_physical_handles() {
    std::lock_guard guard(m);
    return physical.size();
}
