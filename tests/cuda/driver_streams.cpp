// Streams, events and graphs of the driver without a device.
#include <cstring>
#include <set>
#include <thread>
#include <unordered_map>

#include "driver.h"

namespace fake {

namespace {

std::mutex handles_mutex;
auto& streams = *new std::unordered_map<void*, StreamPtr>;

struct Event {
    Context* context = nullptr;
    unsigned generation = 0;
    std::mutex mutex;
    MarkPtr mark;  // null before the first record
    CapturePtr capture;
    StreamPtr stream;
    long clock = 0;

    bool gone() const { return generation != context->generation; }
};
using EventPtr = std::shared_ptr<Event>;
auto& events = *new std::unordered_map<void*, EventPtr>;

struct Graph {
    std::vector<Work> nodes;
};
auto& graphs = *new std::set<Graph*>;

std::mutex captures_mutex;
auto& captures = *new std::set<CapturePtr>;
thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
thread_local char this_thread;

EventPtr event_of(CUevent handle) {
    const std::lock_guard lock(handles_mutex);
    const auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second;
}

CapturePtr capture_of(const StreamPtr& stream) {
    const std::lock_guard lock(captures_mutex);
    return stream->capture;
}

// The legacy stream waits for every blocking stream, so it may not be used while one captures.
CUresult refuse_implicit(const Context* context) {
    const std::lock_guard lock(captures_mutex);
    CUresult result = CUDA_SUCCESS;
    for (const CapturePtr& capture : captures) {
        for (const StreamPtr& stream : capture->members) {
            if (stream->context != context || !stream->blocking()) continue;
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    }
    return result;
}

// A call that needs the end of a stream, which a capture never reaches.
CUresult refuse_captured(const StreamPtr& stream) {
    if (stream->legacy) KVTIER_TRY(refuse_implicit(stream->context));
    const CapturePtr capture = capture_of(stream);
    if (capture == nullptr) return refuse_unsafe();
    capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

std::vector<StreamPtr> blocking_streams(Context* context) {
    std::vector<StreamPtr> found;
    for (const auto& one : context->streams) {
        if (StreamPtr stream = one.lock(); stream && stream->blocking()) found.push_back(stream);
    }
    return found;
}

}  // namespace

void Mark::set() {
    const std::lock_guard lock(mutex);
    come = true;
    changed.notify_all();
}
bool Mark::is_set() {
    const std::lock_guard lock(mutex);
    return come;
}
void Mark::wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return come; });
}

StreamPtr Stream::make(Context* context, unsigned flags, bool legacy) {
    const auto made = std::make_shared<Stream>();
    made->context = context;
    made->generation = context->generation;
    made->flags = flags;
    made->legacy = legacy;
    std::thread([made] { made->run(); }).detach();
    return made;
}

void Stream::push(Work work) {
    std::unique_lock lock(mutex);
    if (ended) {  // only marks come so late, of threads that wait for all streams
        lock.unlock();
        return work();
    }
    todo.push_back(std::move(work));
    changed.notify_all();
}

void Stream::end() {
    const std::lock_guard lock(mutex);
    ending = true;
    changed.notify_all();
}

void Stream::run() {
    for (;;) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return ending || !todo.empty(); });
        if (todo.empty()) {
            ended = true;
            return;
        }
        const auto work = std::move(todo.front());
        todo.pop_front();
        lock.unlock();
        work();
    }
}

StreamPtr stream_of(CUstream handle, Context* context) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) {
        if (context == nullptr) return nullptr;
        const std::lock_guard lock(context->mutex);
        if (context->legacy == nullptr) context->legacy = Stream::make(context, 0, true);
        return context->legacy;
    }
    const std::lock_guard lock(handles_mutex);
    const auto found = streams.find(handle);
    return found == streams.end() || found->second->gone() ? nullptr : found->second;
}

CUresult enqueue(const StreamPtr& stream, Work work) {
    Context* const context = stream->context;
    if (stream->legacy) {
        KVTIER_TRY(refuse_implicit(context));
        const std::lock_guard lock(context->mutex);
        const auto others = blocking_streams(context);
        for (const StreamPtr& other : others) {
            const auto before = std::make_shared<Mark>();
            other->push([before] { before->set(); });
            stream->push([before] { before->wait(); });
        }
        const auto after = std::make_shared<Mark>();
        stream->push(std::move(work));
        stream->push([after] { after->set(); });
        for (const StreamPtr& other : others) other->push([after] { after->wait(); });
        return CUDA_SUCCESS;
    }
    {
        const std::lock_guard lock(captures_mutex);
        if (const CapturePtr& capture = stream->capture) {
            if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            capture->nodes.push_back(std::move(work));
            capture->last[stream.get()] = ++capture->clock;
            return CUDA_SUCCESS;
        }
    }
    const std::lock_guard lock(context->mutex);
    stream->push(std::move(work));
    return CUDA_SUCCESS;
}

void finish(const StreamPtr& stream) {
    const auto mark = std::make_shared<Mark>();
    if (enqueue(stream, [mark] { mark->set(); }) == CUDA_SUCCESS) mark->wait();
}

void finish_all(Context* context) {
    std::vector<StreamPtr> all;
    {
        const std::lock_guard lock(context->mutex);
        if (context->legacy != nullptr) all.push_back(context->legacy);
        for (const auto& one : context->streams) {
            if (StreamPtr stream = one.lock()) all.push_back(stream);
        }
    }
    for (const StreamPtr& stream : all) {
        const auto mark = std::make_shared<Mark>();
        stream->push([mark] { mark->set(); });
        mark->wait();
    }
}

void forget_streams(Context* context) {
    const std::lock_guard lock(context->mutex);
    if (context->legacy != nullptr) context->legacy->end();
    context->legacy = nullptr;
    for (const auto& one : context->streams) {
        if (StreamPtr stream = one.lock()) stream->end();
    }
    context->streams.clear();
}

CUresult refuse_unsafe() {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    const std::lock_guard lock(captures_mutex);
    CUresult result = CUDA_SUCCESS;
    for (const CapturePtr& capture : captures) {
        const bool own = capture->thread == &this_thread;
        const bool refused = own ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                                 : capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                       thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!refused) continue;
        capture->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

}  // namespace fake

using namespace fake;

extern "C" {

// For tests: forgets the events and streams that were left.
void fake_forget_objects() {
    const std::lock_guard lock(handles_mutex);
    for (const auto& [_, stream] : streams) stream->end();
    live[kStreams] -= static_cast<int>(streams.size());
    live[kEvents] -= static_cast<int>(events.size());
    streams.clear();
    events.clear();
    const std::lock_guard captures_lock(captures_mutex);
    captures.clear();
}

// --- streams -----------------------------------------------------------------------------------

CUresult cuStreamCreate(CUstream* made, unsigned flags) {
    KVTIER_CONTEXT_CALL;
    if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    const StreamPtr stream = Stream::make(context, flags, false);
    {
        const std::lock_guard lock(context->mutex);
        std::erase_if(context->streams, [](const auto& one) { return one.expired(); });
        context->streams.push_back(stream);
    }
    const std::lock_guard lock(handles_mutex);
    streams[stream.get()] = stream;
    live[kStreams]++;
    *made = reinterpret_cast<CUstream>(stream.get());
    return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream* made, unsigned flags, int) {
    return cuStreamCreate(made, flags);
}
CUresult cuStreamDestroy(CUstream handle) {
    KVTIER_CALL;
    const std::lock_guard lock(handles_mutex);
    const auto found = streams.find(handle);
    if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (found->second->gone()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    found->second->end();  // its thread does the work that is left
    const CUresult result = usable(found->second->context);
    streams.erase(found);
    live[kStreams]--;
    return result;
}
CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream handle, CUcontext* found) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *found = reinterpret_cast<CUcontext>(stream->context);
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream handle) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    KVTIER_TRY(refuse_captured(stream));
    finish(stream);
    return usable(stream->context);
}
CUresult cuStreamQuery(CUstream handle) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    KVTIER_TRY(refuse_captured(stream));
    const std::lock_guard lock(stream->mutex);
    return stream->todo.empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    const EventPtr event = event_of(event_handle);
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (event->gone()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    const std::unique_lock event_lock(event->mutex);
    {
        const std::lock_guard lock(captures_mutex);
        const CapturePtr theirs = event->capture;
        CapturePtr& ours = stream->capture;
        if (theirs != nullptr && !captures.contains(theirs)) return CUDA_ERROR_CAPTURED_EVENT;
        if (theirs != nullptr) {
            if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            if (ours != nullptr && ours != theirs) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
            if (ours == nullptr) {  // the wait brings this stream into the capture
                ours = theirs;
                theirs->members.push_back(stream);
                theirs->last[stream.get()] = ++theirs->clock;
            }
            if (stream == theirs->origin) theirs->joined[event->stream.get()] = event->clock;
            return CUDA_SUCCESS;
        }
        if (ours != nullptr && event->mark != nullptr) {
            ours->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        }
    }
    const MarkPtr mark = event->mark;
    return mark == nullptr ? CUDA_SUCCESS : enqueue(stream, [mark] { mark->wait(); });
}
CUresult cuLaunchHostFunc(CUstream handle, CUhostFn work, void* data) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const int device = stream->context->device;
    return enqueue(stream, [=] {
        if (device_at(device).error == 0) work(data);
    });
}

// --- events ------------------------------------------------------------------------------------

CUresult cuEventCreate(CUevent* made, unsigned) {
    KVTIER_CONTEXT_CALL;
    const auto event = std::make_shared<Event>();
    event->context = context;
    event->generation = context->generation;
    const std::lock_guard lock(handles_mutex);
    events[event.get()] = event;
    live[kEvents]++;
    *made = reinterpret_cast<CUevent>(event.get());
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent handle) {
    KVTIER_CALL;
    const std::lock_guard lock(handles_mutex);
    const auto found = events.find(handle);
    if (found == events.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (found->second->gone()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    const CUresult result = usable(found->second->context);
    events.erase(found);
    live[kEvents]--;
    return result;
}
CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    KVTIER_CONTEXT_CALL;
    const EventPtr event = event_of(handle);
    const StreamPtr stream = stream_of(stream_handle, context);
    if (event == nullptr || stream == nullptr || event->context != stream->context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->gone()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    const auto mark = std::make_shared<Mark>();
    const std::lock_guard event_lock(event->mutex);
    if (const CapturePtr capture = capture_of(stream)) {
        const std::lock_guard lock(captures_mutex);
        if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        event->capture = capture;
        event->stream = stream;
        event->clock = ++capture->clock;
        capture->last[stream.get()] = event->clock;
        event->mark = nullptr;
        return CUDA_SUCCESS;
    }
    KVTIER_TRY(enqueue(stream, [mark] { mark->set(); }));
    event->mark = mark;
    event->capture = nullptr;
    return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent handle) {
    KVTIER_CONTEXT_CALL;
    const EventPtr event = event_of(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    KVTIER_TRY(refuse_unsafe());
    const std::lock_guard lock(event->mutex);
    if (event->capture != nullptr) return CUDA_ERROR_CAPTURED_EVENT;
    KVTIER_TRY(usable(event->context));
    return event->mark == nullptr || event->mark->is_set() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventSynchronize(CUevent handle) {
    KVTIER_CONTEXT_CALL;
    const EventPtr event = event_of(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    KVTIER_TRY(refuse_unsafe());
    MarkPtr mark;
    {
        const std::lock_guard lock(event->mutex);
        if (event->capture != nullptr) return CUDA_ERROR_CAPTURED_EVENT;
        mark = event->mark;
    }
    if (mark != nullptr) mark->wait();
    return usable(event->context);
}

// --- graphs ------------------------------------------------------------------------------------

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    KVTIER_CALL;
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}
#undef cuStreamBeginCapture
CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const std::lock_guard lock(captures_mutex);
    if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    const auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = &this_thread;
    capture->members.push_back(stream);
    stream->capture = capture;
    captures.insert(capture);
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->legacy) KVTIER_TRY(refuse_implicit(context));
    const CapturePtr capture = capture_of(stream);
    *status = capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    KVTIER_CONTEXT_CALL;
    *graph = nullptr;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(captures_mutex);
    const CapturePtr capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != &this_thread) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    CUresult result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    for (const auto& [member, last] : capture->last) {
        if (member != stream.get() && capture->joined[member] < last && result == CUDA_SUCCESS) {
            result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        }
    }
    for (const StreamPtr& member : capture->members) member->capture = nullptr;
    captures.erase(capture);
    if (result != CUDA_SUCCESS) return result;
    const auto made = new Graph{capture->nodes};
    graphs.insert(made);
    live[kGraphs]++;
    *graph = reinterpret_cast<CUgraph>(made);
    return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
    KVTIER_CALL;
    const std::lock_guard lock(captures_mutex);
    if (graphs.erase(reinterpret_cast<Graph*>(graph)) == 0) return CUDA_ERROR_INVALID_VALUE;
    delete reinterpret_cast<Graph*>(graph);
    live[kGraphs]--;
    return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long) {
    KVTIER_CALL;
    const std::lock_guard lock(captures_mutex);
    const auto copy = new Graph(*reinterpret_cast<Graph*>(graph));
    graphs.insert(copy);
    live[kGraphs]++;
    *made = reinterpret_cast<CUgraphExec>(copy);
    return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec graph) {
    return cuGraphDestroy(reinterpret_cast<CUgraph>(graph));
}
CUresult cuGraphLaunch(CUgraphExec graph, CUstream handle) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    std::vector<Work> nodes;
    {
        const std::lock_guard lock(captures_mutex);
        if (!graphs.contains(reinterpret_cast<Graph*>(graph))) return CUDA_ERROR_INVALID_VALUE;
        nodes = reinterpret_cast<Graph*>(graph)->nodes;
    }
    for (Work& node : nodes) KVTIER_TRY(enqueue(stream, std::move(node)));
    return CUDA_SUCCESS;
}
}
