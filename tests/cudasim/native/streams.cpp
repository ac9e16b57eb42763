// Streams: a worker thread each, with a random delay before and after what it does. Whoever does not wait finds out.
#include "sim.h"
#include <chrono>
#include <csignal>
#include <set>
#include <sys/prctl.h>
#include <thread>
#include <time.h>
#include <unordered_map>

namespace sim {

constexpr unsigned NON_BLOCKING = 1, DISABLE_TIMING = 2;
static std::mutex& m = *new std::mutex;
static auto& streams = *new std::unordered_map<const void*, StreamRef>;
static auto& events = *new std::unordered_map<const void*, EventRef>;
static StreamRef defaults[MAX_DEVICES];
static unsigned made;

static double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

StreamRef new_stream(int device, unsigned flags, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->device = device;
    stream->flags = flags;
    stream->priority = priority;
    std::lock_guard guard(m);
    stream->random.seed(settings().seed * 7919 + ++made);
    streams[stream.get()] = stream;
    return stream;
}

StreamRef find_stream(const void* handle, int device) {
    if ((uintptr_t)handle <= 2) {  // null, cudaStreamLegacy, cudaStreamPerThread
        {
            std::lock_guard guard(m);
            if (defaults[device]) return defaults[device];
        }
        auto stream = new_stream(device, 0, 0);
        std::lock_guard guard(m);
        streams.erase(stream.get());
        if (!defaults[device]) defaults[device] = stream;
        return defaults[device];
    }
    std::lock_guard guard(m);
    auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
}

int close_stream(void* handle) {
    StreamRef stream;
    {
        std::lock_guard guard(m);
        auto found = streams.find(handle);
        if (found == streams.end()) return INVALID_HANDLE;
        stream = found->second;
        streams.erase(found);
    }
    std::lock_guard guard(stream->m);
    stream->closed = true;  // what is queued is still carried out
    stream->changed.notify_all();
    return OK;
}

static std::vector<StreamRef> all_of(int device) {
    std::vector<StreamRef> found;
    std::lock_guard guard(m);
    for (auto& [handle, stream] : streams)
        if (device < 0 || stream->device == device) found.push_back(stream);
    for (int d = 0; d < MAX_DEVICES; d++)
        if (defaults[d] && (device < 0 || d == device)) found.push_back(defaults[d]);
    return found;
}

void drain_device(int device) {
    for (auto& stream : all_of(device)) stream->drain();
}
void drain_all() { drain_device(-1); }

bool all_idle() {
    for (auto& stream : all_of(-1))
        if (!stream->idle()) return false;
    return true;
}

/// What the legacy default stream and those that are not "non-blocking" wait for: each other.
static std::vector<std::pair<StreamRef, uint64_t>> implied_waits(Stream& stream) {
    std::vector<std::pair<StreamRef, uint64_t>> waits;
    if (stream.flags & NON_BLOCKING) return waits;
    bool legacy;
    {
        std::lock_guard guard(m);
        legacy = defaults[stream.device].get() == &stream;
    }
    for (auto& other : all_of(stream.device)) {
        bool other_is_legacy = other == defaults[stream.device];
        if (other.get() == &stream || other->flags & NON_BLOCKING || legacy == other_is_legacy) continue;
        if (!other->idle()) waits.push_back({other, other->ticket()});
    }
    return waits;
}

void Stream::push(std::function<void()> item) {
    if (!settings().asynchronous) {
        item();
        return;
    }
    auto waits = implied_waits(*this);
    std::lock_guard guard(m);
    if (!waits.empty())
        item = [waits, item = std::move(item)] {
            for (auto& [stream, ticket] : waits) stream->wait(ticket);
            item();
        };
    queue.push_back(std::move(item));
    pushed++;
    if (!started) {
        started = true;
        std::thread([self = shared_from_this()] { self->work(); }).detach();
    }
    changed.notify_all();
}

void Stream::work() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    prctl(PR_SET_NAME, "cudasim-stream");
    prctl(PR_SET_TIMERSLACK, 1);
    std::unique_lock lock(m);
    for (;;) {
        changed.wait(lock, [this] { return (!queue.empty() && !held) || (closed && queue.empty()); });
        if (queue.empty()) return;
        auto item = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        item();
        item = nullptr;
        lock.lock();
        done++;
        changed.notify_all();
    }
}

uint64_t Stream::ticket() {
    std::lock_guard guard(m);
    return pushed;
}
bool Stream::idle() {
    std::lock_guard guard(m);
    return done >= pushed;
}
void Stream::wait(uint64_t ticket) {
    std::unique_lock lock(m);
    changed.wait(lock, [&] { return done >= ticket; });
}

void Stream::linger() {
    if (!settings().asynchronous || !settings().delay_us) return;
    unsigned us = random() % (settings().delay_us + 1);
    timespec time{0, (long)us * 1000};
    nanosleep(&time, nullptr);
}
bool Stream::coin() { return random() & 1; }

// Events

EventRef new_event(unsigned flags) {
    auto event = std::make_shared<Event>();
    event->device = here();
    event->flags = flags;
    std::lock_guard guard(m);
    events[event.get()] = event;
    return event;
}

EventRef find_event(const void* handle) {
    std::lock_guard guard(m);
    auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second;
}

void forget_event(const void* handle) {
    std::lock_guard guard(m);
    events.erase(handle);
}

int record_event(Event& event, Stream& stream) {
    if (event.device != stream.device) return INVALID_HANDLE;
    event.capture = stream.capture;
    if (stream.capture) {
        event.captured = stream.capture->progress[&stream];
        return OK;
    }
    auto time = std::make_shared<double>(0);
    event.time_ms = time;
    stream.push([time] { *time = now_ms(); });
    event.stream = stream.shared_from_this();
    event.ticket = settings().asynchronous ? stream.ticket() : 0;
    return OK;
}

/// A stream that waits for a captured event joins the capture; a captured stream may wait for nothing else.
int wait_event(Stream& stream, Event& event) {
    if (event.capture) return join_capture(stream, event);
    if (!event.stream) return OK;  // never recorded
    if (stream.capture) return CAPTURE_ISOLATION;
    if (event.stream.get() != &stream)
        stream.push([from = event.stream, ticket = event.ticket] { from->wait(ticket); });
    return OK;
}

extern "C" {
/// Stop a stream before its next operation, and let it go on. Null is the current device's default stream.
int cudasim_hold(void* handle, int held) {
    auto stream = find_stream(handle, current_device);
    if (!stream) return INVALID_HANDLE;
    std::lock_guard guard(stream->m);
    stream->held = held;
    stream->changed.notify_all();
    return OK;
}
/// Wait for a stream, uncounted: as the simulation itself does before it computes.
void cudasim_drain(void* handle) {
    if (auto stream = find_stream(handle, current_device)) stream->drain();
}
void cudasim_drain_all() { drain_all(); }
/// Do something in a stream's order, late; uncounted.
void cudasim_push(void* handle, void (*run)(void*), void* data) {
    auto stream = find_stream(handle, current_device);
    stream->push([run, data, self = stream.get()] {
        self->linger();
        run(data);
    });
}
int cudasim_asynchronous() { return settings().asynchronous; }
}
}  // namespace sim
