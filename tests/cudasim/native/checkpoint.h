// What the process that checkpoints and the process that is checkpointed say to each other, through the account.
#pragma once
#include <atomic>
#include <time.h>

namespace sim {
enum Order { NO_ORDER, ASK_IDLE, TAKE_OFF, BRING_BACK };
constexpr int NO_ANSWER = -1;
void futex_wait(std::atomic<int>& word, int value, const timespec* timeout);
void futex_wake(std::atomic<int>& word);
}  // namespace sim
