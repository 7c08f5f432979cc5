// Warps, as the codecs' kernels use them: an operation of each lane, then one over all lanes. On a
// device a lane is a thread; on the host, for the tests, a loop runs the 32 lanes. What a lane
// writes is visible to all lanes in the next step. All use of threads is in this file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/lossless.h"

namespace kvtier::cuda {

using codec::kLanes;

#if defined(__CUDACC__)
#define KVTIER_DEVICE __device__ __forceinline__
// Before a loop whose arrays must be in registers.
#define KVTIER_UNROLLED _Pragma("unroll")
inline constexpr uint32_t kAll = 0xFFFFFFFFu;

// A number per lane.
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

// A bit per lane.
template <typename Function>
KVTIER_DEVICE uint32_t ballot(Function function) {
    return __ballot_sync(kAll, function(threadIdx.x % static_cast<uint32_t>(kLanes)));
}

// The value of lane `from` (modulo 32).
template <typename T>
KVTIER_DEVICE Each<T> shuffled(Each<T>& numbers, Each<uint32_t>& from) {
    return {__shfl_sync(kAll, numbers.own, static_cast<int>(from.own))};
}

// The value of the lane whose number differs in these bits.
template <typename T>
KVTIER_DEVICE Each<T> crossed(Each<T>& numbers, uint32_t bits) {
    return {__shfl_xor_sync(kAll, numbers.own, static_cast<int>(bits))};
}

template <typename T, typename Function, typename Join>
KVTIER_DEVICE T joined(Function function, Join join) {
    T found = function(threadIdx.x % static_cast<uint32_t>(kLanes));
    for (int apart = static_cast<int>(kLanes) / 2; apart != 0; apart /= 2) {
        found = join(found, __shfl_xor_sync(kAll, found, apart));
    }
    return found;
}

// A flag that other warps set or read at the same time: a volatile access is relaxed and atomic,
// and is not combined with another one.
KVTIER_DEVICE void set_flag(uint32_t& flag) { *static_cast<volatile uint32_t*>(&flag) = 1; }
KVTIER_DEVICE bool is_set(const uint32_t& flag) {
    return *static_cast<const volatile uint32_t*>(&flag) != 0;
}

KVTIER_DEVICE void count_at(uint32_t* counter) { atomicAdd(counter, 1u); }
KVTIER_DEVICE uint32_t bits_in(uint32_t mask) { return static_cast<uint32_t>(__popc(mask)); }
KVTIER_DEVICE uint32_t bits_in(uint64_t mask) { return static_cast<uint32_t>(__popcll(mask)); }

#else
#define KVTIER_DEVICE inline
#define KVTIER_UNROLLED

template <typename T>
struct Each {
    T of[kLanes];
    T& operator[](uint32_t lane) { return of[lane]; }
};

template <typename Act>
inline void each(Act act) {
    for (uint32_t lane = 0; lane < kLanes; lane++) act(lane);
}

template <typename Function>
inline uint32_t ballot(Function function) {
    uint32_t found = 0;
    for (uint32_t lane = 0; lane < kLanes; lane++) {
        found |= static_cast<uint32_t>(static_cast<bool>(function(lane))) << lane;
    }
    return found;
}

template <typename T>
inline Each<T> shuffled(Each<T>& numbers, Each<uint32_t>& from) {
    Each<T> found;
    for (uint32_t lane = 0; lane < kLanes; lane++) found[lane] = numbers[from[lane] % kLanes];
    return found;
}

template <typename T>
inline Each<T> crossed(Each<T>& numbers, uint32_t bits) {
    Each<T> found;
    for (uint32_t lane = 0; lane < kLanes; lane++) found[lane] = numbers[lane ^ bits];
    return found;
}

template <typename T, typename Function, typename Join>
inline T joined(Function function, Join join) {
    T found = function(0);
    for (uint32_t lane = 1; lane < kLanes; lane++)
        found = join(found, static_cast<T>(function(lane)));
    return found;
}

inline void set_flag(uint32_t& flag) { flag = 1; }
inline bool is_set(const uint32_t& flag) { return flag != 0; }
inline void count_at(uint32_t* counter) { ++*counter; }
inline uint32_t bits_in(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }
inline uint32_t bits_in(uint64_t mask) { return static_cast<uint32_t>(__builtin_popcountll(mask)); }
#endif

template <typename Function>
KVTIER_DEVICE uint64_t sum(Function function) {
    return joined<uint64_t>(function, [](uint64_t a, uint64_t b) { return a + b; });
}

// The number of lanes before this one whose bit is set.
KVTIER_DEVICE uint32_t before(uint32_t mask, uint32_t lane) {
    return bits_in(mask & ((1u << lane) - 1));
}

// The number of this warp, and the number of all warps.
KVTIER_DEVICE uint32_t warp() {
    return (blockIdx.x * blockDim.x + threadIdx.x) / static_cast<uint32_t>(kLanes);
}
KVTIER_DEVICE uint32_t warps() { return gridDim.x * (blockDim.x / static_cast<uint32_t>(kLanes)); }

}  // namespace kvtier::cuda
