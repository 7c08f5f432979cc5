// Memory for files, asked for in a thread of its own: a gibibyte takes the kernel about a second.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr uint64_t kStep = uint64_t{64} << 20;

int duplicate(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        nb::raise_python_error();
    }
    return copy;
}

// Allocates files one by one, in steps, and tells an eventfd after each. Runs no Python.
class Prefaulter {
 public:
    explicit Prefaulter(int notify_fd) : notify_fd_(duplicate(notify_fd)), owner_(getpid()) {
        // Signals are the main thread's business.
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
        if (size < 1) throw nb::value_error("size: at least one byte");
        const int copy = duplicate(fd);
        const std::lock_guard lock(mutex_);
        if (stopping_) {
            close(copy);
            throw nb::value_error("stopped: takes no more files");
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

    void stop() {
        // A forked child has this object but not its thread, and the lock as it was.
        if (getpid() != owner_) {
            if (thread_.joinable()) thread_.detach();
            return;
        }
        const nb::gil_scoped_release unlocked;
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
        void* locked;  // the mapping that holds the lock; pages stay for as long as it is there
    };

    static int lock_in_memory(const File& file, void*& locked) {
        void* at = mmap(nullptr, file.size, PROT_READ, MAP_SHARED, file.fd, 0);
        if (at == MAP_FAILED) return errno;
        if (mlock(at, file.size) != 0) {
            const int error = errno;
            munmap(at, file.size);
            return error;
        }
        locked = at;
        return 0;
    }

    void run() {
        std::unique_lock lock(mutex_);
        for (size_t next = 0; !stopping_;) {
            if (next == files_.size()) {
                work_.wait(lock);
                continue;
            }
            const File now = files_[next];
            const uint64_t step = std::min(kStep, now.size - now.done);
            lock.unlock();
            int error =
                posix_fallocate(now.fd, static_cast<off_t>(now.done), static_cast<off_t>(step));
            void* locked = nullptr;
            if (error == 0 && now.lock && now.done + step == now.size) {
                error = lock_in_memory(now, locked);
            }
            lock.lock();
            if (error == EINTR) continue;
            File& file = files_[next];  // afresh: the list may have moved
            if (error == 0) file.done += step;
            file.error = error;
            file.locked = locked;
            if (error == 0 && file.done < file.size) continue;
            close(file.fd);
            file.fd = -1;
            next++;
            const uint64_t one = 1;
            // Nothing to be done about a failure: the reader has progress() to look at.
            [[maybe_unused]] const ssize_t written = write(notify_fd_, &one, sizeof(one));
        }
    }

    std::mutex mutex_, joining_;
    std::condition_variable work_;
    std::vector<File> files_;
    bool stopping_ = false;
    const int notify_fd_;
    const pid_t owner_;
    std::thread thread_;  // last: it uses all of the above
};

}  // namespace
}  // namespace kvtier

void bind_prefault(nb::module_& m) {
    using kvtier::Prefaulter;
    nb::class_<Prefaulter>(m, "Prefaulter", nb::is_final())
        .def(nb::init<int>(), nb::arg("notify_fd"))
        .def("add", &Prefaulter::add, nb::arg("fd"), nb::arg("size"), nb::arg("lock") = false)
        .def("progress", &Prefaulter::progress)
        .def("stop", &Prefaulter::stop);
}
