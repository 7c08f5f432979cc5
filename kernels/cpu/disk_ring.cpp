// The io_uring of one thread: two rings in memory shared with the kernel, and three system calls.
#include "disk_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#ifndef SYS_io_uring_setup  // the same numbers on every architecture
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

namespace kvtier {
namespace {

constexpr uint32_t kSetupClamp = 1u << 4;
constexpr uint32_t kSetupDisabled = 1u << 6;        // Linux 5.10
constexpr uint32_t kSetupSingleIssuer = 1u << 12;   // Linux 6.0
constexpr uint32_t kSetupDeferredWork = 1u << 13;   // Linux 6.1
constexpr uint32_t kFeatureOneMapping = 1u << 0;    // Linux 5.4
constexpr uint32_t kFeatureNothingLost = 1u << 1;   // Linux 5.5
constexpr uint32_t kFeatureReadAndWrite = 1u << 3;  // Linux 5.6, like kRead and kWrite
constexpr uint32_t kFeaturePolls = 1u << 5;         // Linux 5.7
constexpr uint32_t kFeatures =
    kFeatureOneMapping | kFeatureNothingLost | kFeatureReadAndWrite | kFeaturePolls;
constexpr uint32_t kEnterGetEvents = 1u << 0;
constexpr uint32_t kRegisterEnable = 12;
constexpr uint32_t kRegisterBuffers = 15;  // Linux 5.13; sparse since 5.19
constexpr uint32_t kRegisterBuffersUpdate = 16;
constexpr uint32_t kRegisterSparse = 1u << 0;
constexpr off_t kOffsetOfRings = 0;
constexpr off_t kOffsetOfEntries = 0x10000000;

struct Parameters {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
    uint32_t reserved[3];
    struct {
        uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
        uint64_t address;
    } sq;
    struct {
        uint32_t head, tail, mask, entries, overflow, entries_at, flags, reserved;
        uint64_t address;
    } cq;
};
static_assert(sizeof(Parameters) == 120);

struct Register {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};
static_assert(sizeof(Register) == 32);

struct Update {
    uint32_t offset, reserved;
    uint64_t data, tags;
    uint32_t count, reserved_too;
};
static_assert(sizeof(Update) == 32);

int register_with_ring(int fd, uint32_t what, const void* with, uint32_t size) {
    return syscall(SYS_io_uring_register, fd, what, with, size) < 0 ? errno : 0;
}

}  // namespace

Ring::Ring(uint32_t entries) {
    // A single issuer, whose completions are processed when it asks for them: they do not interrupt
    // its hashing.
    constexpr uint32_t kBest =
        kSetupClamp | kSetupDisabled | kSetupSingleIssuer | kSetupDeferredWork;
    Parameters given{};
    for (const uint32_t flags : {kBest, kSetupClamp}) {
        given = {};
        given.flags = flags;
        fd_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &given));
        disabled_ = (flags & kSetupDisabled) != 0;
        if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0) {
        const int number = errno;
        refused(number, number == EPERM
                            ? "io_uring_setup (kernel.io_uring_disabled, or a seccomp filter)"
                            : "io_uring_setup");
        return;
    }
    if ((given.features & kFeatures) != kFeatures) {
        refused(ENOSYS, "io_uring: needs Linux 5.7");
        return;
    }
    rings_bytes_ = std::max<size_t>(given.sq.array + given.sq_entries * sizeof(uint32_t),
                                    given.cq.entries_at + given.cq_entries * sizeof(Completion));
    void* rings = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                       fd_, kOffsetOfRings);
    if (rings == MAP_FAILED) {
        refused(errno, "io_uring: cannot map its rings");
        return;
    }
    rings_ = static_cast<uint8_t*>(rings);
    entries_bytes_ = given.sq_entries * sizeof(RingEntry);
    void* slots = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                       fd_, kOffsetOfEntries);
    if (slots == MAP_FAILED) {
        refused(errno, "io_uring: cannot map its entries");
        return;
    }
    entries_ = static_cast<RingEntry*>(slots);
    const auto word = [&](uint32_t at) { return reinterpret_cast<uint32_t*>(rings_ + at); };
    sq_head_ = word(given.sq.head);
    sq_tail_ = word(given.sq.tail);
    sq_mask_ = *word(given.sq.mask);
    sq_array_ = word(given.sq.array);
    cq_head_ = word(given.cq.head);
    cq_tail_ = word(given.cq.tail);
    cq_mask_ = *word(given.cq.mask);
    cq_ = reinterpret_cast<const Completion*>(rings_ + given.cq.entries_at);
    for (uint32_t i = 0; i <= sq_mask_; i++) sq_array_[i] = i;
}

Ring::~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
}

bool Ring::refused(int number, const char* what) {
    error_ = number;
    why_ = std::string(what) + ": " + std::strerror(number);
    return false;
}

void Ring::begin(bool has_table) {
    if (disabled_) register_with_ring(fd_, kRegisterEnable, nullptr, 0);
    if (!has_table) return;
    const Register table = {kBuffers, kRegisterSparse, 0, 0, 0};
    has_table_ = register_with_ring(fd_, kRegisterBuffers, &table, sizeof(table)) == 0;
}

int Ring::register_buffer(uint16_t index, const void* data, uint64_t size) {
    if (!has_table_ || index >= kBuffers) return ENOTSUP;
    const iovec range = {const_cast<void*>(data), size};
    const Update update = {index, 0, reinterpret_cast<uintptr_t>(&range), 0, 1, 0};
    return register_with_ring(fd_, kRegisterBuffersUpdate, &update, sizeof(update));
}

RingEntry& Ring::add() {
    RingEntry& entry = entries_[tail_++ & sq_mask_];
    entry = {};
    return entry;
}

int Ring::enter(bool wait) {
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
    const long done = syscall(SYS_io_uring_enter, fd_, added(), wait ? 1u : 0u, kEnterGetEvents,
                              nullptr, size_t{0});
    return done < 0 ? errno : 0;
}

}  // namespace kvtier
