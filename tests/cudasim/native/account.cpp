// The account of the devices' memory: one entry for each process, in a file that all of them map.
#include "sim.h"
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

namespace sim {

static int account_file = -1;

static ProcessEntry* map_entries() {
    const char* path = getenv("CUDASIM_ACCOUNT");
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (path) {
        account_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (account_file < 0 || ftruncate(account_file, sizeof(ProcessEntry) * MAX_PROCESSES)) {
            perror("cudasim: CUDASIM_ACCOUNT");
            abort();
        }
        flags = MAP_SHARED;
    }
    void* at = mmap(nullptr, sizeof(ProcessEntry) * MAX_PROCESSES, PROT_READ | PROT_WRITE, flags, account_file, 0);
    if (at == MAP_FAILED) abort();
    return (ProcessEntry*)at;
}

ProcessEntry* all_entries() {
    static ProcessEntry* entries = map_entries();
    return entries;
}

static bool alive(int pid) { return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM); }

/// Held while sums are compared with limits, by this process's threads and by other processes.
struct AccountLock {
    std::unique_lock<std::mutex> here;
    AccountLock() {
        static std::mutex& m = *new std::mutex;
        here = std::unique_lock(m);
        all_entries();
        if (account_file >= 0) flock(account_file, LOCK_EX);
    }
    ~AccountLock() {
        if (account_file >= 0) flock(account_file, LOCK_UN);
    }
};

static ProcessEntry* own;

static ProcessEntry& own_locked() {
    if (own) return *own;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        ProcessEntry& entry = all_entries()[i];
        if (alive(entry.pid)) continue;
        entry.state = entry.lacked_memory = entry.in_calls = entry.order = entry.answer = entry.thread_id = 0;
        for (int d = 0; d < MAX_DEVICES; d++) entry.used_bytes[d] = entry.saved_bytes[d] = 0;
        entry.pid = getpid();
        own = &entry;
        return entry;
    }
    fprintf(stderr, "cudasim: more than %d processes\n", MAX_PROCESSES);
    abort();
}

ProcessEntry& own_entry() {
    if (own) return *own;
    AccountLock lock;
    return own_locked();
}

ProcessEntry* entry_of(int pid) {
    if (!alive(pid)) return nullptr;
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (all_entries()[i].pid == pid) return &all_entries()[i];
    return nullptr;
}

size_t used_bytes(int physical) {
    int64_t sum = 0;
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (alive(all_entries()[i].pid)) sum += all_entries()[i].used_bytes[physical];
    return sum;
}

static bool contexts[MAX_DEVICES];
bool active(int device) { return contexts[device]; }

static int charge_locked(int device, int64_t bytes) {
    int physical = settings().physical[device];
    ProcessEntry& entry = own_locked();
    if (bytes > 0 && used_bytes(physical) + bytes > settings().memory_bytes) return OUT_OF_MEMORY;
    entry.used_bytes[physical] += bytes;
    return OK;
}

void activate(int device) {
    AccountLock lock;
    if (contexts[device]) return;
    contexts[device] = true;
    own_locked().used_bytes[settings().physical[device]] += settings().context_bytes;
}

int charge(int device, int64_t bytes) {
    activate(device);
    AccountLock lock;
    return charge_locked(device, bytes);
}

extern "C" int cudasim_has_context(int device) { return contexts[device]; }
extern "C" uint64_t cudasim_used_bytes(int physical) { return used_bytes(physical); }
}  // namespace sim
