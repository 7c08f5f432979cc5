// What the lanes of a warp do together; lane_threads.h describes it.
#pragma once

#include <cstdint>

struct Place {
    unsigned x;
};
extern constinit thread_local Place threadIdx, blockIdx, blockDim, gridDim;

namespace lanes {

inline constexpr unsigned kWarp = 32;
inline constexpr int kDivergedStatus = 3;

enum class Meeting { kBarrier, kVote, kShuffle };

// Waits for the other lanes of the warp at the same kind of meeting. Returns what they said, by
// lane: valid until this lane's next meeting.
const uint64_t* meet(Meeting at, uint64_t said);

// Sets the order in which lanes run.
void seed(uint64_t number);

// Calls `run(given)` as each thread of `grid` blocks; `threads` is a multiple of 32, at most 128.
void launch(unsigned grid, unsigned threads, void (*run)(void*), void* given);

}  // namespace lanes
