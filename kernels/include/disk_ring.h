// One io_uring for one thread, through the kernel's own interface. Its constants, which never
// change, are copied: installed C libraries are often older than the kernel.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvtier {

enum class RingOp : uint8_t {
    kWritev = 2,
    kFsync = 3,
    kReadFixed = 4,
    kWriteFixed = 5,
    kRead = 22,
    kWrite = 23,
};

// A request to the kernel.
struct RingEntry {
    uint8_t opcode;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t file_offset;
    uint64_t address;
    uint32_t length;
    uint32_t call_flags;
    uint64_t user_data;
    uint16_t buffer;  // index in the table of registered buffers
    uint16_t personality;
    int32_t unused;
    uint64_t padding[2];
};
static_assert(sizeof(RingEntry) == 64);

inline constexpr uint32_t kFdatasync = 1;  // call_flags of kFsync

class Ring {
 public:
    // Limits of the buffers that can be registered: their number; each has at most kBufferMost
    // bytes.
    static constexpr uint32_t kBuffers = 8192;

    // The entries needed for `depth` operations: an operation may take two, and one more is for the
    // read that wakes the worker.
    static uint32_t entries_for(size_t depth) { return static_cast<uint32_t>(2 * depth + 1); }

    // Creates a ring of `entries`. If the kernel refuses, `error` is the errno and `why` names what
    // it refused.
    explicit Ring(uint32_t entries);
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring();

    int error() const { return error_; }
    const std::string& why() const { return why_; }

    // The functions below are for one thread; `begin` comes first, with a table of buffers if any.
    void begin(bool has_table = true);

    // Registers a range as buffer `index`; returns the errno, or 0.
    int register_buffer(uint16_t index, const void* data, uint64_t size);

    // Returns an entry to fill in; the next `enter` submits it. One is always free, because the
    // caller never has more operations in progress than the ring has entries.
    RingEntry& add();

    // Submits the added entries, and waits for one completion if `wait`. Returns an errno, or 0.
    int enter(bool wait);

    // How many added entries the kernel has not taken.
    uint32_t added() const { return tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }

    // Calls take(user_data, result) for each available completion, and returns their number.
    template <typename Take>
    size_t completions(const Take& take) {
        uint32_t head = *cq_head_;
        const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
        const size_t count = tail - head;
        while (head != tail) {
            const Completion found = cq_[head & cq_mask_];
            __atomic_store_n(cq_head_, ++head, __ATOMIC_RELEASE);
            take(found.user_data, found.result);
        }
        return count;
    }

 private:
    struct Completion {
        uint64_t user_data;
        int32_t result;
        uint32_t flags;
    };

    bool refused(int number, const char* what);

    int fd_ = -1;
    int error_ = 0;
    bool disabled_ = false;  // until begin()
    bool has_table_ = false;
    std::string why_;
    uint8_t* rings_ = nullptr;
    size_t rings_bytes_ = 0;
    RingEntry* entries_ = nullptr;
    size_t entries_bytes_ = 0;
    uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr;
    uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0, tail_ = 0;
    const Completion* cq_ = nullptr;
};

}  // namespace kvtier
