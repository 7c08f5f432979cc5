// Allocates the memory of files in a separate thread: the kernel needs about a second per GiB.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "map_file.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr uint64_t kStep = uint64_t{64} << 20;
// Making huge pages of fragmented memory can take the kernel arbitrarily long. A step that takes
// longer than this (four seconds per GiB) is the last one that tries.
constexpr std::chrono::milliseconds kHugePatience{250};
// The niceness of the thread: the whole arena is not urgent, and the engines need the cores.
constexpr int kNiceness = 10;

#ifndef MADV_COLLAPSE  // Linux 6.1
#define MADV_COLLAPSE 25
#endif

int duplicate(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        nb::raise_python_error();
    }
    return copy;
}

// Allocates files one by one, in steps, and signals an eventfd after each step. Runs no Python.
class Prefaulter {
 public:
    Prefaulter(int notify_fd, bool huge)
        : tries_huge_(huge), notify_fd_(duplicate(notify_fd)), owner_(getpid()) {
        // Blocks all signals: the main thread handles them.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread_ = std::thread([this] { run(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            close(notify_fd_);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    Prefaulter(const Prefaulter&) = delete;
    Prefaulter& operator=(const Prefaulter&) = delete;

    ~Prefaulter() {
        stop();
        for (const File& file : files_) {
            if (file.fd >= 0) close(file.fd);
            if (file.locked != nullptr) munmap(file.locked, file.size);
        }
        close(notify_fd_);
    }

    size_t add(int fd, int64_t size, bool lock_in_memory) {
        if (size < 1) throw nb::value_error("size: must be at least 1 byte");
        const int copy = duplicate(fd);
        const std::lock_guard lock(mutex_);
        if (stopping_) {
            close(copy);
            throw nb::value_error("stopped: cannot queue files");
        }
        files_.push_back({copy, static_cast<uint64_t>(size), 0, 0, lock_in_memory, nullptr});
        work_.notify_one();
        return files_.size() - 1;
    }

    std::vector<std::pair<uint64_t, int>> progress() {
        const std::lock_guard lock(mutex_);
        std::vector<std::pair<uint64_t, int>> all;
        all.reserve(files_.size());
        for (const File& file : files_) all.emplace_back(file.done, file.error);
        return all;
    }

    uint64_t huge_bytes() {
        const std::lock_guard lock(mutex_);
        return huge_bytes_;
    }

    void stop() {
        // A forked child has this object but not its thread, and the lock may be held.
        if (getpid() != owner_) {
            if (thread_.joinable()) thread_.detach();
            return;
        }
        const Unlocked unlocked;
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            work_.notify_one();
        }
        const std::lock_guard joining(joining_);
        if (thread_.joinable()) thread_.join();
    }

 private:
    struct File {
        int fd;
        uint64_t size, done;
        int error;
        bool lock;
        void* locked;  // the mapping that contains the lock; its pages stay while it exists
    };

    // Maps a whole file during its lifetime.
    class Map {
     public:
        explicit Map(const File& file) : size_(file.size) {
            at_ = map_file(file.fd, size_, PROT_READ | PROT_WRITE);
        }
        Map(const Map&) = delete;
        Map& operator=(const Map&) = delete;
        ~Map() {
            if (at_ != MAP_FAILED) munmap(at_, size_);
        }
        int lock() {
            if (at_ == MAP_FAILED || mlock(at_, size_) != 0) return errno;
            return 0;
        }
        void* release() { return std::exchange(at_, MAP_FAILED); }
        uint8_t* data() const { return at_ == MAP_FAILED ? nullptr : static_cast<uint8_t*>(at_); }

     private:
        void* at_;
        const uint64_t size_;
    };

    // Allocates huge pages for a range, and returns how many bytes have them now. They make a
    // client's mapping cheap (a 512th of the page table) and copies 2 to 12% faster, because they
    // avoid the misses of scattered small pages. The kernel collapses a range that has at least one
    // page, and clears the rest of it: in a tenth of the time that it needs for small pages alone.
    // If it refuses, the rest of the range stays without memory.
    uint64_t make_huge(int fd, const Map& map, uint64_t from, uint64_t step) {
        if (map.data() == nullptr) return 0;
        uint8_t* at = map.data() + from;
        if (reinterpret_cast<uintptr_t>(at) % kHugePage != 0) return 0;
        const auto started = std::chrono::steady_clock::now();
        uint64_t huge = 0;
        const uint64_t whole = step - step % kHugePage;
        for (uint64_t end = kHugePage; end <= whole; end += kHugePage) {
            if (posix_fallocate(fd, static_cast<off_t>(from + end - 1), 1) != 0) return 0;
        }
        if (whole != 0 && madvise(at, whole, MADV_COLLAPSE) == 0) {
            huge = whole;
        } else {
            for (uint64_t done = 0; done < whole && !stopping_; done += kHugePage) {
                if (madvise(at + done, kHugePage, MADV_COLLAPSE) == 0) {
                    huge += kHugePage;
                } else if (errno != EAGAIN) {
                    tries_huge_ = false;  // this kernel or this machine does not support it
                    break;
                }
            }
        }
        if (std::chrono::steady_clock::now() - started > kHugePatience) tries_huge_ = false;
        return huge;
    }

    void run() {
        // On Linux this affects only the calling thread. Continues if it is refused.
        setpriority(PRIO_PROCESS, 0, kNiceness);
        std::unique_lock lock(mutex_);
        for (size_t next = 0; !stopping_;) {
            if (next == files_.size()) {
                work_.wait(lock);
                continue;
            }
            const File now = files_[next];
            const uint64_t step = std::min(kStep, now.size - now.done);
            lock.unlock();
            void* locked = nullptr;
            uint64_t huge = 0;
            if (tries_huge_) huge = make_huge(now.fd, Map(now), now.done, step);
            int error =
                posix_fallocate(now.fd, static_cast<off_t>(now.done), static_cast<off_t>(step));
            if (error == 0 && now.lock && now.done + step == now.size) {
                Map map(now);
                error = map.lock();
                if (error == 0) locked = map.release();
            }
            lock.lock();
            huge_bytes_ += huge;
            if (error == EINTR) continue;
            File& file = files_[next];  // read again: the list may have moved
            if (error == 0) file.done += step;
            file.error = error;
            file.locked = locked;
            if (error == 0 && file.done < file.size) continue;
            close(file.fd);
            file.fd = -1;
            next++;
            const uint64_t one = 1;
            // Ignores a failure: the reader can call progress().
            [[maybe_unused]] const ssize_t written = write(notify_fd_, &one, sizeof(one));
        }
    }

    std::mutex mutex_, joining_;
    std::condition_variable work_;
    std::vector<File> files_;
    std::atomic<bool> stopping_ = false;
    bool tries_huge_;  // used only by the thread after the start
    uint64_t huge_bytes_ = 0;
    const int notify_fd_;
    const pid_t owner_;
    std::thread thread_;  // last: it uses all members above
};

}  // namespace
}  // namespace kvtier

void bind_prefault(nb::module_& m) {
    using kvtier::Prefaulter;
    nb::class_<Prefaulter>(m, "Prefaulter", nb::is_final())
        .def(nb::init<int, bool>(), nb::arg("notify_fd"), nb::arg("huge") = false)
        .def("add", &Prefaulter::add, nb::arg("fd"), nb::arg("size"), nb::arg("lock") = false)
        .def("progress", &Prefaulter::progress)
        .def("huge_bytes", &Prefaulter::huge_bytes)
        .def("stop", &Prefaulter::stop);
}
