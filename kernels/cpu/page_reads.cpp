// Reads of pages through a ring of the calling thread.
#include "page_reads.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>

#include "disk_ring.h"

namespace kvtier {
namespace {

constexpr std::chrono::milliseconds kPatience{1};
// How long to look for the ends of reads without sleeping: to be woken takes a good part of the
// time of a short read.
constexpr std::chrono::microseconds kLook{200};

// A forked child has the memory of its parent's ring, but its requests would be its parent's.
struct KeptRing {
    std::unique_ptr<Ring> ring;
    pid_t owner = 0;

    Ring* get() {
        if (const pid_t here = getpid(); owner != here) {
            owner = here;
            ring = std::make_unique<Ring>(static_cast<uint32_t>(kAtOnce));
            if (ring->error() == 0) ring->begin(false);
        }
        return ring != nullptr && ring->error() == 0 ? ring.get() : nullptr;
    }
};
thread_local KeptRing kept;

}  // namespace

bool read_pages(int fd, uint64_t at, size_t bytes, uint8_t* into) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t count = pread(fd, into + done, bytes - done, static_cast<off_t>(at + done));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return false;
        done += static_cast<size_t>(count);
    }
    return true;
}

void read_at_once(std::span<PageRead> reads) {
    Ring* const ring = reads.size() > 1 && reads.size() <= kAtOnce ? kept.get() : nullptr;
    size_t left = ring != nullptr ? reads.size() : 0;
    for (size_t i = 0; i < left; i++) {
        RingEntry& entry = ring->add();
        entry.opcode = static_cast<uint8_t>(RingOp::kRead);
        entry.fd = reads[i].fd;
        entry.file_offset = reads[i].at;
        entry.address = reinterpret_cast<uintptr_t>(reads[i].into);
        entry.length = static_cast<uint32_t>(reads[i].bytes);
        entry.user_data = i;
    }
    const auto until = std::chrono::steady_clock::now() + kLook;
    while (left != 0) {
        const int error = ring->enter(std::chrono::steady_clock::now() >= until);
        const size_t found = ring->completions([&](uint64_t i, int32_t result) {
            reads[i].good = result == static_cast<int64_t>(reads[i].bytes);
        });
        left -= found;
        if (error == 0 || error == EINTR || found != 0) continue;
        if (ring->added() == reads.size()) {  // refused, and nothing is in progress
            kept.ring.reset();
            break;
        }
        std::this_thread::sleep_for(kPatience);
    }
    for (PageRead& one : reads) {  // also the rest of a short read
        if (!one.good) one.good = read_pages(one.fd, one.at, one.bytes, one.into);
    }
}

}  // namespace kvtier
