// BLAKE3: the portable compression function, chunks, and the tree above them.
#include "blake3.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

namespace kvtier::blake3 {
namespace {

inline void mix(uint32_t* v, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    v[a] += v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 7);
}

void compress_scalar(uint32_t cv[8], const uint8_t block[kBlock], uint32_t block_bytes,
                     uint64_t counter, uint32_t flags) {
    uint32_t m[16], v[16];
    std::memcpy(m, block, kBlock);
    std::memcpy(v, cv, 32);
    std::memcpy(v + 8, kIv, 16);
    v[12] = static_cast<uint32_t>(counter);
    v[13] = static_cast<uint32_t>(counter >> 32);
    v[14] = block_bytes;
    v[15] = flags;
#pragma GCC unroll 7
    for (int r = 0; r < 7; r++) {
        const uint32_t* s = kSchedule.word[r];
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) cv[i] = v[i] ^ v[i + 8];
}

// Consumes one chunk (the last one may be shorter); `cv` becomes its chaining value.
void chunk(Compress compress, uint32_t cv[8], const uint8_t* data, size_t size, uint64_t index,
           uint32_t key_flag, uint32_t last_flag) {
    uint32_t flags = key_flag | kChunkStart;
    while (size > kBlock) {
        compress(cv, data, kBlock, index, flags);
        data += kBlock, size -= kBlock;
        flags = key_flag;
    }
    uint8_t padded[kBlock] = {};
    const uint8_t* block = data;
    if (size < kBlock) {
        if (size != 0) std::memcpy(padded, data, size);
        block = padded;
    }
    compress(cv, block, static_cast<uint32_t>(size), index, flags | kChunkEnd | last_flag);
}

Compress compress_of(Level level) {
#if KVTIER_X86
    if (level == Level::kAvx512) return compress_avx512;
    if (level == Level::kSse41) return compress_sse41;
#endif
    return compress_scalar;
}

}  // namespace

Compress chosen_compress() { return compress_of(blake3_choice().level()); }

double trial(Level level) {
    const Compress compress = compress_of(level);
    uint8_t block[kBlock] = {};
    uint32_t cv[8] = {};
    double best = 1;
    for (int attempt = 0; attempt < 8; attempt++) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < 32; i++) {
            compress(cv, block, kBlock, 0, kKeyed);
            std::memcpy(block, cv, 32);
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = std::min(best, took.count());
    }
    return best;
}

void hash(Compress compress, const uint32_t key[8], uint32_t key_flag, const uint8_t* data,
          size_t size, uint8_t* digest) {
    uint32_t cv[8];
    if (size <= kChunk) {
        std::memcpy(cv, key, 32);
        chunk(compress, cv, data, size, 0, key_flag, kRoot);
        std::memcpy(digest, cv, 32);
        return;
    }
    // Chaining values of subtrees that wait for their right neighbour, the largest first: one for
    // each bit that is set in the number of whole chunks before this one.
    uint32_t waiting[54][8];
    size_t depth = 0;
    const auto join = [&](const uint32_t left[8], uint32_t right[8], uint32_t root) {
        uint8_t both[kBlock];
        std::memcpy(both, left, 32);
        std::memcpy(both + 32, right, 32);
        std::memcpy(right, key, 32);
        compress(right, both, kBlock, 0, key_flag | kParent | root);
    };
    for (uint64_t index = 0;; index++) {
        const size_t n = std::min(size, kChunk);
        std::memcpy(cv, key, 32);
        chunk(compress, cv, data, n, index, key_flag, 0);
        data += n, size -= n;
        if (size == 0) break;
        for (uint64_t whole = index + 1; (whole & 1) == 0; whole >>= 1) {
            join(waiting[--depth], cv, 0);
        }
        std::memcpy(waiting[depth++], cv, 32);
    }
    while (depth != 0) {
        depth--;
        join(waiting[depth], cv, depth == 0 ? uint32_t{kRoot} : 0);
    }
    std::memcpy(digest, cv, 32);
}

}  // namespace kvtier::blake3
