// Stream capture and graphs: what may not be called while capturing, recording, and replay.
//
// A captured operation is carried out all the same, because the shapes and values of what follows may depend on it.
// The bytes that it overwrites are kept and put back when the capture ends: a capture leaves no trace in memory.
#include "sim.h"
#include <cstring>
#include <set>
#include <thread>

namespace sim {

thread_local CaptureMode capture_mode = GLOBAL;
static std::mutex& m = *new std::mutex;
static auto& captures = *new std::set<std::shared_ptr<Capture>>;
static auto& capturing_streams = *new std::set<Stream*>;
static uint64_t next_id = 1;

int begin_capture(Stream& stream, CaptureMode mode) {
    std::lock_guard guard(m);
    if (stream.capture) return ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    *capture = {next_id++, mode, std::this_thread::get_id(), &stream, false, new Graph, {}, {}};
    captures.insert(capture);
    stream.capture = capture;
    capturing_streams.insert(&stream);
    return OK;
}

int join_capture(Stream& stream, const Event& event) {
    auto capture = event.capture;
    std::lock_guard guard(m);
    if (stream.capture && stream.capture != capture) return CAPTURE_ISOLATION;
    if (!captures.count(capture)) return OK;  // it has ended, and with it what its events stood for
    stream.capture = capture;
    capturing_streams.insert(&stream);
    auto& progress = capture->progress[&stream];
    for (auto& [other, count] : event.captured) progress[other] = std::max(progress[other], count);
    return OK;
}

/// Whether the stream that ends a capture comes after all that the others have recorded.
static bool all_joined(Capture& capture) {
    auto& ours = capture.progress[capture.origin];
    for (auto& [stream, progress] : capture.progress)
        if (progress[stream] > ours[stream]) return false;
    return true;
}

static void put_back(Capture& capture) {
    for (auto i = capture.before.rbegin(); i != capture.before.rend(); ++i)
        memcpy(i->first.at, i->second.data(), i->first.bytes);
    capture.before.clear();
}

int end_capture(Stream& stream, Graph** graph) {
    *graph = nullptr;
    auto capture = stream.capture;
    if (!capture) return ILLEGAL_STATE;
    if (capture->origin != &stream) return CAPTURE_UNMATCHED;
    std::lock_guard guard(m);
    put_back(*capture);
    captures.erase(capture);
    // Streams that joined are let go with it: `capture` is looked at through this function's reference only.
    for (auto i = capturing_streams.begin(); i != capturing_streams.end();)
        if ((*i)->capture == capture) {
            (*i)->capture = nullptr;
            i = capturing_streams.erase(i);
        } else {
            ++i;
        }
    if (capture->invalid) return CAPTURE_INVALIDATED;
    if (!all_joined(*capture)) return CAPTURE_UNJOINED;
    *graph = capture->graph;
    return OK;
}

void note_write(Capture& capture, Range range) {
    std::lock_guard guard(m);
    capture.before.push_back({range, std::string(range.at, range.bytes)});
}

void record(Stream& stream, std::function<void()> run, std::vector<Range> writes, bool carry_out) {
    auto capture = stream.capture;
    if (carry_out) {
        for (auto& range : writes) note_write(*capture, range);
        run();
    }
    auto node = std::make_shared<Node>();
    *node = {std::move(run), std::move(writes)};
    std::lock_guard guard(m);
    capture->graph->nodes.push_back(node);
    capture->progress[&stream][&stream]++;
}

int unsafe_call() {
    if (capture_mode == RELAXED) return OK;
    std::lock_guard guard(m);
    int code = OK;
    for (auto& capture : captures) {
        bool own = capture->thread == std::this_thread::get_id();
        bool forbidden = own ? capture->mode != RELAXED : capture->mode == GLOBAL && capture_mode == GLOBAL;
        if (!forbidden) continue;
        capture->invalid = true;
        code = CAPTURE_UNSUPPORTED;
    }
    return code;
}

int waiting_call(Stream* stream, int device) {
    std::lock_guard guard(m);
    int code = OK;
    for (auto other : capturing_streams)
        if (other->capture && (stream ? other == stream : other->device == device)) {
            other->capture->invalid = true;
            code = CAPTURE_UNSUPPORTED;
        }
    return code;
}

/// Carried out at once on what the stream has left behind, and seen by others late, as all that a stream does.
int launch(const Graph& graph, Stream& stream) {
    if (stream.capture) return NOT_SUPPORTED;  // a graph inside of a graph
    stream.drain();
    std::vector<std::pair<Range, std::string>> before, after;
    for (auto& node : graph.nodes) {
        for (auto& range : node->writes) before.push_back({range, std::string(range.at, range.bytes)});
        node->run();
    }
    if (!settings().asynchronous) return OK;
    for (auto& [range, bytes] : before) after.push_back({range, std::string(range.at, range.bytes)});
    for (auto i = before.rbegin(); i != before.rend(); ++i) memcpy(i->first.at, i->second.data(), i->first.bytes);
    stream.push([after = std::move(after), &stream] {
        stream.linger();
        for (auto& [range, bytes] : after) memcpy(range.at, bytes.data(), range.bytes);
    });
    return OK;
}

extern "C" {
int cudasim_capturing(void* handle) {
    auto stream = find_stream(handle, current_device);
    return stream && stream->capture != nullptr;
}
/// Keep the bytes of device memory that a captured operation is about to overwrite.
void cudasim_note_write(void* handle, const void* p, size_t n) {
    auto stream = find_stream(handle, current_device);
    if (stream && stream->capture && n) note_write(*stream->capture, {shadow(p), n});
}
/// A node: `run(data)` at every replay, `drop(data)` with the graph; what it writes is in `at` and `bytes`.
void cudasim_record(void* handle, void (*run)(void*), void* data, void (*drop)(void*), void* const* at,
                    const size_t* bytes, size_t count) {
    auto stream = find_stream(handle, current_device);
    std::shared_ptr<void> kept(data, drop);
    std::vector<Range> writes;
    for (size_t i = 0; i < count; i++)
        if (bytes[i]) writes.push_back({shadow(at[i]), bytes[i]});
    record(*stream, [run, kept] { run(kept.get()); }, std::move(writes), false);
}
}
}  // namespace sim
