// Every call of the API passes here: it is counted, it may be ordered to fail, and errors leave their state.
#include "sim.h"
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <map>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace sim {

void start_checkpoint_thread();

thread_local int last_error;
std::atomic<int> sticky_error;
static thread_local int depth;  // an API function that calls another one is one call
static std::atomic<int> owner;

constexpr int KILLED = -9;  // no code of CUDA's: the process is killed where the call would have begun
struct Order { uint64_t at; int code; bool sticky; };
static std::mutex& m = *new std::mutex;
static auto& calls = *new std::map<std::string, uint64_t>;
static auto& bytes = *new std::map<std::string, uint64_t>;
static auto& orders = *new std::multimap<std::string, Order>;

int said(int code) {
    if (code) last_error = code;
    return code;
}

int stuck(int code) {
    sticky_error = code;
    return said(code);
}

/// CUDASIM_FAIL=name:nth=code[s],...: the nth call of that name gives the code; s: and every call from then on.
static void read_orders() {
    const char* text = getenv("CUDASIM_FAIL");
    while (text && *text) {
        char name[128];
        unsigned long nth;
        int code, length = 0;
        if (sscanf(text, "%127[^:]:%lu=%d%n", name, &nth, &code, &length) < 3) {
            fprintf(stderr, "cudasim: CUDASIM_FAIL has no name:nth=code at %s\n", text);
            abort();
        }
        text += length;
        bool sticky = *text == 's';
        if (sticky) text++;
        if (*text == ',') text++;
        orders.insert({name, {nth, code, sticky}});
    }
}

void tell(const std::string& words) {
    const char* path = getenv("CUDASIM_TALLY");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (file < 0) return;
    std::string line = words + "\n";
    if (write(file, line.data(), line.size()) < 0) perror("cudasim: CUDASIM_TALLY");
    close(file);
}

static bool begin() {
    int nobody = 0;
    if (owner.compare_exchange_strong(nobody, getpid())) {
        std::lock_guard guard(m);
        read_orders();
        settings();
        if (getenv("CUDASIM_ACCOUNT")) start_checkpoint_thread();
    }
    return owner == getpid();  // CUDA does not survive a fork
}

static void wait_while_locked() {
    ProcessEntry& entry = own_entry();
    for (;;) {
        entry.in_calls++;
        int state = entry.state;
        if (state == 0) return;
        entry.in_calls--;
        syscall(SYS_futex, (int*)&entry.state, FUTEX_WAIT, state, nullptr, nullptr, 0);
    }
}

/// Errors of the driver API are not the runtime's last error.
static int noted(const char* name, int code) { return strncmp(name, "cuda", 4) ? code : said(code); }

Call::Call(const char* name, bool query) {
    if (!begin()) {
        depth++;
        code = noted(name, NOT_INITIALIZED);
        return;
    }
    if (depth++ == 0) wait_while_locked();
    std::lock_guard guard(m);
    uint64_t nth = ++calls[name];
    code = query ? OK : sticky_error.load();
    auto [first, last] = orders.equal_range(name);
    for (auto i = first; i != last; ++i)
        if (i->second.at == nth) {
            code = i->second.sticky ? stuck(i->second.code) : i->second.code;
            tell("fault " + std::string(name) + " " + std::to_string(code) + (i->second.sticky ? "s" : ""));
            if (code == KILLED) kill(getpid(), SIGKILL);
        }
    noted(name, code);
}

Call::~Call() {
    if (--depth == 0 && owner == getpid()) own_entry().in_calls--;
}

void count_bytes(const char* kind, size_t n) {
    std::lock_guard guard(m);
    bytes[kind] += n;
}

extern "C" {
void cudasim_fail(const char* name, uint64_t nth_from_now, int code, int sticky) {
    std::lock_guard guard(m);
    orders.insert({name, {calls[name] + nth_from_now, code, sticky != 0}});
}
void cudasim_forget_faults() {
    std::lock_guard guard(m);
    orders.clear();
}
uint64_t cudasim_calls(const char* name) {
    std::lock_guard guard(m);
    auto found = calls.find(name);
    return found == calls.end() ? 0 : found->second;
}
uint64_t cudasim_bytes(const char* kind) {
    std::lock_guard guard(m);
    auto found = bytes.find(kind);
    return found == bytes.end() ? 0 : found->second;
}
/// All counts as lines "name number"; returns how much room they need.
size_t cudasim_counts(char* text, size_t room) {
    std::lock_guard guard(m);
    std::string all;
    for (auto& [name, n] : calls) all += name + " " + std::to_string(n) + "\n";
    for (auto& [kind, n] : bytes) all += kind + "_bytes " + std::to_string(n) + "\n";
    if (room) {
        strncpy(text, all.c_str(), room - 1);
        text[room - 1] = 0;
    }
    return all.size() + 1;
}
int cudasim_initialized() { return owner != 0; }
}
}  // namespace sim
