// Reads of pages of files that do not wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

// Whole pages, for files that bypass the page cache.
struct PageRead {
    int fd;
    uint64_t at;
    size_t bytes;
    uint8_t* into;
    bool good = false;  // all bytes were read
};

// Reads one after another.
bool read_pages(int fd, uint64_t at, size_t bytes, uint8_t* into);

// The most reads of `read_at_once`.
inline constexpr size_t kAtOnce = 16;

// Submits all of these together, and waits for all. Each thread keeps a ring for this until it
// ends; without io_uring, reads one after another.
void read_at_once(std::span<PageRead> reads);

}  // namespace kvtier
