// Short-lived threads for one call's work: no pool, so nothing survives a fork half alive.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace kvtier {

// Calls work(i) for every i below n, on up to `threads` threads, this one among them, and done() at
// the end of each thread. Neither may throw.
template <typename Work, typename Done>
void in_parallel(size_t n, size_t threads, const Work& work, const Done& done) {
    std::atomic<size_t> next{0};
    const auto run = [&] {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
        done();
    };
    std::vector<std::thread> others;
    const size_t wanted = std::min(threads, n);
    others.reserve(wanted);
    for (size_t t = 1; t < wanted; t++) {
        try {
            others.emplace_back(run);
        } catch (const std::system_error&) {
            break;  // no more threads to be had: those there are do it all
        }
    }
    run();
    for (std::thread& other : others) other.join();
}

}  // namespace kvtier
