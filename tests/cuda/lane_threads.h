// A substitute for a device on which each lane of a warp is a thread: all 32 lanes meet at
// __syncwarp, at votes and at shuffles. Lanes that diverge wait there forever, as on a device. One
// warp does all the work, whatever the grid is.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct Place {
    unsigned x;
};
inline thread_local Place threadIdx, blockIdx, blockDim, gridDim;

inline constexpr unsigned kWarpLanes = 32;
inline std::barrier<> meeting(kWarpLanes);
inline uint64_t said[kWarpLanes];

inline void __syncwarp() { meeting.arrive_and_wait(); }

// Collects a value from every lane, and passes all values to every lane.
template <typename T, typename Take>
auto exchanged(T mine, const Take& take) {
    uint64_t word = 0;
    std::memcpy(&word, &mine, sizeof mine);
    said[threadIdx.x] = word;
    meeting.arrive_and_wait();
    auto found = take();
    meeting.arrive_and_wait();
    return found;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    return exchanged(uint64_t{vote}, [] {
        unsigned found = 0;
        for (unsigned lane = 0; lane < kWarpLanes; lane++)
            found |= static_cast<unsigned>(said[lane]) << lane;
        return found;
    });
}

template <typename T>
T __shfl_sync(unsigned, T mine, int from) {
    return exchanged(mine, [&] {
        T found;
        std::memcpy(&found, &said[static_cast<unsigned>(from) % kWarpLanes], sizeof found);
        return found;
    });
}

template <typename T>
T __shfl_xor_sync(unsigned all, T mine, int apart) {
    return __shfl_sync(all, mine, static_cast<int>(threadIdx.x) ^ apart);
}

inline void atomicAdd(unsigned* at, unsigned by) { __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <unsigned kStep = 1, typename Kernel, typename... Arguments>
void run_on_host(unsigned, unsigned, const Kernel& kernel, Arguments... arguments) {
    std::vector<std::jthread> lanes;
    for (unsigned lane = 0; lane < kWarpLanes; lane++) {
        lanes.emplace_back([&, lane] {
            threadIdx.x = lane;
            blockIdx.x = 0;
            blockDim.x = kWarpLanes;
            gridDim.x = 1;
            kernel(arguments...);
        });
    }
}

#include "kernel_texts.h"
