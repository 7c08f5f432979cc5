// What the parts of the driver without a device share: devices, contexts, streams, memory ranges.
//
// Objects that threads may still use when the process ends are never destroyed.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace fake {

enum Kind {
    kStreams,
    kEvents,
    kDeviceMemory,
    kPinned,
    kRegistered,
    kModules,
    kContexts,
    kAllocations,
    kReservations,
    kMapped,
    kGraphs,
    kKinds
};
inline std::atomic<int> live[kKinds];

constexpr int kMostDevices = 4;

struct Stream;
using StreamPtr = std::shared_ptr<Stream>;
using Work = std::function<void()>;

// A context exists while it has users. Objects remember its generation, and are gone with it.
struct Context {
    int device = 0;
    bool primary = false;
    std::atomic<int> users{0};
    std::atomic<unsigned> generation{0};
    std::mutex mutex;  // orders work of the legacy stream and of blocking streams
    StreamPtr legacy;
    std::vector<std::weak_ptr<Stream>> streams;
};

struct Device {
    std::atomic<size_t> total{size_t{16} << 30}, used{0};
    std::atomic<int> error{0};  // what every call returns once it is not zero
    std::atomic<int> taken{0};  // exclusive mode, and another process has the device
    Context primary;
};
Device& device_at(int number);
int count_devices();

// --- calls -------------------------------------------------------------------------------------

struct Calls {
    explicit Calls(const char* name);
    const char* name;
    std::atomic<long> count{0};
};
CUresult initialized();
Context* current_context();  // of this thread; may be null or gone
CUresult usable(const Context* context);

// The first statement of a function of the driver: counts the call, and refuses it without cuInit.
#define KVTIER_CALL                          \
    static fake::Calls calls_here(__func__); \
    calls_here.count++;                      \
    if (const CUresult result_here = fake::initialized()) return result_here
// The same for functions that need a context whose device works.
#define KVTIER_CONTEXT_CALL                                 \
    KVTIER_CALL;                                            \
    fake::Context* const context = fake::current_context(); \
    if (const CUresult result_here = fake::usable(context)) return result_here
#define KVTIER_TRY(...) \
    if (const CUresult result_here = (__VA_ARGS__)) return result_here

// --- streams -----------------------------------------------------------------------------------

struct Mark {
    std::mutex mutex;
    std::condition_variable changed;
    bool come = false;

    void set();
    bool is_set();
    void wait();
};
using MarkPtr = std::shared_ptr<Mark>;

// Work that streams recorded instead of running it.
struct Capture {
    StreamPtr origin;
    CUstreamCaptureMode mode;
    std::atomic<bool> invalid{false};
    const void* thread;
    std::vector<Work> nodes;
    long clock = 0;
    std::map<Stream*, long> last, joined;  // of streams that events brought in
    std::vector<StreamPtr> members;
};
using CapturePtr = std::shared_ptr<Capture>;

// Runs its work in the order of arrival, in a thread of its own.
struct Stream {
    Context* context = nullptr;
    unsigned generation = 0, flags = 0;
    bool legacy = false;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Work> todo;
    bool ending = false, ended = false;
    CapturePtr capture;  // protected by captures_mutex

    static StreamPtr make(Context* context, unsigned flags, bool legacy);
    bool blocking() const { return !legacy && (flags & CU_STREAM_NON_BLOCKING) == 0; }
    bool gone() const { return generation != context->generation; }
    void push(Work work);
    void end();

 private:
    void run();
};

// The stream of a handle; null if there is none. The legacy stream is that of `context`.
StreamPtr stream_of(CUstream handle, Context* context);
// Adds work in the order that streams guarantee; or to the graph that the stream captures.
CUresult enqueue(const StreamPtr& stream, Work work);
void finish(const StreamPtr& stream);  // waits for all work that was added before
void finish_all(Context* context);
// Potentially unsafe calls are refused while a stream captures, as this thread's mode says.
CUresult refuse_unsafe();
void forget_streams(Context* context);  // when the context is destroyed

// --- memory ------------------------------------------------------------------------------------

// Whether the device may access all of it; `device` -1: any device may, as for copies.
bool reachable(uintptr_t at, size_t size, int device = -1, bool write = false);
// Whether an address belongs to devices, so that it is never ordinary memory of the host.
bool in_device_region(uintptr_t at);
// Waits while tests hold copies, or until the device fails.
void before_copy(int device);
void fault(int device);  // a copy or a kernel used memory that the device cannot access

}  // namespace fake
