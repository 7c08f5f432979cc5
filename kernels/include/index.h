// The index: (space, key) -> node, by linear hashing: one bucket splits at a time, so growth has no
// spike. A bucket is one cache line.
//
//    0            12                                            60        64
//    | 12 tags    | 12 node ids                                 | overflow |
//
// A tag is a byte of the hash, 0 where the entry is empty; entries are packed to the front.
#pragma once
#include <cstdint>

#include "record.h"

namespace kvtier {

class Index {
 public:
    explicit Index(const Records& records);

    std::uint64_t hash(std::uint32_t space, const Key& key) const {
        return fold(key.words[0] ^ seeds_[0] ^ space, key.words[1] ^ seeds_[1]) ^
               fold(key.words[2] ^ seeds_[2], key.words[3] ^ seeds_[3]);
    }

    // Returns the node with this hash that `same` accepts, or `none`.
    template <class Same>
    Id find(std::uint64_t hash, Same same) const {
        for (const Bucket* bucket = &buckets_[home(hash)];; bucket = &overflow_[bucket->next - 1]) {
            for (std::uint32_t hits = bucket->hits(tag(hash)); hits; hits &= hits - 1) {
                Id id = bucket->ids[std::countr_zero(hits)];
                if (same(id)) return id;
            }
            if (!bucket->next) return none;
        }
    }

    // For software pipelining: prefetches the bucket, and later the records under this hash.
    void prefetch(std::uint64_t hash) const { __builtin_prefetch(&buckets_[home(hash)]); }
    void prefetch_records(std::uint64_t hash) const {
        const Bucket& bucket = buckets_[home(hash)];
        if (bucket.next) __builtin_prefetch(&overflow_[bucket.next - 1]);
        for (std::uint32_t hits = bucket.hits(tag(hash)); hits; hits &= hits - 1)
            __builtin_prefetch(&records_[bucket.ids[std::countr_zero(hits)]]);
    }

    // `hash_of(id)` returns the hash of a node in the index; the split of a bucket needs it.
    template <class HashOf>
    void insert(std::uint64_t hash, Id id, HashOf hash_of) {
        put(home(hash), tag(hash), id);
        if (++size_ > std::size_t{fill} * buckets()) split(hash_of);
    }

    void erase(std::uint64_t hash, Id id);
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const { return buckets_.memory_bytes() + overflow_.memory_bytes(); }

 private:
    static constexpr unsigned entries = 12;
    static constexpr unsigned fill = 9;  // average number of entries per bucket at which one splits

    struct alignas(64) Bucket {
        std::uint8_t tags[entries];
        Id ids[entries];
        std::uint32_t next;  // 1 + the overflow bucket, 0 for none
        std::uint32_t hits(std::uint8_t tag) const;
    };
    static_assert(sizeof(Bucket) == 64);

    static std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
        auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }
    static std::uint8_t tag(std::uint64_t hash) {
        auto top = static_cast<std::uint8_t>(hash >> 56);
        return top ? top : 1;
    }
    std::size_t buckets() const { return (std::size_t{1} << level_) + split_; }
    std::size_t home(std::uint64_t hash) const {
        std::size_t at = hash & ((std::size_t{1} << level_) - 1);
        return at < split_ ? hash & ((std::size_t{2} << level_) - 1) : at;
    }
    void put(std::size_t bucket, std::uint8_t tag, Id id);
    std::uint32_t make_overflow();
    void drop_overflow(std::uint32_t next);

    // Moves those entries of bucket `split_` whose next hash bit is set into a new last bucket.
    template <class HashOf>
    void split(HashOf hash_of) {
        std::size_t from = split_, to = buckets();
        buckets_.reach(to);
        std::uint64_t bit = std::uint64_t{1} << level_;
        Bucket taken = buckets_[from];
        buckets_[from] = Bucket{};
        if (++split_ == (std::size_t{1} << level_)) {
            ++level_;
            split_ = 0;
        }
        for (;;) {
            for (unsigned i = 0; i < entries && taken.tags[i]; ++i)
                __builtin_prefetch(&records_[taken.ids[i]]);
            for (unsigned i = 0; i < entries && taken.tags[i]; ++i)
                put(hash_of(taken.ids[i]) & bit ? to : from, taken.tags[i], taken.ids[i]);
            if (!taken.next) return;
            std::uint32_t next = taken.next;
            taken = overflow_[next - 1];
            drop_overflow(next);
        }
    }

    const Records& records_;
    Chunks<Bucket> buckets_;
    Chunks<Bucket> overflow_;
    std::uint32_t overflow_made_ = 0;
    std::uint32_t overflow_free_ = 0;  // 1 + the first free overflow bucket
    std::size_t size_ = 0;
    unsigned level_ = 4;
    std::size_t split_ = 0;
    // random, so a client that selects keys cannot select their buckets
    std::array<std::uint64_t, 4> seeds_;
};

}  // namespace kvtier
