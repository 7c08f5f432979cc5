// Warps as the codecs' kernels see them: what each lane does, and then what all of them know. On a
// device a lane is a thread; elsewhere, for the tests, the 32 of them are done one after the other.
// What a lane has done with memory, all others see in the next step. Nothing but this knows of
// threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/lossless.h"

namespace kvtier::cuda {

using codec::kLanes;

#if defined(__CUDACC__)
#define KVTIER_DEVICE __device__ __forceinline__
inline constexpr uint32_t kAll = 0xFFFFFFFFu;

// A number that each lane has of its own.
template <typename T>
struct Each {
    T own;
    KVTIER_DEVICE T& operator[](uint32_t) { return own; }
};

template <typename Act>
KVTIER_DEVICE void each(Act act) {
    act(threadIdx.x % static_cast<uint32_t>(kLanes));
    __syncwarp();
}

// A bit for each lane.
template <typename Says>
KVTIER_DEVICE uint32_t ballot(Says says) {
    return __ballot_sync(kAll, says(threadIdx.x % static_cast<uint32_t>(kLanes)));
}

// What the lane `from` (modulo 32) has.
template <typename T>
KVTIER_DEVICE Each<T> shuffled(Each<T>& numbers, Each<uint32_t>& from) {
    return {__shfl_sync(kAll, numbers.own, static_cast<int>(from.own))};
}

template <typename T, typename Says, typename Join>
KVTIER_DEVICE T joined(Says says, Join join) {
    T found = says(threadIdx.x % static_cast<uint32_t>(kLanes));
    for (int apart = static_cast<int>(kLanes) / 2; apart != 0; apart /= 2) {
        found = join(found, __shfl_xor_sync(kAll, found, apart));
    }
    return found;
}

KVTIER_DEVICE void count_at(uint32_t* counter) { atomicAdd(counter, 1u); }
KVTIER_DEVICE uint32_t bits_in(uint32_t mask) { return static_cast<uint32_t>(__popc(mask)); }

#else
#define KVTIER_DEVICE inline

template <typename T>
struct Each {
    T of[kLanes];
    T& operator[](uint32_t lane) { return of[lane]; }
};

template <typename Act>
inline void each(Act act) {
    for (uint32_t lane = 0; lane < kLanes; lane++) act(lane);
}

template <typename Says>
inline uint32_t ballot(Says says) {
    uint32_t found = 0;
    for (uint32_t lane = 0; lane < kLanes; lane++) {
        found |= static_cast<uint32_t>(static_cast<bool>(says(lane))) << lane;
    }
    return found;
}

template <typename T>
inline Each<T> shuffled(Each<T>& numbers, Each<uint32_t>& from) {
    Each<T> found;
    for (uint32_t lane = 0; lane < kLanes; lane++) found[lane] = numbers[from[lane] % kLanes];
    return found;
}

template <typename T, typename Says, typename Join>
inline T joined(Says says, Join join) {
    T found = says(0);
    for (uint32_t lane = 1; lane < kLanes; lane++) found = join(found, static_cast<T>(says(lane)));
    return found;
}

inline void count_at(uint32_t* counter) { ++*counter; }
inline uint32_t bits_in(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }
#endif

template <typename Says>
KVTIER_DEVICE uint64_t sum(Says says) {
    return joined<uint64_t>(says, [](uint64_t a, uint64_t b) { return a + b; });
}

// How many lanes before this one have their bit set.
KVTIER_DEVICE uint32_t before(uint32_t mask, uint32_t lane) {
    return bits_in(mask & ((1u << lane) - 1));
}

// Which of all warps this is, and how many there are.
KVTIER_DEVICE uint32_t warp() {
    return (blockIdx.x * blockDim.x + threadIdx.x) / static_cast<uint32_t>(kLanes);
}
KVTIER_DEVICE uint32_t warps() { return gridDim.x * (blockDim.x / static_cast<uint32_t>(kLanes)); }

}  // namespace kvtier::cuda
