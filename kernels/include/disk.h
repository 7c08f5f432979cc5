// Blocks between files and the arena, moved by native threads: what is queued, what the kernel has,
// and what is over.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "codec/recipe.h"
#include "disk_ring.h"
#include "frame.h"
#include "page.h"
#include "xxh3.h"

namespace kvtier {

using Clock = std::chrono::steady_clock;
using Digest = std::array<uint8_t, kDigestBytes>;

// +-------+-----+-------+--------+--------+--------+----------+--------+----------------------------+
// | token | fd  | flags | file   | nbytes | extent | deadline | memory | read: digest, 16 bytes |
// |       |     |       | offset |        |        | ms       | offset | write: header's at, nbytes
// | | u64   | i32 | u32   | u64    | u64    | u32    | u32      | u64    | u64, u64 |
// +-------+-----+-------+--------+--------+--------+----------+--------+----------------------------+
struct PackedOperation {
    uint64_t token;
    int32_t fd;
    uint32_t flags;
    uint64_t file_offset;
    uint64_t nbytes;
    uint32_t extent;
    uint32_t deadline_ms;  // from now; 0 is none
    uint64_t memory_offset;
    union {
        uint8_t digest[kDigestBytes];
        struct {
            uint64_t at, nbytes;
        } header;
    };
};
static_assert(sizeof(PackedOperation) == 64);

// An encoded frame to be read: the operation's bytes are the block's, its file offset the header's,
// its digest the payload's.
struct PackedFrame {
    PackedOperation operation;
    uint64_t payload_bytes;
    uint32_t header_bytes;
    uint16_t element;
    uint16_t lossy;  // which of the recipes it may be of, from 1; 0 is none
};
static_assert(sizeof(PackedFrame) == 80);

inline constexpr uint32_t kUrgent = 1;  // reads only
inline constexpr uint32_t kDigest = 2;  // a read must match its digest, a write returns it
inline constexpr uint32_t kSeal = 4;    // the header is a frame's, and its digests are missing

inline constexpr uint64_t whole_pages(uint64_t nbytes) {
    return (nbytes + kPage - 1) / kPage * kPage;
}

// Whole pages of one's own, for direct I/O; zeroed.
class Pages {
 public:
    Pages() = default;
    explicit Pages(uint64_t nbytes);
    // The same with anything in it; without data where there is no memory.
    static Pages unset(uint64_t nbytes);
    uint8_t* data() const { return data_.get(); }
    uint64_t size() const { return size_; }

 private:
    struct Free {
        void operator()(uint8_t* data) const { std::free(data); }
    };
    std::unique_ptr<uint8_t, Free> data_;
    uint64_t size_ = 0;
};

// Pages that were used before, as new ones cost a fault each; so many bytes at most. For any
// thread.
class PagesAgain {
 public:
    explicit PagesAgain(uint64_t most) : most_(most) {}
    Pages take(uint64_t nbytes);
    void give(Pages pages);

 private:
    Pages out_of(size_t at);  // with the mutex held

    const uint64_t most_;
    std::mutex mutex_;
    std::vector<Pages> free_;
    uint64_t bytes_ = 0;
};

enum class Kind : uint8_t { kRead, kReadBytes, kWrite, kSync };

// One operation, from its submission until it is over.
struct Operation {
    uint64_t token = 0;
    int fd = -1;
    Kind kind = Kind::kRead;
    bool urgent = false;
    bool with_digest = false;
    bool seal = false;
    bool encoded = false;  // a read of a frame, to be decoded into its slot
    bool staged = false;   // what it reads takes memory of ours until it was decoded
    codec::Element element = codec::Element{};
    std::shared_ptr<const codec::Recipe> lossy;  // of which it may be, if of any
    uint32_t extent = 0;
    uint64_t file_offset = 0;    // as the kernel sees it: a multiple of a page
    uint64_t total = 0;          // bytes for the kernel, whole pages
    uint64_t needed = 0;         // of a read, those that there must be
    uint64_t nbytes = 0;         // of the payload
    uint64_t skip = 0;           // bytes before those wanted, in kReadBytes
    uint64_t header_bytes = 0;   // whole pages before the payload
    uint64_t frame_header = 0;   // bytes of an encoded frame before its payload
    uint64_t block_bytes = 0;    // that it decodes to
    uint8_t* block = nullptr;    // its slot
    uint8_t* payload = nullptr;  // in an extent, or in `own`
    Pages own;                   // a write's header, what kReadBytes reads, or an encoded frame
    Digest digest{};
    Clock::time_point deadline = Clock::time_point::max();

    uint64_t sequence = 0;  // in the order of submission
    uint64_t waiting = 0;   // writes that a sync still waits for
    int failed = 0;         // the errno of one of those

    // The worker's alone while the operation is in the kernel.
    uint64_t moved = 0;
    int retries = 0;
    int error = 0;
    iovec parts[2];
    int calls = 0;                      // under way, of a write in two or a read in pieces
    int64_t header_said = 0, said = 0;  // what those of a write returned
    // A read in pieces has two of them under way: what was asked for of them, which of the two
    // begins at `moved`, and what each returned.
    struct Piece {
        uint64_t nbytes = 0;
        int64_t said = 0;
        bool is_over = false;
    };
    bool in_pieces = false;
    uint64_t piece = 0;  // bytes of each
    uint64_t asked = 0;
    size_t front = 0;
    std::array<Piece, 2> pieces;

    std::list<Operation>::iterator self;  // in the list that has it

    // Of an encoded frame, with the queue's mutex: how much has come, whether all has, and whether
    // what has come waits for a decoder, or is with one.
    uint64_t come = 0;
    bool is_read = false, waits = false, decoding = false;
    // The decoder's alone while it is with one.
    std::unique_ptr<FrameDecoder> decoder;
    int64_t decoding_ns = 0;
    size_t codec = 0;  // that the frame says
    int damaged = 0;   // an errno

    // Of a block, as those say what the disk gives.
    bool measured() const { return kind == Kind::kRead || (kind == Kind::kReadBytes && staged); }
    bool reads() const { return kind == Kind::kRead || kind == Kind::kReadBytes; }

    // Where the next call begins: what was moved of a part of a page is moved again.
    uint64_t from() const { return moved / kPage * kPage; }
    // Before the first call: seals the frame, or finds room for an encoded one. False, with an
    // error, where that can't be done.
    bool begin(PagesAgain& again);
    // What is left to move, in parts of at most `most` bytes together.
    int rest(uint64_t most);
    // What two calls, for the header and for all of the payload, come to as one.
    int64_t both() const;
    // Takes in what a call returned, a negative errno or bytes, and says whether that was the last.
    bool advance(int64_t result);
    // Checks or makes the digest.
    void finish();
    // The next of a read's pieces, if it is to be asked for: which of the two.
    std::optional<size_t> next_piece();
    // Takes in what one returned, and says whether the read is over.
    bool advance_piece(size_t which, int64_t result);
    // Decodes an encoded frame as far as so many bytes of it go, and says whether that was the end.
    bool decode(uint64_t until);
};

struct Completion {
    uint64_t token;
    int error;
    Kind kind;
    bool with_digest;
    Digest digest;
    Pages own;
    uint64_t skip, nbytes;
    uint64_t staged;  // bytes that count until `unstage`
};

// What all threads share. Workers take operations from here and bring them back; whoever submits or
// asks holds Python's lock, which no worker ever needs.
class DiskQueue {
 public:
    // Owns the descriptor; `staged_most` is of memory for encoded frames, beside one that is
    // larger.
    DiskQueue(int notify_fd, size_t depth, size_t decoders, uint64_t staged_most);
    DiskQueue(const DiskQueue&) = delete;
    DiskQueue& operator=(const DiskQueue&) = delete;
    ~DiskQueue();

    struct Extent {
        uint8_t* data;
        uint64_t size;
        bool fixed;  // to be registered with the kernel
    };
    uint32_t add_extent(Extent extent);
    // Those from `first` on.
    std::vector<Extent> extents_from(size_t first);

    // Queues all, or none once stopped: then false.
    bool submit(std::list<Operation>&& batch);
    std::vector<Completion> done();
    // Memory of a completion that was staged, to be used again.
    void unstage(Pages pages, uint64_t nbytes);
    // Forgets that a write to this descriptor failed. False while something of it is under way.
    bool forget(int fd);

    // What was read of blocks while the kernel had several at a time, and in how much time; what
    // was decoded, by codec and element, in how much time of all threads together.
    struct Decoded {
        uint64_t block_bytes = 0;
        int64_t nanoseconds = 0;
    };
    static constexpr size_t kCodecs = 10;
    struct Moved {
        uint64_t read_bytes = 0;
        int64_t reading_ns = 0;
        std::array<std::array<Decoded, codec::kElements>, kCodecs> decoded;
    };
    Moved moved();
    PagesAgain& again() { return again_; }

    struct Lengths {
        size_t urgent, reads, writes, in_kernel, overdue;
    };
    Lengths lengths();

    // Ends what is queued; waits until no thread has anything in the kernel, and returns how many
    // operations are still there.
    size_t stop(double timeout_s);

    // For ring workers: moves up to `most` operations into the kernel's part. What is submitted
    // from now on writes to `wake_fd`. False where the worker is to end.
    bool take(std::vector<Operation*>& into, size_t most, bool has_some, int wake_fd);
    // For pool workers: waits for one. Null where the worker is to end.
    Operation* wait_for_one();
    // Of a read in pieces: there is more for a decoder.
    void came(Operation& operation);
    void complete(const std::vector<Operation*>& over);

    // Ends what is past its deadline in the queue; a thread's whole life.
    void run_clock();
    // Decodes what was read of encoded frames; a thread's whole life.
    void run_decoder();
    void thread_begins();
    void thread_ends();
    bool ended();

 private:
    using Operations = std::list<Operation>;
    struct File {
        size_t writes = 0;              // not over yet
        std::vector<Operation*> syncs;  // not over yet, in their order
        int failed = 0;                 // an errno for the next sync
    };

    // All with the mutex held.
    Operations* next();
    Operations* earlier(Operations& reads, Operations& staged);
    Operation* begin();
    Operation* to_decode();
    void decoded(Operation& operation, uint64_t until, bool over);
    void end(Operations& list, Operations::iterator at, int error);
    void forget_sync(File& file, Operation& sync, bool reported);
    void end_overdue(Operations& list, Clock::time_point now);
    void wake(size_t count);
    void notify(bool was_empty);
    void reads_go_on(Clock::time_point now);
    void read_begins();
    void read_ends(const Operation& operation);

    const int notify_fd_;
    const size_t depth_, spare_, writes_most_;
    std::mutex mutex_;
    std::condition_variable pool_, clock_, ended_, decoder_;
    Operations urgent_, reads_, writes_, syncs_,
        waiting_;                        // waiting_: syncs whose writes are not over
    Operations urgent_staged_, staged_;  // reads that take memory of ours
    Operations in_kernel_;
    Operations read_, decoding_;     // encoded frames that are in memory
    std::vector<Operation*> begun_;  // and those that are partly, in the kernel's part still
    const size_t decoders_;
    PagesAgain again_;
    const uint64_t staged_most_;
    Moved moved_;
    size_t reads_in_kernel_ = 0;
    uint64_t staged_bytes_ = 0;  // from the kernel until they are decoded
    struct Window {
        Clock::time_point since{}, last{};
        uint64_t bytes = 0;
        int64_t each_ns = 0;  // of all reads, added up
    };
    Window window_;
    size_t writes_in_kernel_ = 0;
    size_t reads_in_a_row_ = 0;
    std::unordered_map<int, File> files_;
    uint64_t sequence_ = 0;
    std::vector<Completion> done_;
    std::vector<Extent> extents_;
    std::vector<int> asleep_;  // ring workers' descriptors
    size_t pool_waiting_ = 0;
    size_t alive_ = 0;
    bool stopping_ = false;
    Clock::time_point alarm_ = Clock::time_point::max();
};

// A thread with a ring of its own.
class RingWorker {
 public:
    RingWorker(std::shared_ptr<DiskQueue> queue, size_t depth);
    RingWorker(const RingWorker&) = delete;
    RingWorker& operator=(const RingWorker&) = delete;
    ~RingWorker();

    const Ring& ring() const { return ring_; }
    void run();
    uint64_t registered_bytes() const { return registered_.load(std::memory_order_relaxed); }

 private:
    // One piece of the extents at a time, as it keeps everything else waiting. False where all is
    // done.
    bool register_one();
    int buffer_of(const Operation& operation, const uint8_t* from, uint64_t nbytes) const;
    void prepare(Operation& operation);
    bool prepare_apart(Operation& operation);
    void prepare_pieces(Operation& operation);
    void returned(uint64_t user_data, int32_t result, std::vector<Operation*>& over);
    void listen();

    std::shared_ptr<DiskQueue> queue_;
    const size_t depth_;
    Ring ring_;
    const int wake_fd_;
    uint64_t wakes_ = 0;  // the kernel writes it
    size_t under_way_ = 0;
    struct Registered {
        const uint8_t* data;
        uint64_t size;
        std::vector<int> buffers;  // of each piece, -1 where the kernel refused it
    };
    std::vector<Registered> extents_;
    uint16_t buffers_ = 0;
    std::atomic<uint64_t> registered_ = 0;
};

// A thread that does one operation at a time.
void run_pool_worker(DiskQueue& queue);

}  // namespace kvtier
