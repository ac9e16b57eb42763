// libcuda.so.1: cuCheckpointProcess*, as a state machine with the documented rules:
// running -lock-> locked -checkpoint-> checkpointed -restore-> locked -unlock-> running.
#include "checkpoint.h"
#include "sim.h"
#include <csignal>
#include <chrono>
#include <cstring>
#include <map>

namespace {
using namespace sim;
enum State { RUNNING, LOCKED, CHECKPOINTED, FAILED };
struct LockArguments { unsigned timeout_ms, reserved0; uint64_t reserved1[7]; };
struct Pair { unsigned char old_uuid[16], new_uuid[16]; };
struct RestoreArguments { const Pair* pairs; unsigned count; };

int find(int pid, ProcessEntry** entry) {
    *entry = entry_of(pid);
    if (*entry) return OK;
    return kill(pid, 0) ? INVALID_VALUE : NOT_INITIALIZED;  // no such process; one without CUDA
}

int ask(ProcessEntry& entry, Order order) {
    int pid = entry.pid;
    entry.answer = NO_ANSWER;
    entry.order = order;
    futex_wake(entry.order);
    const timespec while_alive{0, 20'000'000};
    while (entry.answer == NO_ANSWER) {
        futex_wait(entry.answer, NO_ANSWER, &while_alive);
        if (!entry_of(pid)) return INVALID_VALUE;
    }
    return entry.answer;
}

int step(ProcessEntry& entry, State from, State to, Order order) {
    if (entry.state != from) return ILLEGAL_STATE;
    int code = order ? ask(entry, order) : OK;
    if (order) tell(std::string("switch ") + (to == CHECKPOINTED ? "suspend" : "resume") + " driver " + (code ? "failed" : "done"));
    if (code) return code;
    entry.state = to;
    futex_wake(entry.state);
    return OK;
}

bool zeros(const void* p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (((const char*)p)[i]) return false;
    return true;
}

/// Where each GPU's contents go; a move names every GPU.
int moves(ProcessEntry& entry, const RestoreArguments* arguments) {
    for (int d = 0; d < MAX_DEVICES; d++) entry.move_to[d] = d;
    if (!arguments || !arguments->count) return OK;
    int present = (int)number_setting("CUDASIM_DEVICES", 2);
    if ((int)arguments->count != present) return INVALID_VALUE;
    for (unsigned i = 0; i < arguments->count; i++) {
        int from = arguments->pairs[i].old_uuid[15], to = arguments->pairs[i].new_uuid[15];
        if (from >= present || to >= present) return INVALID_VALUE;
        entry.move_to[from] = to;
    }
    return OK;
}
}  // namespace

#define API extern "C" int
#define CALL              \
    Call call_(__func__); \
    if (call_.code) return call_.code
#define FIND                \
    ProcessEntry* entry;    \
    if (int code_ = find(pid, &entry)) return code_

API cuCheckpointProcessGetState(int pid, int* state) {
    CALL;
    FIND;
    *state = entry->state;
    return OK;
}
API cuCheckpointProcessGetRestoreThreadId(int pid, int* thread) {
    CALL;
    FIND;
    *thread = entry->thread_id;
    return OK;
}
API cuCheckpointProcessLock(int pid, const LockArguments* arguments) {
    CALL;
    FIND;
    if (arguments && !zeros(&arguments->reserved0, sizeof *arguments - sizeof arguments->timeout_ms)) return INVALID_VALUE;
    int running = RUNNING;
    if (!entry->state.compare_exchange_strong(running, LOCKED)) return ILLEGAL_STATE;
    auto start = std::chrono::steady_clock::now();
    while (entry->in_calls || ask(*entry, ASK_IDLE)) {
        auto passed = std::chrono::steady_clock::now() - start;
        bool late = arguments && arguments->timeout_ms && passed > std::chrono::milliseconds(arguments->timeout_ms);
        if (late) {
            entry->state = RUNNING;
            futex_wake(entry->state);
            return NOT_READY;
        }
        const timespec pause{0, 1'000'000};
        nanosleep(&pause, nullptr);
        if (!entry_of(pid)) return INVALID_VALUE;
    }
    return OK;
}
API cuCheckpointProcessCheckpoint(int pid, const void* arguments) {
    CALL;
    FIND;
    return arguments ? (int)INVALID_VALUE : step(*entry, LOCKED, CHECKPOINTED, TAKE_OFF);
}
API cuCheckpointProcessRestore(int pid, const RestoreArguments* arguments) {
    CALL;
    FIND;
    if (entry->state != CHECKPOINTED) return ILLEGAL_STATE;
    if (entry->lacked_memory) return OPERATING_SYSTEM;
    if (int code = moves(*entry, arguments)) return code;
    int code = step(*entry, CHECKPOINTED, LOCKED, BRING_BACK);
    entry->lacked_memory = code == OUT_OF_MEMORY;
    return code;
}
API cuCheckpointProcessUnlock(int pid, const void* arguments) {
    CALL;
    FIND;
    return arguments ? (int)INVALID_VALUE : step(*entry, LOCKED, RUNNING, NO_ORDER);
}
