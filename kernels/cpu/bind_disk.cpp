// The Python bindings of the threads that move blocks between files and the arena.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "codec/numbers.h"
#include "disk.h"
#include "mapping.h"
#include "python_bytes.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr size_t kDepthMost = 1024;
constexpr size_t kThreadsMost = 16;
constexpr size_t kDecodersMost = 16;
constexpr size_t kPoolMost = 64;  // the limit on threads of a pool, and thus on its depth
constexpr uint64_t kStagedBytes = uint64_t{128} << 20;
constexpr uint64_t kBytesMost = uint64_t{64} << 20;
// How long the destructor waits for the kernel if `stop` was not called.
constexpr double kGrace = 1;
constexpr int64_t kRuns = -1;

[[noreturn]] void raise_os_error(int number, const std::string& why) {
    const nb::object error = nb::borrow(PyExc_OSError)(number, why);
    PyErr_SetObject(PyExc_OSError, error.ptr());
    nb::raise_python_error();
}

int duplicate(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) raise_os_error(errno, "notify_fd: " + std::string(std::strerror(errno)));
    return copy;
}

Clock::time_point deadline(uint32_t ms) {
    return ms == 0 ? Clock::time_point::max() : Clock::now() + std::chrono::milliseconds(ms);
}

int64_t nanoseconds(clockid_t clock) {
    timespec now;
    if (clock_gettime(clock, &now) != 0) return kRuns;
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Bytes that a read returned for the caller to decode. They are in the worker's memory, and count
// as staging memory until their last view is released.
class Text {
 public:
    Text(std::shared_ptr<DiskQueue> queue, Completion&& read)
        : queue_(std::move(queue)), read_(std::move(read)), owner_(getpid()) {}
    Text(const Text&) = delete;
    Text& operator=(const Text&) = delete;
    ~Text() {
        // In a forked child, the mutex may be locked forever.
        if (getpid() == owner_) queue_->unstage(std::move(read_.own), read_.staged);
    }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
        const Completion& read = nb::inst_ptr<Text>(nb::handle(self))->read_;
        return PyBuffer_FillInfo(view, self, read.own.data() + read.skip,
                                 static_cast<Py_ssize_t>(read.nbytes), 1, flags);
    }

 private:
    const std::shared_ptr<DiskQueue> queue_;
    Completion read_;
    const pid_t owner_;
};

PyType_Slot text_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&Text::get_buffer)},
                            {0, nullptr}};

// Moves blocks during its lifetime. A forked child has the object, but not its threads.
class Disk {
 public:
    Disk(int notify_fd, const std::string& engine, size_t depth, size_t threads, size_t decoders,
         uint64_t staged_bytes)
        : depth_(depth), decoders_(decoders), owner_(getpid()) {
        if (engine != "auto" && engine != "io_uring" && engine != "threads") {
            throw nb::value_error("engine: must be auto, io_uring or threads");
        }
        if (depth < 1 || depth > kDepthMost) throw nb::value_error("depth: must be 1 to 1024");
        if (threads < 1 || threads > kThreadsMost)
            throw nb::value_error("threads: must be 1 to 16");
        if (decoders < 1 || decoders > kDecodersMost)
            throw nb::value_error("decoders: must be 1 to 16");
        threads = std::min(threads, depth);
        if (engine == "threads") {
            why_ = "asked for";
            depth_ = threads = std::min(depth, kPoolMost);
        } else if (!probe(Ring::entries_for(depth / threads))) {
            if (engine == "io_uring") raise_os_error(probe_error_, why_);
            depth_ = threads = std::min(depth, kPoolMost);
        } else {
            engine_ = "io_uring";
            why_ = engine == "auto" ? "the kernel offers it" : "asked for";
        }
        queue_ = std::make_shared<DiskQueue>(duplicate(notify_fd), depth_, staged_bytes);
        if (engine_ == "io_uring") {
            for (size_t i = 0; i < threads; i++) {
                auto ring = std::make_shared<RingWorker>(queue_, (depth + threads - 1) / threads);
                if (ring->ring().error() != 0)
                    raise_os_error(ring->ring().error(), ring->ring().why());
                rings_.push_back(std::move(ring));
            }
        }
        threads_ = threads;
        try {
            start();
        } catch (...) {
            finish();
            throw;
        }
    }
    Disk(const Disk&) = delete;
    Disk& operator=(const Disk&) = delete;

    ~Disk() {
        if (getpid() != owner_) {
            detach();
            keep_mappings();
        } else {
            finish();
        }
    }

    uint32_t add_extent(nb::handle object, bool fixed) {
        const auto* mapping = nb::cast<const Mapping*>(object);
        queue();
        mappings_.push_back(nb::borrow(object));
        extents_.push_back(mapping);
        return queue().add_extent({mapping->data(), mapping->size(), fixed});
    }

    void release_extent(uint32_t number) {
        if (number >= extents_.size()) throw nb::index_error("no such extent");
        queue().release_extent(number);
    }

    void read(nb::handle packed) {
        std::list<Operation> batch;
        each(packed, [&](const PackedOperation& from, const std::string& name) {
            Operation& to = batch.emplace_back();
            place(from, name, true, to);
            to.kind = Kind::kRead;
            if ((from.flags & ~(kUrgent | kDigest)) != 0) unknown_flags(name);
            to.urgent = (from.flags & kUrgent) != 0;
            to.needed = from.nbytes;
            std::memcpy(to.digest.data(), from.digest, kDigestBytes);
        });
        submit(std::move(batch));
    }

    void read_frames(nb::handle packed, const std::vector<codec::SharedRecipe>& lossy,
                     const std::vector<SharedKeys>& keys) {
        std::list<Operation> batch;
        each<PackedFrame>(packed, [&](const PackedFrame& frame, const std::string& name) {
            const PackedOperation& from = frame.operation;
            Operation& to = batch.emplace_back();
            place(from, name, true, to);
            to.kind = Kind::kRead;
            if ((from.flags & ~kUrgent) != 0) unknown_flags(name);
            if (frame.header_bytes == 0 || frame.header_bytes % kPage != 0 ||
                frame.payload_bytes == 0 || frame.payload_bytes > from.nbytes) {
                fail(nb::value_error, name, ": these sizes are impossible for an encoded frame");
            }
            to.urgent = (from.flags & kUrgent) != 0;
            to.encoded = to.staged = true;
            to.element = codec::element_of(frame.element);
            if (frame.lossy > lossy.size())
                fail(nb::index_error, name, ": its recipe does not exist");
            if (frame.lossy != 0) to.lossy = lossy[frame.lossy - 1].shared;
            if (frame.keys > keys.size()) fail(nb::index_error, name, ": its keys do not exist");
            if (frame.keys != 0) to.keys = keys[frame.keys - 1].shared;
            std::memcpy(to.identity.data(), frame.identity, kIdentityBytes);
            to.block = to.payload;
            to.block_bytes = from.nbytes;
            to.payload = nullptr;
            to.frame_header = frame.header_bytes;
            to.nbytes = frame.payload_bytes;
            to.needed = to.frame_header + to.nbytes;
            to.total = whole_pages(to.needed);
            std::memcpy(to.digest.data(), from.digest, kDigestBytes);
        });
        submit(std::move(batch));
    }

    nb::tuple moved() {
        const auto all = queue().moved();
        nb::dict decoded;
        for (size_t i = 0; i < DiskQueue::kCodecs; i++) {
            for (size_t element = 0; element < codec::kElements; element++) {
                const auto& one = all.decoded[i][element];
                if (one.block_bytes == 0) continue;
                decoded[nb::make_tuple(i, element)] =
                    nb::make_tuple(one.block_bytes, static_cast<double>(one.nanoseconds) * 1e-9);
            }
        }
        return nb::make_tuple(all.read_bytes, static_cast<double>(all.reading_ns) * 1e-9, decoded);
    }

    void write(nb::handle packed, nb::handle headers) {
        const HeldMemory held(headers, Access::kRead, "headers");
        std::list<Operation> batch;
        each(packed, [&](const PackedOperation& from, const std::string& name) {
            Operation& to = batch.emplace_back();
            place(from, name, false, to);
            to.kind = Kind::kWrite;
            if ((from.flags & ~(kDigest | kSeal)) != 0) unknown_flags(name);
            to.seal = (from.flags & kSeal) != 0;
            to.may_pad = extents_[from.extent]->writable();
            const uint64_t at = from.header.at, nbytes = from.header.nbytes;
            if (at > held.size() || nbytes > held.size() - at) {
                fail(nb::index_error, name, ": its header is outside of the headers");
            }
            if (nbytes == 0) return;
            to.header_bytes = whole_pages(nbytes);
            to.total += to.header_bytes;
            to.own = Pages(nbytes);
            std::memcpy(to.own.data(), held.data() + at, nbytes);
        });
        submit(std::move(batch));
    }

    void sync(uint64_t token, int fd, uint32_t deadline_ms) {
        std::list<Operation> batch;
        Operation& to = batch.emplace_back();
        to.token = token;
        to.fd = fd;
        to.kind = Kind::kSync;
        to.deadline = deadline(deadline_ms);
        submit(std::move(batch));
    }

    void read_bytes(uint64_t token, int fd, uint64_t offset, uint64_t nbytes, bool urgent,
                    uint32_t deadline_ms, bool staged) {
        if (nbytes < 1 || nbytes > kBytesMost)
            throw nb::value_error("nbytes: must be 1 byte to 64 MiB");
        if (offset > kOffsetMost) throw nb::value_error("offset: exceeds the maximum file size");
        std::list<Operation> batch;
        Operation& to = batch.emplace_back();
        to.token = token;
        to.fd = fd;
        to.kind = Kind::kReadBytes;
        to.urgent = urgent;
        to.deadline = deadline(deadline_ms);
        to.skip = offset % kPage;
        to.file_offset = offset - to.skip;
        to.nbytes = nbytes;
        to.needed = to.skip + nbytes;
        to.total = whole_pages(to.needed);
        to.staged = staged;
        submit(std::move(batch));
    }

    nb::list done() {
        std::vector<Completion> over = queue().done();
        nb::list list;
        for (Completion& one : over) {
            nb::object extra = nb::none();
            if (one.staged != 0) {
                const nb::object text =
                    nb::cast(new Text(queue_, std::move(one)), nb::rv_policy::take_ownership);
                extra = nb::steal(PyMemoryView_FromObject(text.ptr()));
                if (!extra.is_valid()) nb::raise_python_error();
            } else if (one.error == 0 && one.kind == Kind::kReadBytes) {
                extra = nb::bytes(one.own.data() + one.skip, one.nbytes);
            } else if (one.error == 0 &&
                       (one.encoded || (one.kind == Kind::kWrite && one.with_digest))) {
                extra = nb::bytes(one.digest.data(), one.digest.size());
            }
            list.append(nb::make_tuple(one.token, one.error, extra));
        }
        return list;
    }

    void forget(int fd) {
        if (!queue().forget(fd)) throw nb::value_error("it has writes or syncs in progress");
    }

    std::tuple<size_t, size_t, size_t> queued() {
        const auto lengths = queue().lengths();
        return {lengths.urgent, lengths.reads, lengths.writes};
    }
    size_t in_flight() { return queue().lengths().in_kernel; }
    size_t overdue() { return queue().lengths().overdue; }

    size_t stop(double timeout_s) {
        // Converts infinity to a year: it has no value in nanoseconds.
        if (std::isnan(timeout_s)) throw nb::value_error("timeout_s: not a number");
        queue();
        return end(std::clamp(timeout_s, 0.0, 365 * 86400.0));
    }

    const std::string& engine() const { return engine_; }
    const std::string& why() const { return why_; }
    size_t depth() const { return depth_; }
    size_t threads() const { return threads_; }

    uint64_t registered_bytes() const {
        uint64_t least = rings_.empty() ? 0 : std::numeric_limits<uint64_t>::max();
        for (const auto& ring : rings_) least = std::min(least, ring->registered_bytes());
        return least;
    }

    double cpu_s() {
        queue();
        int64_t sum = 0;
        for (const Thread& thread : running_) {
            const int64_t before = thread.took->load();
            const int64_t now = before != kRuns ? before : nanoseconds(thread.clock);
            // The thread may have ended in between; then `took` is already set.
            sum += std::max<int64_t>(now != kRuns ? now : thread.took->load(), 0);
        }
        return static_cast<double>(sum) * 1e-9;
    }

 private:
    static constexpr uint64_t kOffsetMost = std::numeric_limits<int64_t>::max() / 2;

    struct Thread {
        std::thread thread;
        clockid_t clock;
        // CPU nanoseconds; set when the thread has ended
        std::shared_ptr<std::atomic<int64_t>> took;
    };

    bool probe(uint32_t entries) {
        const Ring ring(entries);
        probe_error_ = ring.error();
        why_ = ring.why();
        return probe_error_ == 0;
    }

    DiskQueue& queue() const {
        if (getpid() != owner_) throw std::runtime_error("Disk: cannot be used in a forked child");
        return *queue_;
    }

    template <typename Run>
    void launch(Run run) {
        auto took = std::make_shared<std::atomic<int64_t>>(kRuns);
        queue_->thread_begins();
        try {
            std::thread thread([queue = queue_, took, run] {
                run();
                took->store(nanoseconds(CLOCK_THREAD_CPUTIME_ID));
                queue->thread_ends();
            });
            clockid_t clock;
            if (pthread_getcpuclockid(thread.native_handle(), &clock) != 0) clock = -1;
            running_.push_back({std::move(thread), clock, std::move(took)});
        } catch (...) {
            queue_->thread_ends();
            throw;
        }
    }

    void start() {
        // Blocks all signals except SIGBUS (see guard.h): the main thread handles signals.
        sigset_t all, before;
        sigfillset(&all);
        sigdelset(&all, SIGBUS);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        // allocated first: a started thread must not be lost
        running_.reserve(threads_ + decoders_ + 1);
        try {
            launch([queue = queue_] { queue->run_clock(); });
            for (size_t i = 0; i < decoders_; i++) {
                launch([queue = queue_] { queue->run_decoder(); });
            }
            for (const auto& ring : rings_) launch([ring] { ring->run(); });
            for (size_t i = rings_.size(); i < threads_; i++) {
                launch([queue = queue_] { run_pool_worker(*queue); });
            }
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    size_t end(double timeout_s) {
        const Unlocked unlocked;
        const std::lock_guard joining(joining_);
        const size_t left = queue_->stop(timeout_s);
        if (queue_->ended()) {
            for (Thread& thread : running_) {
                if (thread.thread.joinable()) thread.thread.join();
            }
        }
        return left;
    }

    // Stops and waits at most kGrace. A thread that has not ended by then, because no core was
    // free, continues alone and uses only the state that the threads share.
    void finish() {
        const size_t left = end(kGrace);
        detach();
        if (left != 0) keep_mappings();
    }

    void detach() {
        for (Thread& thread : running_) {
            if (thread.thread.joinable()) thread.thread.detach();
        }
    }

    // Keeps this memory mapped until the process ends, because the kernel may still write to it.
    void keep_mappings() {
        for (nb::object& mapping : mappings_) mapping.release();
    }

    template <typename Packed = PackedOperation, typename Take>
    void each(nb::handle packed, const Take& take) {
        const HeldMemory held(packed, Access::kRead, "ops");
        if (held.size() % sizeof(Packed) != 0) {
            const std::string each = std::to_string(sizeof(Packed));
            fail(nb::value_error, "ops: packed operations are ", each, " bytes each");
        }
        for (size_t i = 0; i < held.size() / sizeof(Packed); i++) {
            Packed from;
            std::memcpy(&from, held.data() + i * sizeof(from), sizeof(from));
            take(from, "operation " + std::to_string(i));
        }
    }

    [[noreturn]] static void unknown_flags(const std::string& name) {
        fail(nb::value_error, name, ": unknown flags");
    }

    // Checks and sets the fields that reads and writes have in common.
    void place(const PackedOperation& from, const std::string& name, bool writes_memory,
               Operation& to) {
        if (from.extent >= extents_.size()) {
            fail(nb::index_error, name, ": extent ", from.extent, " of ", extents_.size());
        }
        const Mapping& mapping = *extents_[from.extent];
        const bool has_header = !writes_memory && from.header.nbytes != 0;
        if (from.nbytes == 0 && !has_header) fail(nb::value_error, name, ": no bytes");
        if (from.file_offset % kPage != 0 || from.memory_offset % kPage != 0) {
            fail(nb::value_error, name, ": its offsets are not multiples of a page");
        }
        if (from.file_offset > kOffsetMost) {
            fail(nb::value_error, name, ": exceeds the maximum file size");
        }
        const uint64_t size = mapping.size() / kPage * kPage;
        if (from.memory_offset > size || from.nbytes > size - from.memory_offset) {
            fail(nb::index_error, name, ": ", from.nbytes, " bytes at ", from.memory_offset,
                 " of an extent of ", mapping.size());
        }
        if (writes_memory && !mapping.writable()) {
            fail(nb::value_error, name, ": its extent is mapped read-only");
        }
        to.token = from.token;
        to.fd = from.fd;
        to.with_digest = (from.flags & kDigest) != 0;
        to.extent = from.extent;
        to.file_offset = from.file_offset;
        to.nbytes = from.nbytes;
        to.total = whole_pages(from.nbytes);
        to.payload = mapping.data() + from.memory_offset;
        to.deadline = deadline(from.deadline_ms);
    }

    void submit(std::list<Operation>&& batch) {
        if (!queue().submit(std::move(batch))) {
            throw nb::value_error("stopped: cannot queue operations");
        }
    }

    std::string engine_ = "threads", why_;
    int probe_error_ = 0;
    size_t depth_, threads_ = 0;
    const size_t decoders_;
    const pid_t owner_;
    std::vector<nb::object> mappings_;
    std::vector<const Mapping*> extents_;
    std::shared_ptr<DiskQueue> queue_;
    std::vector<std::shared_ptr<RingWorker>> rings_;
    std::mutex joining_;
    std::vector<Thread> running_;
};

}  // namespace
}  // namespace kvtier

void bind_disk(nb::module_& m) {
    using kvtier::Disk;
    nb::class_<kvtier::Text>(m, "Text", nb::type_slots(kvtier::text_slots), nb::is_final());
    nb::class_<Disk>(m, "Disk", nb::is_final())
        .def(nb::init<int, const std::string&, size_t, size_t, size_t, uint64_t>(),
             nb::arg("notify_fd"), nb::arg("engine") = "auto", nb::arg("depth") = 8,
             nb::arg("threads") = 1, nb::arg("decoders") = 1,
             nb::arg("staged_bytes") = kvtier::kStagedBytes)
        .def("register", &Disk::add_extent, nb::arg("mapping"), nb::arg("fixed") = true)
        .def("release", &Disk::release_extent, nb::arg("extent"))
        .def("read", &Disk::read, nb::arg("ops"))
        .def("read_frames", &Disk::read_frames, nb::arg("ops"),
             nb::arg("lossy") = std::vector<kvtier::codec::SharedRecipe>(),
             nb::arg("keys") = std::vector<kvtier::SharedKeys>())
        .def("moved", &Disk::moved)
        .def("write", &Disk::write, nb::arg("ops"), nb::arg("headers") = nb::bytes("", 0))
        .def("sync", &Disk::sync, nb::arg("token"), nb::arg("fd"), nb::arg("deadline_ms") = 0)
        .def("read_bytes", &Disk::read_bytes, nb::arg("token"), nb::arg("fd"), nb::arg("offset"),
             nb::arg("nbytes"), nb::arg("urgent") = false, nb::arg("deadline_ms") = 0,
             nb::arg("staged") = false)
        .def("done", &Disk::done)
        .def("forget", &Disk::forget, nb::arg("fd"))
        .def("stop", &Disk::stop, nb::arg("timeout_s") = 5.0)
        .def("overdue", &Disk::overdue)
        .def_prop_ro("queued", &Disk::queued)
        .def_prop_ro("in_flight", &Disk::in_flight)
        .def_prop_ro("engine", &Disk::engine)
        .def_prop_ro("why", &Disk::why)
        .def_prop_ro("depth", &Disk::depth)
        .def_prop_ro("threads", &Disk::threads)
        .def_prop_ro("registered_bytes", &Disk::registered_bytes)
        .def_prop_ro("cpu_s", &Disk::cpu_s);
}
