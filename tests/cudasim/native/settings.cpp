// Settings: what the environment says at the first call of the API.
#include "sim.h"
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace sim {

size_t number_setting(const char* name, size_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

/// As CUDA reads it: everything from the first unknown entry on is ignored.
static void choose_visible(Settings& s, int present) {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int i = 0; i < present; i++) s.physical[s.devices++] = i;
        return;
    }
    for (const char* p = visible; *p && s.devices < MAX_DEVICES;) {
        char* end = nullptr;
        long number = -1;
        if (!strncmp(p, "GPU-", 4)) {  // the last two digits of the UUID are the number
            size_t length = strcspn(p, ",");
            if (length == 40) number = strtol(std::string(p + 38, 2).c_str(), nullptr, 16);
            end = (char*)p + length;
        } else {
            number = strtol(p, &end, 10);
            if (end == p) break;
        }
        if (number < 0 || number >= present) break;
        s.physical[s.devices++] = (int)number;
        p = *end == ',' ? end + 1 : end;
    }
}

static Settings read() {
    Settings s;
    s.memory_bytes = number_setting("CUDASIM_MEMORY_MIB", 2048) << 20;
    s.context_bytes = number_setting("CUDASIM_CONTEXT_MIB", 64) << 20;
    s.lock_limit_bytes = number_setting("CUDASIM_LOCK_LIMIT_MIB", 1 << 20) << 20;
    s.asynchronous = number_setting("CUDASIM_ASYNC", 1);
    s.poison = number_setting("CUDASIM_POISON", 1);
    s.delay_us = number_setting("CUDASIM_DELAY_US", 200);
    s.seed = number_setting("CUDASIM_SEED", 1);
    choose_visible(s, std::min<int>(number_setting("CUDASIM_DEVICES", 2), MAX_DEVICES));
    return s;
}

static std::atomic<bool> has_begun;

Settings& settings() {
    static Settings& s = *new Settings(read());
    has_begun = true;
    return s;
}

bool begun() { return has_begun; }
}  // namespace sim
