// The lanes: contexts that a thread of the host per thread block switches between, at the meetings
// of their warp. ThreadSanitizer is told of each switch, and of no order between lanes except at
// barriers. Compiled without it, so that it does not see this bookkeeping.
#include <sanitizer/tsan_interface.h>
#include <ucontext.h>

#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lane_meetings.h"

constinit thread_local Place threadIdx, blockIdx, blockDim, gridDim;

namespace lanes {

constexpr unsigned kThreadsMost = 128, kBlocksAtOnce = 2;
constexpr size_t kStackBytes = 256 << 10;
constexpr const char* kNames[] = {"__syncwarp", "a vote", "a shuffle"};

namespace {

struct Launch {
    unsigned grid, threads;
    void (*run)(void*);
    void* given;
};

// Addresses by which ThreadSanitizer knows the order between a launch and its lanes.
char begun, ended;
uint64_t seed_now = 1;

struct Warp {
    unsigned there = 0, over = 0;
    unsigned meeting = 0;  // even or odd: a lane is at most one meeting ahead of another
    Meeting at = Meeting::kBarrier;
    std::array<uint64_t, kWarp> said[2];
    char order[2];
};

struct Block;

struct Lane {
    ucontext_t context;
    void* thread = nullptr;  // as ThreadSanitizer knows it
    unsigned number;
    Block* block;
    std::unique_ptr<char[]> stack;
};

[[noreturn]] void lane_main();
thread_local Lane* me;

struct Block {
    Lane self;  // the thread of the host
    std::vector<std::unique_ptr<Lane>> all;
    std::vector<Lane*> ready;
    std::array<Warp, kThreadsMost / kWarp> warps;
    unsigned left = 0;
    char order;  // blocks that run one after the other share memory; they are not compared
    uint64_t chance = 1;
    const Launch* launch = nullptr;

    unsigned below(unsigned end) {
        chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
        return static_cast<unsigned>((chance >> 32) * end >> 32);
    }

    void run(const Launch& of, unsigned number, uint64_t seed) {
        launch = &of;
        chance = seed * 0x9E3779B97F4A7C15u + number + 1;
        while (all.size() < of.threads) {
            auto lane = std::make_unique<Lane>();
            lane->number = static_cast<unsigned>(all.size());
            lane->block = this;
            lane->stack = std::make_unique<char[]>(kStackBytes);
            lane->thread = __tsan_create_fiber(0);
            getcontext(&lane->context);
            lane->context.uc_stack.ss_sp = lane->stack.get();
            lane->context.uc_stack.ss_size = kStackBytes;
            makecontext(&lane->context, lane_main, 0);
            all.push_back(std::move(lane));
        }
        self.thread = __tsan_get_current_fiber();
        me = &self;
        blockIdx.x = number, blockDim.x = of.threads, gridDim.x = of.grid;
        for (Warp& warp : warps) warp.there = warp.over = 0;
        left = of.threads;
        for (unsigned i = 0; i < of.threads; i++) ready.push_back(all[i].get());
        go_on();
    }

    [[noreturn]] void diverged(const char* what, const char* one, const char* other) {
        std::fprintf(stderr, "lanes diverged in block %u: %s %s, %s\n", blockIdx.x, what, one,
                     other);
        std::_Exit(kDivergedStatus);
    }

    // Continues with any lane that is not waiting; or with the host's thread after the last one.
    void go_on() {
        if (left == 0) return become(self);
        if (ready.empty()) {
            for (const Warp& warp : warps) {
                if (warp.there == 0) continue;
                diverged("lanes wait for ever at", kNames[static_cast<int>(warp.at)],
                         warp.over == 0 ? "others wait elsewhere" : "others have ended");
            }
        }
        // At times one warp runs far ahead of the others.
        const auto size = static_cast<unsigned>(ready.size());
        unsigned chosen = below(size);
        for (unsigned tries = below(4); tries != 0 && me != &self; tries--) {
            if (ready[chosen]->number / kWarp == me->number / kWarp) break;
            chosen = below(size);
        }
        std::swap(ready[chosen], ready.back());
        Lane& next = *ready.back();
        ready.pop_back();
        become(next);
    }

    void become(Lane& next) {
        Lane& before = *me;
        if (&next == &before) return;
        me = &next;
        threadIdx.x = next.number;
        __tsan_switch_to_fiber(next.thread, __tsan_switch_to_fiber_no_sync);
        swapcontext(&before.context, &next.context);
    }
};

void lane_main() {
    for (;;) {
        Block& block = *me->block;
        __tsan_acquire(&begun);
        __tsan_acquire(&block.order);
        block.launch->run(block.launch->given);
        __tsan_release(&ended);
        __tsan_release(&block.order);
        Warp& warp = block.warps[me->number / kWarp];
        warp.over++;
        block.left--;
        block.go_on();
    }
}

// Runs thread blocks one after the other, at the same time as the other workers.
class Worker {
 public:
    Worker() : thread_([this] { serve(); }) { thread_.detach(); }

    void start(const Launch& launch, unsigned first, unsigned step, uint64_t seed) {
        const std::lock_guard lock(mutex_);
        launch_ = &launch, first_ = first, step_ = step, seed_ = seed;
        changed_.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return launch_ == nullptr; });
    }

 private:
    void serve() {
        Block block;
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return launch_ != nullptr; });
            for (unsigned number = first_; number < launch_->grid; number += step_) {
                block.run(*launch_, number, seed_);
            }
            launch_ = nullptr;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    const Launch* launch_ = nullptr;
    unsigned first_ = 0, step_ = 1;
    uint64_t seed_ = 0;
    std::thread thread_;
};

}  // namespace

const uint64_t* meet(Meeting at, uint64_t said) {
    Lane& lane = *me;
    Block& block = *lane.block;
    Warp& warp = block.warps[lane.number / kWarp];
    const unsigned turn = warp.meeting % 2;
    if (warp.there == 0) warp.at = at;
    if (warp.at != at) {
        block.diverged("lanes of a warp are at", kNames[static_cast<int>(warp.at)],
                       kNames[static_cast<int>(at)]);
    }
    if (at == Meeting::kBarrier) __tsan_release(&warp.order[turn]);
    warp.said[turn][lane.number % kWarp] = said;
    if (++warp.there == kWarp) {
        warp.there = 0;
        warp.meeting++;
        for (unsigned i = 0; i < kWarp; i++) {
            block.ready.push_back(block.all[lane.number / kWarp * kWarp + i].get());
        }
    }
    block.go_on();
    if (at == Meeting::kBarrier) __tsan_acquire(&warp.order[turn]);
    return warp.said[turn].data();
}

void seed(uint64_t number) { seed_now = number; }

void launch(unsigned grid, unsigned threads, void (*run)(void*), void* given) {
    static Worker* const workers = new Worker[kBlocksAtOnce];
    if (threads == 0 || threads > kThreadsMost || threads % kWarp != 0) std::abort();
    const Launch all = {grid, threads, run, given};
    seed_now++;
    __tsan_release(&begun);
    for (unsigned i = 0; i < kBlocksAtOnce; i++) workers[i].start(all, i, kBlocksAtOnce, seed_now);
    for (unsigned i = 0; i < kBlocksAtOnce; i++) workers[i].wait();
    __tsan_acquire(&ended);
}

}  // namespace lanes

// Kernels access flags of other warps as volatile: relaxed and atomic on a device, so no race.
extern "C" {
void __tsan_volatile_read4(void*) {}
void __tsan_volatile_write4(void*) {}
}
