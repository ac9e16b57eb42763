// The thread by which the driver takes this process off its GPUs and brings it back, when another process orders it.
#include "checkpoint.h"
#include "sim.h"
#include <climits>
#include <csignal>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

namespace sim {

void futex_wait(std::atomic<int>& word, int value, const timespec* timeout) {
    syscall(SYS_futex, (int*)&word, FUTEX_WAIT, value, timeout, nullptr, 0);
}
void futex_wake(std::atomic<int>& word) { syscall(SYS_futex, (int*)&word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

bool all_idle();

/// The contents stay where they are, but nobody can use them, and the GPUs' memory is free.
static int take_off(ProcessEntry& own) {
    drain_all();
    protect_all(false);
    for (int d = 0; d < MAX_DEVICES; d++) own.saved_bytes[d] = own.used_bytes[d].exchange(0);
    return OK;
}

static int bring_back(ProcessEntry& own) {
    for (int d = 0; d < MAX_DEVICES; d++)
        if (own.saved_bytes[d] && used_bytes(own.move_to[d]) + own.saved_bytes[d] > settings().memory_bytes)
            return OUT_OF_MEMORY;
    for (int d = 0; d < MAX_DEVICES; d++) own.used_bytes[own.move_to[d]] += own.saved_bytes[d].exchange(0);
    for (int i = 0; i < settings().devices; i++) settings().physical[i] = own.move_to[settings().physical[i]];
    protect_all(true);
    return OK;
}

static void obey(ProcessEntry& own) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    prctl(PR_SET_NAME, "cudasim-ckpt");
    own.thread_id = (int)syscall(SYS_gettid);
    for (;;) {
        int order = own.order;
        if (order == NO_ORDER) {
            futex_wait(own.order, NO_ORDER, nullptr);
            continue;
        }
        int answer = order == ASK_IDLE ? (all_idle() ? OK : NOT_READY) : order == TAKE_OFF ? take_off(own) : bring_back(own);
        own.order = NO_ORDER;
        own.answer = answer;
        futex_wake(own.answer);
    }
}

void start_checkpoint_thread() {
    ProcessEntry& own = own_entry();
    std::thread([&own] { obey(own); }).detach();
}
}  // namespace sim
