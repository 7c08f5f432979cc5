// A substitute for a device on which each lane is a thread, as ThreadSanitizer sees it. The 32
// lanes of a warp meet at __syncwarp, at votes and at shuffles; only __syncwarp orders their
// accesses to memory, and nothing orders those of two warps. Each thread block has its own shared
// memory, and blocks run at the same time. Which lane runs next is random, by a seed. Lanes that
// wait for each other for ever, as diverged lanes on a device do, end the program with a message.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// The codecs' arithmetic is part of the kernels: included earlier, it would be functions that the
// linker takes from the processor's objects, which the sanitizer does not see.
#ifdef KVTIER_HD
#error "include lane_threads.h before all other headers of this project"
#endif
#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static thread_local  // the lanes of a thread block share a thread of the host

#include "lane_meetings.h"

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline void __syncwarp() { lanes::meet(lanes::Meeting::kBarrier, 0); }

inline unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t* const said = lanes::meet(lanes::Meeting::kVote, vote);
    unsigned found = 0;
    for (unsigned lane = 0; lane < lanes::kWarp; lane++) {
        found |= static_cast<unsigned>(said[lane]) << lane;
    }
    return found;
}

template <typename T>
T __shfl_sync(unsigned, T mine, int from) {
    uint64_t word = 0;
    std::memcpy(&word, &mine, sizeof mine);
    word = lanes::meet(lanes::Meeting::kShuffle, word)[static_cast<unsigned>(from) % lanes::kWarp];
    std::memcpy(&mine, &word, sizeof mine);
    return mine;
}

template <typename T>
T __shfl_xor_sync(unsigned all, T mine, int apart) {
    return __shfl_sync(all, mine, static_cast<int>(threadIdx.x) ^ apart);
}

inline void atomicAdd(unsigned* at, unsigned by) { __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }

// Every thread of the grid; `kStep` is for substitutes that run a warp as one.
template <unsigned kStep = 1, typename Kernel, typename... Arguments>
void run_on_host(unsigned grid, unsigned threads, const Kernel& kernel, Arguments... arguments) {
    auto call = [&] { kernel(arguments...); };
    lanes::launch(
        grid, threads, [](void* given) { (*static_cast<decltype(call)*>(given))(); }, &call);
}

#include "kernel_texts.h"
