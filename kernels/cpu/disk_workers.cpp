// The threads that submit operations to the kernel: one with a ring, or one for each operation.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "disk.h"

namespace kvtier {
namespace {

// The piece of an extent that is registered in one step; nothing else happens during a step.
constexpr uint64_t kPiece = uint64_t{256} << 20;
// The maximum for one call; the kernel's own limit is just below 2 GiB.
constexpr uint64_t kCallMost = uint64_t{1} << 30;
// Payloads from this size on are written separately from their headers: the kernel need not pin
// each page of a registered buffer.
constexpr uint64_t kApartLeast = uint64_t{256} << 10;
// A flag in the user data of an entry: the second of an operation's two calls. Operations are
// aligned to more.
constexpr uint64_t kSecond = 1;
constexpr std::chrono::milliseconds kPatience{1};

int new_eventfd() {
    const int fd = eventfd(0, EFD_CLOEXEC);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    return fd;
}

}  // namespace

RingWorker::RingWorker(std::shared_ptr<DiskQueue> queue, size_t depth)
    : queue_(std::move(queue)),
      depth_(depth),
      ring_(Ring::entries_for(depth)),
      wake_fd_(new_eventfd()) {}

RingWorker::~RingWorker() { close(wake_fd_); }

// Operations that use a buffer keep its pages until they end.
void RingWorker::release(uint32_t number) {
    if (number >= extents_.size()) return;  // it will not be registered
    Registered& extent = extents_[number];
    for (size_t piece = 0; piece < extent.buffers.size(); ++piece) {
        if (extent.buffers[piece] < 0) continue;
        ring_.register_buffer(static_cast<uint16_t>(extent.buffers[piece]), nullptr, 0);
        registered_.fetch_sub(std::min(kPiece, extent.size - piece * kPiece),
                              std::memory_order_relaxed);
    }
    extent.buffers.assign((extent.size + kPiece - 1) / kPiece, -1);
}

bool RingWorker::register_one() {
    for (const uint32_t number : queue_->released_from(released_)) {
        ++released_;
        release(number);
    }
    if (extents_.empty() || extents_.back().buffers.size() * kPiece >= extents_.back().size) {
        const auto more = queue_->extents_from(extents_.size());
        if (more.empty()) return false;
        const auto& next = more.front();
        extents_.push_back({next.data, next.size, {}});
        if (!next.fixed) extents_.back().buffers.assign((next.size + kPiece - 1) / kPiece, -1);
        return true;
    }
    Registered& extent = extents_.back();
    const uint64_t begin = extent.buffers.size() * kPiece;
    const uint64_t size = std::min(kPiece, extent.size - begin);
    const bool refused_before = !extent.buffers.empty() && extent.buffers.back() < 0;
    if (refused_before || ring_.register_buffer(buffers_, extent.data + begin, size) != 0) {
        extent.buffers.push_back(-1);
        return true;
    }
    extent.buffers.push_back(buffers_++);
    registered_.fetch_add(size, std::memory_order_relaxed);
    return true;
}

int RingWorker::buffer_of(const Operation& operation, const uint8_t* from, uint64_t nbytes) const {
    const bool elsewhere = operation.kind == Kind::kReadBytes || operation.encoded;
    if (elsewhere || operation.extent >= extents_.size()) return -1;
    const Registered& extent = extents_[operation.extent];
    const auto begin = static_cast<uint64_t>(from - extent.data);
    const uint64_t piece = begin / kPiece;
    if (piece >= extent.buffers.size() || (begin + nbytes - 1) / kPiece != piece) return -1;
    return extent.buffers[piece];
}

bool RingWorker::prepare_apart(Operation& operation) {
    const uint64_t header = operation.header_bytes, nbytes = operation.total - header;
    if (header == 0 || operation.from() != 0 || nbytes < kApartLeast || nbytes > kCallMost) {
        return false;
    }
    const int buffer = buffer_of(operation, operation.payload, nbytes);
    if (buffer < 0) return false;
    const auto add = [&](RingOp opcode, uint64_t at, const uint8_t* from, uint64_t size) -> auto& {
        RingEntry& entry = ring_.add();
        entry.opcode = static_cast<uint8_t>(opcode);
        entry.fd = operation.fd;
        entry.file_offset = operation.file_offset + at;
        entry.address = reinterpret_cast<uintptr_t>(from);
        entry.length = static_cast<uint32_t>(size);
        entry.user_data = reinterpret_cast<uintptr_t>(&operation);
        return entry;
    };
    add(RingOp::kWrite, 0, operation.own.data(), header).user_data |= kSecond;
    add(RingOp::kWriteFixed, header, operation.payload, nbytes).buffer =
        static_cast<uint16_t>(buffer);
    operation.calls = 2;
    return true;
}

void RingWorker::prepare_pieces(Operation& operation) {
    while (const auto which = operation.next_piece()) {
        const uint64_t nbytes = operation.pieces[*which].nbytes;
        RingEntry& entry = ring_.add();
        entry.opcode = static_cast<uint8_t>(RingOp::kRead);
        entry.fd = operation.fd;
        entry.file_offset = operation.file_offset + operation.requested;
        entry.address = reinterpret_cast<uintptr_t>(operation.payload + operation.requested);
        entry.length = static_cast<uint32_t>(nbytes);
        entry.user_data = reinterpret_cast<uintptr_t>(&operation) | *which;
        operation.requested += nbytes;
        operation.calls++;
    }
}

void RingWorker::prepare(Operation& operation) {
    if (operation.in_pieces) return prepare_pieces(operation);
    if (prepare_apart(operation)) return;
    RingEntry& entry = ring_.add();
    const auto set = [&](RingOp opcode) { entry.opcode = static_cast<uint8_t>(opcode); };
    entry.fd = operation.fd;
    entry.user_data = reinterpret_cast<uintptr_t>(&operation);
    if (operation.kind == Kind::kSync) {
        set(RingOp::kFsync);
        entry.call_flags = kFdatasync;
        return;
    }
    const int parts = operation.rest(kCallMost);
    const iovec& first = operation.parts[0];
    entry.file_offset = operation.file_offset + operation.from();
    if (parts == 2) {
        set(RingOp::kWritev);
        entry.address = reinterpret_cast<uintptr_t>(operation.parts);
        entry.length = 2;
        return;
    }
    entry.address = reinterpret_cast<uintptr_t>(first.iov_base);
    entry.length = static_cast<uint32_t>(first.iov_len);
    const bool in_header = operation.from() < operation.header_bytes;
    const int buffer = in_header ? -1
                                 : buffer_of(operation, static_cast<const uint8_t*>(first.iov_base),
                                             first.iov_len);
    if (buffer >= 0) entry.buffer = static_cast<uint16_t>(buffer);
    if (operation.reads()) {
        set(buffer >= 0 ? RingOp::kReadFixed : RingOp::kRead);
    } else {
        set(buffer >= 0 ? RingOp::kWriteFixed : RingOp::kWrite);
    }
}

void RingWorker::listen() {
    RingEntry& entry = ring_.add();
    entry.opcode = static_cast<uint8_t>(RingOp::kRead);
    entry.fd = wake_fd_;
    entry.address = reinterpret_cast<uintptr_t>(&wakes_);
    entry.length = sizeof(wakes_);
}

void RingWorker::returned(uint64_t user_data, int32_t result, std::vector<Operation*>& over) {
    if (user_data == 0) {
        listen();
        return;
    }
    auto* const operation = reinterpret_cast<Operation*>(user_data & ~kSecond);
    const uint64_t second = user_data & kSecond;
    if (operation->in_pieces) {
        const uint64_t moved = operation->moved;
        if (operation->advance_piece(second, result)) {
            over.push_back(operation);
            return;
        }
        if (operation->moved != moved) queue_->more_arrived(*operation);
        prepare(*operation);
        return;
    }
    int64_t all = result;
    if (operation->calls != 0) {
        (second != 0 ? operation->header_result : operation->call_result) = result;
        if (--operation->calls != 0) return;
        all = operation->combined_result();
    }
    if (operation->advance(all)) {
        over.push_back(operation);
    } else {
        prepare(*operation);
    }
}

void RingWorker::run() {
    ring_.begin();
    listen();
    std::vector<Operation*> taken, over;
    bool registering = true;
    while (true) {
        taken.clear();
        if (!queue_->take(taken, depth_ - in_progress_, in_progress_ != 0, wake_fd_)) return;
        in_progress_ += taken.size();
        for (Operation* operation : taken) {
            if (operation->begin(queue_->page_pool())) {
                prepare(*operation);
            } else {
                over.push_back(operation);
            }
        }
        const int error = ring_.enter(!registering);
        const size_t found = ring_.completions(
            [&](uint64_t user_data, int32_t result) { returned(user_data, result, over); });
        // The kernel lacks memory, or a signal arrived.
        if (error != 0 && error != EINTR && found == 0) std::this_thread::sleep_for(kPatience);
        for (Operation* operation : over) {
            if (!operation->encoded) operation->finish();  // decoders finish encoded ones
        }
        in_progress_ -= over.size();
        queue_->complete(over);
        over.clear();
        registering = register_one();
    }
}

void run_pool_worker(DiskQueue& queue) {
    while (Operation* const operation = queue.wait_for_one()) {
        if (!operation->begin(queue.page_pool())) {
            queue.complete({operation});
            continue;
        }
        int64_t result;
        do {
            if (operation->kind == Kind::kSync) {
                result = fdatasync(operation->fd);
            } else {
                if (operation->moved != 0 && operation->in_pieces) queue.more_arrived(*operation);
                const int parts =
                    operation->rest(operation->in_pieces ? operation->piece : kCallMost);
                const auto at = static_cast<off_t>(operation->file_offset + operation->from());
                result = operation->reads() ? preadv(operation->fd, operation->parts, parts, at)
                                            : pwritev(operation->fd, operation->parts, parts, at);
            }
        } while (!operation->advance(result < 0 ? -errno : result));
        if (!operation->encoded) operation->finish();
        queue.complete({operation});
    }
}

}  // namespace kvtier
