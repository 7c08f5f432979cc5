// Short-lived threads for the work of one call: without a pool, a fork copies no working state.
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

// Gives this thread a lower priority, permanently. On Linux each thread has its own nice value,
// addressed by the thread's id.
inline void lower_priority(int nice) {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
}

// Calls work(i) for each i below n on up to `threads` threads, including this one, and done() at
// the end of each thread. Neither may throw. If `nice` is not 0, the work runs on other threads
// with that nice value, and this thread only waits for them.
template <typename Work, typename Done>
void in_parallel(size_t n, size_t threads, int nice, const Work& work, const Done& done) {
    std::atomic<size_t> next{0};
    const auto run = [&] {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
        done();
    };
    const auto lower_priority_and_run = [&] {
        if (nice != 0) lower_priority(nice);
        run();
    };
    std::vector<std::thread> others;
    const size_t wanted = std::min(threads, n);
    others.reserve(wanted);
    for (size_t t = nice != 0 ? 0 : 1; t < wanted; t++) {
        try {
            others.emplace_back(lower_priority_and_run);
        } catch (const std::system_error&) {
            break;  // no more threads available: the existing ones do the work
        }
    }
    if (nice == 0 || others.empty()) run();
    for (std::thread& other : others) other.join();
}

}  // namespace kvtier
