// Arrays of zeroes in pages that are taken when they are first written. `Chunks` grows by whole
// chunks: items never move, so growth costs no copy and no spike. `ZeroPages` has a fixed size.
#pragma once
#include <sys/mman.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

namespace kvtier {

inline constexpr std::size_t chunk_bytes = std::size_t{2} << 20;  // a huge page

inline void* map_chunk(bool huge) {
    // Maps twice the size and unmaps both ends: a huge page must be aligned.
    void* raw =
        mmap(nullptr, 2 * chunk_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    auto address = reinterpret_cast<std::uintptr_t>(raw);
    std::size_t head = (chunk_bytes - address % chunk_bytes) % chunk_bytes;
    char* start = static_cast<char*>(raw) + head;
    if (head) munmap(raw, head);
    if (head < chunk_bytes) munmap(start + chunk_bytes, chunk_bytes - head);
    if (huge) madvise(start, chunk_bytes, MADV_HUGEPAGE);
    return start;
}

template <class T>
class ZeroPages {
    static_assert(std::is_trivially_destructible_v<T>);

 public:
    explicit ZeroPages(std::size_t n) : size_(n) {
        void* raw = mmap(nullptr, n * sizeof(T), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (raw == MAP_FAILED) throw std::bad_alloc();
        items_ = static_cast<T*>(raw);
    }
    ZeroPages(const ZeroPages&) = delete;
    ZeroPages& operator=(const ZeroPages&) = delete;
    ~ZeroPages() { munmap(static_cast<void*>(items_), size_ * sizeof(T)); }

    T& operator[](std::size_t i) { return items_[i]; }
    const T& operator[](std::size_t i) const { return items_[i]; }
    T* begin() { return items_; }
    T* end() { return items_ + size_; }
    const T* begin() const { return items_; }
    const T* end() const { return items_ + size_; }
    std::size_t size() const { return size_; }

 private:
    std::size_t size_;
    T* items_;
};

template <class T>
class Chunks {
    static_assert(std::is_trivially_destructible_v<T>);
    static constexpr std::size_t per_chunk = std::bit_floor(chunk_bytes / sizeof(T));
    static constexpr unsigned shift = std::bit_width(per_chunk) - 1;

 public:
    Chunks() = default;
    Chunks(const Chunks&) = delete;
    Chunks& operator=(const Chunks&) = delete;
    ~Chunks() {
        for (T* chunk : chunks_)
            if (chunk) munmap(static_cast<void*>(chunk), chunk_bytes);
    }

    T& operator[](std::size_t i) { return chunks_[i >> shift][i & (per_chunk - 1)]; }
    const T& operator[](std::size_t i) const { return chunks_[i >> shift][i & (per_chunk - 1)]; }

    bool reaches(std::size_t i) const {
        return (i >> shift) < chunks_.size() && chunks_[i >> shift] != nullptr;
    }

    // Makes item i exist, all zeroes. The first chunk has small pages: a small store stays small.
    void reach(std::size_t i) {
        std::size_t at = i >> shift;
        if (at >= chunks_.size()) chunks_.resize(at + 1, nullptr);
        if (chunks_[at]) return;
        chunks_[at] = static_cast<T*>(map_chunk(mapped_ > 0));
        ++mapped_;
    }

    std::size_t memory_bytes() const {
        return mapped_ * chunk_bytes + chunks_.capacity() * sizeof(T*);
    }

 private:
    std::vector<T*> chunks_;
    std::size_t mapped_ = 0;
};

}  // namespace kvtier
