// Short-lived threads for one call's work: no pool, so nothing survives a fork half alive.
#pragma once

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace kvtier {

// Lets the others go first from now on: this thread takes what they leave of the cores. On Linux a
// thread has a nice value of its own, and that is its id's. It can't be taken back.
inline void step_back(int nice) {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
}

// Calls work(i) for every i below n, on up to `threads` threads, this one among them, and done() at
// the end of each thread. Neither may throw. Where `nice` is not 0 the threads are of that
// priority, and this one only waits for them.
template <typename Work, typename Done>
void in_parallel(size_t n, size_t threads, int nice, const Work& work, const Done& done) {
    std::atomic<size_t> next{0};
    const auto run = [&] {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
        done();
    };
    const auto step_back_and_run = [&] {
        if (nice != 0) step_back(nice);
        run();
    };
    std::vector<std::thread> others;
    const size_t wanted = std::min(threads, n);
    others.reserve(wanted);
    for (size_t t = nice != 0 ? 0 : 1; t < wanted; t++) {
        try {
            others.emplace_back(step_back_and_run);
        } catch (const std::system_error&) {
            break;  // no more threads to be had: those there are do it all
        }
    }
    if (nice == 0 || others.empty()) run();
    for (std::thread& other : others) other.join();
}

}  // namespace kvtier
