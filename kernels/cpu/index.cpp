// The slower half of the index: inserting, erasing, overflow buckets.
#include "index.h"

#include <unistd.h>

#include <stdexcept>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvtier {

Index::Index(const Records& records) : records_(records) {
    buckets_.reach(buckets() - 1);
    if (getentropy(seeds_.data(), sizeof seeds_)) throw std::runtime_error("no random bytes");
}

std::uint32_t Index::Bucket::hits(std::uint8_t tag) const {
#ifdef __SSE2__
    __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
    __m128i same = _mm_cmpeq_epi8(line, _mm_set1_epi8(static_cast<char>(tag)));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(same)) & ((1U << entries) - 1);
#else
    std::uint32_t found = 0;
    for (unsigned i = 0; i < entries; ++i) found |= std::uint32_t{tags[i] == tag} << i;
    return found;
#endif
}

void Index::put(std::size_t at, std::uint8_t tag, Id id) {
    Bucket* bucket = &buckets_[at];
    for (;;) {
        for (unsigned i = 0; i < entries; ++i) {
            if (bucket->tags[i]) continue;
            bucket->tags[i] = tag;
            bucket->ids[i] = id;
            return;
        }
        if (!bucket->next) bucket->next = make_overflow();
        bucket = &overflow_[bucket->next - 1];
    }
}

void Index::erase(std::uint64_t hash, Id id) {
    // The last entry of the chain fills the gap, so that entries stay packed.
    Bucket* found = nullptr;
    unsigned hole = 0;
    Bucket* before = nullptr;
    Bucket* last = &buckets_[home(hash)];
    for (;;) {
        if (!found)
            for (std::uint32_t hits = last->hits(tag(hash)); hits; hits &= hits - 1) {
                unsigned i = std::countr_zero(hits);
                if (last->ids[i] == id) {
                    found = last;
                    hole = i;
                    break;
                }
            }
        if (!last->next) break;
        before = last;
        last = &overflow_[last->next - 1];
    }
    if (!found) throw std::logic_error("index: a node is missing");
    unsigned end = 0;
    while (end < entries && last->tags[end]) ++end;
    --end;
    found->tags[hole] = last->tags[end];
    found->ids[hole] = last->ids[end];
    last->tags[end] = 0;
    if (end == 0 && before) {
        drop_overflow(before->next);
        before->next = 0;
    }
    --size_;
}

std::uint32_t Index::make_overflow() {
    std::uint32_t next = overflow_free_;
    if (next) {
        overflow_free_ = overflow_[next - 1].next;
    } else {
        overflow_.reach(overflow_made_);
        next = ++overflow_made_;
    }
    overflow_[next - 1] = Bucket{};
    return next;
}

void Index::drop_overflow(std::uint32_t next) {
    overflow_[next - 1].next = overflow_free_;
    overflow_free_ = next;
}

}  // namespace kvtier
