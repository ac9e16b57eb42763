// The simulated CUDA runtime: what its parts know of each other.
//
// A device address is one that the host cannot touch: all of them lie in a range that stays PROT_NONE. The bytes lie
// in a shadow at a constant distance, which only the simulation knows. Addresses are never given out twice, so
// whatever still refers to freed memory is found out.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace sim {

constexpr uintptr_t BASE = 0x200000000000, SPAN = uintptr_t(1) << 40;  // the shadow begins at BASE + SPAN
constexpr size_t GRANULE = size_t(2) << 20;
constexpr int MAX_DEVICES = 8, MAX_PROCESSES = 64;

/// The runtime's error codes that the simulation gives (driver_types.h).
enum Code {
    OK = 0, OPERATING_SYSTEM = 304, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    PEER_ALREADY_ENABLED = 704, HOST_ALREADY_REGISTERED = 712, HOST_NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907,
};

// ---- settings.cpp: the environment, read at the first call as CUDA reads CUDA_VISIBLE_DEVICES

struct Settings {
    int devices = 0, physical[MAX_DEVICES] = {};  // those that are visible, in the order of their CUDA numbers
    size_t memory_bytes, context_bytes, lock_limit_bytes;
    bool asynchronous, poison;
    unsigned delay_us, seed;
};
Settings& settings();
bool begun();  // whether anything has asked for them
size_t number_setting(const char* name, size_t otherwise);

// ---- account.cpp: which process uses how much of which GPU, in a file that processes share

struct ProcessEntry {
    std::atomic<int> pid;
    std::atomic<int> state;     // CUprocessState
    std::atomic<int> in_calls;  // threads inside of the API
    std::atomic<int> order, answer, thread_id;  // to the thread that checkpoints this process
    std::atomic<int64_t> used_bytes[MAX_DEVICES], saved_bytes[MAX_DEVICES];
    int move_to[MAX_DEVICES];  // for a restore: where each physical GPU's contents go
    std::atomic<int> lacked_memory;  // in a restore; there is none after that, as driver 580 has it
};
ProcessEntry& own_entry();
/// The entry of a living process, or null.
ProcessEntry* entry_of(int pid);
ProcessEntry* all_entries();
size_t used_bytes(int physical);
/// OUT_OF_MEMORY, and nothing is charged, if the device lacks that much.
int charge(int device, int64_t bytes);
/// A context on this device, which takes memory of its own.
void activate(int device);
bool active(int device);

// ---- faults.cpp: counts, faults on order, the error state

extern thread_local int last_error;
extern std::atomic<int> sticky_error;
/// One call of the API: counted, held up while the process is locked, failed if that was ordered.
struct Call {
    /// A query does not touch the context, so it is answered after a sticky error, too.
    explicit Call(const char* name, bool query = false);
    ~Call();
    int code;
};
void count_bytes(const char* kind, size_t bytes);
/// Add a line to what the summary of a test session counts.
void tell(const std::string& words);
/// Note an error as the thread's last one; returns it.
int said(int code);
/// An error that the context does not recover from.
int stuck(int code);

// ---- memory.cpp

inline bool is_device(const void* p) { return (uintptr_t)p - BASE < SPAN; }
inline char* shadow(const void* p) { return (char*)p + (is_device(p) ? SPAN : 0); }
/// `mapped_for`: of memory that was mapped (`cuMemMap`), a bit for each device that may use it; else 0.
struct Block { size_t bytes; int device; uint64_t mapped_for; };
/// Whether a live block holds the whole range, and on which device it is.
bool find_block(const void* p, size_t n, Block* found = nullptr);
int allocate(void** p, size_t n, int device);
int release(void* p);
uintptr_t reserve_addresses(size_t n);
void poison(uintptr_t address, size_t n);
void fence(uintptr_t address, size_t n);
void add_block(uintptr_t address, size_t n, int device, uint64_t mapped_for = 0);
void remove_block(uintptr_t address);
/// Take all blocks away from, or give them back to, whoever would use them (a checkpointed process).
void protect_all(bool accessible);

// ---- hostlocks.cpp: page-locked ranges of the host

enum class Host { PAGEABLE, LOCKED, CROSSING };
/// How a host range lies; `seen` becomes the address by which the device reaches a locked one.
Host host_range(const void* p, size_t n, char** seen);
int lock_range(void* p, size_t n, bool owned);
int unlock_range(void* p, bool owned);

// ---- streams.cpp

struct Capture;
struct Stream : std::enable_shared_from_this<Stream> {
    int device = 0, priority = 0;
    unsigned flags = 0;
    std::shared_ptr<Capture> capture;
    std::mutex m;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    uint64_t pushed = 0, done = 0;
    bool started = false, held = false, closed = false;
    std::mt19937 random;

    void push(std::function<void()> work);
    void wait(uint64_t ticket);
    uint64_t ticket();
    bool idle();
    void drain() { wait(ticket()); }
    void linger();  // asynchronous work takes a random time, from this stream's own seed
    bool coin();
    void work();
};
using StreamRef = std::shared_ptr<Stream>;
StreamRef new_stream(int device, unsigned flags, int priority);
/// The stream of a handle, a device's default stream for null; an empty one for a handle that is none.
StreamRef find_stream(const void* handle, int device);
int close_stream(void* handle);
void drain_device(int device);
void drain_all();

using Progress = std::map<const Stream*, uint64_t>;  // how many operations of each stream of a capture
struct Event {
    int device = 0;
    unsigned flags = 0;
    StreamRef stream;
    uint64_t ticket = 0;
    std::shared_ptr<double> time_ms;
    std::shared_ptr<Capture> capture;
    Progress captured;  // what of the capture comes before it
};
using EventRef = std::shared_ptr<Event>;
EventRef new_event(unsigned flags);
EventRef find_event(const void* handle);
void forget_event(const void* handle);
int record_event(Event& event, Stream& stream);
int wait_event(Stream& stream, Event& event);

// ---- copies.cpp

/// `peers`: whether the caller has said of which devices the memory is (`cudaMemcpyPeerAsync`).
int copy(void* to, const void* from, size_t n, Stream& stream, bool asynchronous, bool peers = false);
int copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, Stream& stream);
int fill(void* to, int value, size_t n, Stream& stream);

// ---- graphs.cpp

struct Range { char* at; size_t bytes; };  // as the host sees it: in the shadow, or host memory
struct Node { std::function<void()> run; std::vector<Range> writes; };
struct Graph { std::vector<std::shared_ptr<Node>> nodes; };
enum CaptureMode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
struct Capture {
    uint64_t id;
    CaptureMode mode;
    std::thread::id thread;
    Stream* origin;
    bool invalid = false;
    Graph* graph;
    std::vector<std::pair<Range, std::string>> before;  // bytes that a captured operation overwrote
    std::map<const Stream*, Progress> progress;         // by stream: what its next operation comes after
};
extern thread_local CaptureMode capture_mode;
int begin_capture(Stream& stream, CaptureMode mode);
int join_capture(Stream& stream, const Event& event);
int end_capture(Stream& stream, Graph** graph);
/// Record an operation. It is carried out, too, so that what follows has sound values; `end_capture` undoes that.
void record(Stream& stream, std::function<void()> run, std::vector<Range> writes, bool carry_out = true);
void note_write(Capture& capture, Range range);
/// CAPTURE_UNSUPPORTED, and the capture is lost, if this thread may not make an unsafe call now.
int unsafe_call();
/// The same, for a call that waits for a stream or a whole device (stream null).
int waiting_call(Stream* stream, int device);
int launch(const Graph& graph, Stream& stream);

extern thread_local int current_device;
extern thread_local bool device_is_bound;  // a context is current in this thread
/// The current device, with a context on it.
int here();
}  // namespace sim
