// Mapping a file where huge pages can be mapped whole.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace kvtier {

inline constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Maps a file's first `size` bytes, shared, at a multiple of the huge page's size: elsewhere the
// kernel has to map even a huge page in small pieces. MAP_FAILED and errno where it can't be done.
inline void* map_file(int fd, uint64_t size, int protection) {
    if (size < kHugePage) return mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
    const uint64_t room = size + kHugePage;
    void* reserved =
        mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return MAP_FAILED;
    const auto from = reinterpret_cast<uintptr_t>(reserved);
    const uintptr_t at = (from + kHugePage - 1) / kHugePage * kHugePage;
    void* mapped =
        mmap(reinterpret_cast<void*>(at), size, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED) {
        munmap(reserved, room);
        return MAP_FAILED;
    }
    // The kernel maps whole pages: what lies beyond the last one is given back.
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t end = at + (size + page - 1) / page * page;
    if (at != from) munmap(reserved, at - from);
    if (end < from + room) munmap(reinterpret_cast<void*>(end), from + room - end);
    return mapped;
}

}  // namespace kvtier
