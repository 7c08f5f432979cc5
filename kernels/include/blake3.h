// BLAKE3 (the published algorithm, version 1), hash and keyed hash, digests of 32 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.h"

namespace kvtier::blake3 {

inline constexpr size_t kKeyBytes = 32;
inline constexpr size_t kBlock = 64;
inline constexpr size_t kChunk = 1024;

enum Flag : uint32_t {
    kChunkStart = 1,
    kChunkEnd = 2,
    kParent = 4,
    kRoot = 8,
    kKeyed = 16,
};

inline constexpr uint32_t kIv[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                    0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// The order in which round r reads the message's words.
struct Schedule {
    uint32_t word[7][16];
};

constexpr Schedule make_schedule() {
    constexpr uint32_t permutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    Schedule s{};
    for (uint32_t i = 0; i < 16; i++) s.word[0][i] = i;
    for (int r = 1; r < 7; r++) {
        for (int i = 0; i < 16; i++) s.word[r][i] = s.word[r - 1][permutation[i]];
    }
    return s;
}

inline constexpr Schedule kSchedule = make_schedule();

// the implementation chosen for "blake3"
using Compress = void (*)(uint32_t cv[8], const uint8_t block[kBlock], uint32_t block_bytes,
                          uint64_t counter, uint32_t flags);

Compress chosen_compress();  // as chosen for "blake3"

// Seconds that a short chain of compressions takes.
double trial(Level level);

#if KVTIER_X86
void compress_sse41(uint32_t cv[8], const uint8_t block[kBlock], uint32_t block_bytes,
                    uint64_t counter, uint32_t flags);
void compress_avx512(uint32_t cv[8], const uint8_t block[kBlock], uint32_t block_bytes,
                     uint64_t counter, uint32_t flags);
#endif

// Writes the digest of `size` bytes; `key`: the eight words of a key, or kIv for unkeyed.
void hash(Compress compress, const uint32_t key[8], uint32_t key_flag, const uint8_t* data,
          size_t size, uint8_t* digest);

}  // namespace kvtier::blake3
