// Which instructions this machine has, and which of a kernel's implementations runs.
#pragma once

#include <atomic>
#include <vector>

#if defined(__x86_64__)
#define KVTIER_X86 1
#define KVTIER_AVX2 __attribute__((target("avx2,bmi2")))
#define KVTIER_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2")))
#define KVTIER_VBMI \
    __attribute__(( \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi2,popcnt")))
#define KVTIER_SSE41 __attribute__((target("sse4.1,ssse3")))
#else
#define KVTIER_X86 0
#endif

namespace kvtier {

// Ordered: a level has everything that the levels below it have.
enum class Level : int { kScalar = 0, kSse41 = 1, kAvx2 = 2, kAvx512 = 3, kVbmi = 4 };

const char* level_name(Level level);

// The best level that the processor, the operating system and KVTIER_CPU allow.
Level machine_level();

// A kind of kernel and its implementations; tests use `choose` to select one.
class Choice {
 public:
    Choice(const char* kind, std::vector<Level> levels);

    Level level() const { return static_cast<Level>(chosen_.load(std::memory_order_relaxed)); }
    const char* kind() const { return kind_; }
    // The levels that run on this machine; the default comes first.
    const std::vector<Level>& levels() const { return levels_; }
    void choose(Level level) { chosen_.store(static_cast<int>(level), std::memory_order_relaxed); }

 private:
    const char* kind_;
    std::vector<Level> levels_;
    std::atomic<int> chosen_;
};

Choice& copy_choice();    // copies, with and without checksum
Choice& xxh3_choice();    // the checksum alone
Choice& codec_choice();   // encoding and decoding
Choice& blake3_choice();  // keys; the fastest on this machine, measured at the start

}  // namespace kvtier
