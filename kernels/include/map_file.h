// Maps a file so that the kernel can map whole huge pages.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace kvtier {

inline constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Maps the first `size` bytes of a file, shared, at a multiple of the huge page size: elsewhere the
// kernel must map a huge page in small pieces. On failure MAP_FAILED, and errno.
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
    // The kernel maps whole pages. Unmaps the rest of the reservation.
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t end = at + (size + page - 1) / page * page;
    if (at != from) munmap(reserved, at - from);
    if (end < from + room) munmap(reinterpret_cast<void*>(end), from + room - end);
    return mapped;
}

}  // namespace kvtier
