// Blocks between files and the arena, moved by native threads: queued operations, operations in the
// kernel, and completions.
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

// An operation as Python packs it:
// +-------+-----+-------+--------+--------+--------+----------+--------+---------------------+
// | token | fd  | flags | file   | nbytes | extent | deadline | memory | read: digest, 16 B  |
// |       |     |       | offset |        |        | ms       | offset | write: header's     |
// | u64   | i32 | u32   | u64    | u64    | u32    | u32      | u64    | at, nbytes: u64 u64 |
// +-------+-----+-------+--------+--------+--------+----------+--------+---------------------+
struct PackedOperation {
    uint64_t token;
    int32_t fd;
    uint32_t flags;
    uint64_t file_offset;
    uint64_t nbytes;
    uint32_t extent;
    uint32_t deadline_ms;  // from now; 0 means no deadline
    uint64_t memory_offset;
    union {
        uint8_t digest[kDigestBytes];
        struct {
            uint64_t at, nbytes;
        } header;
    };
};
static_assert(sizeof(PackedOperation) == 64);

// A read of an encoded frame. The operation's bytes are those of the block, its file offset is that
// of the header, and its digest is that of the payload.
struct PackedFrame {
    PackedOperation operation;
    uint64_t payload_bytes;
    uint32_t header_bytes;
    uint16_t element;
    uint16_t lossy;  // the number of the recipe that the frame may have, from 1; 0 means none
    uint32_t keys;   // the number of the keys of an encrypted frame, from 1; 0 means none
    uint8_t identity[kIdentityBytes];  // of an encrypted frame
};
static_assert(sizeof(PackedFrame) == 152);

inline constexpr uint32_t kUrgent = 1;  // reads only
inline constexpr uint32_t kDigest = 2;  // the read must match its digest; a write returns it
// the header belongs to a frame, and its digests are not filled in yet
inline constexpr uint32_t kSeal = 4;

inline constexpr uint64_t whole_pages(uint64_t nbytes) {
    return (nbytes + kPage - 1) / kPage * kPage;
}

// Page-aligned private memory for direct I/O; zeroed.
class Pages {
 public:
    Pages() = default;
    explicit Pages(uint64_t nbytes);
    // The same with undefined content; data() is null if there is no memory.
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

// A pool of used pages, at most `most` bytes: new pages cost a fault each. Thread-safe.
class PagePool {
 public:
    explicit PagePool(uint64_t most) : most_(most) {}
    Pages take(uint64_t nbytes);
    void give(Pages pages);

 private:
    Pages remove_at(size_t at);  // the mutex is held

    const uint64_t most_;
    std::mutex mutex_;
    std::vector<Pages> free_;
    uint64_t bytes_ = 0;
};

enum class Kind : uint8_t { kRead, kReadBytes, kWrite, kSync };

// One operation, from its submission to its completion.
struct Operation {
    uint64_t token = 0;
    int fd = -1;
    Kind kind = Kind::kRead;
    bool urgent = false;
    bool with_digest = false;
    bool seal = false;
    bool may_pad = false;  // the memory behind the payload, up to the end of its page, is writable
    bool encoded = false;  // a read of a frame that is decoded into its slot
    bool staged = false;   // its buffer counts as staging memory until it was decoded
    codec::Element element = codec::Element{};
    std::shared_ptr<const codec::Recipe> lossy;  // the recipe that the frame may have, or null
    std::shared_ptr<const FrameKeys> keys;       // of an encrypted frame, or null
    FrameIdentity identity{};                    // of an encrypted frame
    uint32_t extent = 0;
    uint64_t file_offset = 0;    // as the kernel sees it: a multiple of the page size
    uint64_t total = 0;          // bytes for the kernel, in whole pages
    uint64_t needed = 0;         // for a read: the bytes that must exist in the file
    uint64_t nbytes = 0;         // bytes of the payload
    uint64_t skip = 0;           // bytes before the requested ones, in kReadBytes
    uint64_t header_bytes = 0;   // bytes before the payload, in whole pages
    uint64_t frame_header = 0;   // bytes of an encoded frame before its payload
    uint64_t block_bytes = 0;    // bytes that the frame decodes to
    uint8_t* block = nullptr;    // the slot of the block
    uint8_t* payload = nullptr;  // in an extent, or in `own`
    Pages own;  // the header of a write, the result of kReadBytes, or an encoded frame
    Digest digest{};
    Clock::time_point deadline = Clock::time_point::max();

    uint64_t sequence = 0;  // the order of submission
    uint64_t waiting = 0;   // writes that this sync still waits for
    int failed = 0;         // the errno of one of those

    // Only the worker uses these while the operation is in the kernel.
    uint64_t moved = 0;
    int retries = 0;
    int error = 0;
    iovec parts[2];
    int calls = 0;  // calls in progress, for a write in two calls or a read in pieces
    int64_t header_result = 0, call_result = 0;  // results of the calls of a write
    // A read in pieces has two calls in progress: the length of each, which of the two begins at
    // `moved`, and the result of each.
    struct Piece {
        uint64_t nbytes = 0;
        int64_t call_result = 0;
        bool has_ended = false;
    };
    bool in_pieces = false;
    uint64_t piece = 0;  // bytes of one piece
    uint64_t requested = 0;
    size_t front = 0;
    std::array<Piece, 2> pieces;

    std::list<Operation>::iterator self;  // the list that contains it

    // For an encoded frame, protected by the queue's mutex: how many bytes have arrived, whether
    // all of them have, whether they wait for a decoder, and whether a decoder works on them.
    uint64_t arrived = 0;
    bool is_read = false, waits_for_decoder = false, decoding = false;
    // Only the decoder uses these while it works on the frame.
    std::unique_ptr<FrameDecoder> decoder;
    int64_t decoding_ns = 0;
    size_t codec = 0;  // the codec that the frame names
    int damaged = 0;   // an errno

    // True for reads of blocks: these measure the speed of the disk.
    bool measured() const { return kind == Kind::kRead || (kind == Kind::kReadBytes && staged); }
    bool reads() const { return kind == Kind::kRead || kind == Kind::kReadBytes; }

    // Where the next call begins: a page that was moved in part is moved again.
    uint64_t from() const { return moved / kPage * kPage; }
    // Prepares the first call: seals the frame, or allocates memory for an encoded one. Sets an
    // error and returns false if that fails.
    bool begin(PagePool& pool);
    // The remaining bytes, in parts of at most `most` bytes together.
    int rest(uint64_t most);
    // The results of two calls, for the header and for the whole payload, combined into one.
    int64_t combined_result() const;
    // Records the result of a call, a negative errno or a number of bytes. True if it was the last.
    bool advance(int64_t result);
    // Checks or computes the digest.
    void finish();
    // The next piece to read, as an index into `pieces`, if a read is due.
    std::optional<size_t> next_piece();
    // Records the result of a piece. Returns true if the read has ended.
    bool advance_piece(size_t which, int64_t result);
    // Decodes an encoded frame as far as its first `until` bytes allow. True if that was the end.
    bool decode(uint64_t until);
};

struct Completion {
    uint64_t token;
    int error;
    Kind kind;
    bool with_digest;
    bool encoded;  // the digest is that of the decoded block
    Digest digest;
    Pages own;
    uint64_t skip, nbytes;
    uint64_t staged;  // counts as staging memory until `unstage`
};

// The state that all threads share. Workers take operations from here and return them. A thread
// that submits or queries holds the GIL; workers never need it.
class DiskQueue {
 public:
    // Owns the descriptor. `staged_most`: memory for encoded frames; one frame may exceed it.
    DiskQueue(int notify_fd, size_t depth, uint64_t staged_most);
    DiskQueue(const DiskQueue&) = delete;
    DiskQueue& operator=(const DiskQueue&) = delete;
    ~DiskQueue();

    struct Extent {
        uint8_t* data;
        uint64_t size;
        bool fixed;  // the kernel shall register it
    };
    uint32_t add_extent(Extent extent);
    // The kernel shall not keep the pages of this extent. It stays usable.
    void release_extent(uint32_t number);
    // The extents that were released, from the first-th on.
    std::vector<uint32_t> released_from(size_t first);
    // The extents from number `first` on.
    std::vector<Extent> extents_from(size_t first);

    // Queues all operations. After `stop` it queues none and returns false.
    bool submit(std::list<Operation>&& batch);
    std::vector<Completion> done();
    // Takes back the staging memory of a completion for reuse.
    void unstage(Pages pages, uint64_t nbytes);
    // Clears the record of a failed write to this descriptor. False while an operation uses it.
    bool forget(int fd);

    // Bytes of blocks that were read while the kernel had several reads at a time, and the time for
    // them; and what was decoded, by codec and element, with the sum of the times of all threads.
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
    PagePool& page_pool() { return page_pool_; }

    struct Lengths {
        size_t urgent, reads, writes, in_kernel, overdue;
    };
    Lengths lengths();

    // Completes queued operations with an error, waits until no thread has operations in the
    // kernel, and returns how many are still there.
    size_t stop(double timeout_s);

    // For ring workers: moves up to `most` operations to `into`. Later submissions write to
    // `wake_fd`. Returns false if the worker must end.
    bool take(std::vector<Operation*>& into, size_t most, bool has_some, int wake_fd);
    // For pool workers: waits for one operation. Returns null if the worker must end.
    Operation* wait_for_one();
    // More bytes of a read in pieces have arrived for a decoder.
    void more_arrived(Operation& operation);
    void complete(const std::vector<Operation*>& over);

    // Fails queued operations whose deadline has passed; the main function of a thread.
    void run_clock();
    // Decodes encoded frames that were read; the main function of a thread.
    void run_decoder();
    void thread_begins();
    void thread_ends();
    bool ended();

 private:
    using Operations = std::list<Operation>;
    struct File {
        size_t writes = 0;              // writes that have not completed
        std::vector<Operation*> syncs;  // syncs that have not completed, in order
        int failed = 0;                 // the errno that the next sync reports
    };

    // The mutex is held in all of these.
    Operations* next();
    Operations* earlier(Operations& reads, Operations& staged);
    Operation* begin();
    Operation* next_to_decode();
    void decoded(Operation& operation, uint64_t until, bool over);
    void end(Operations& list, Operations::iterator at, int error);
    void forget_sync(File& file, Operation& sync, bool reported);
    void end_overdue(Operations& list, Clock::time_point now);
    void wake(size_t count);
    void notify(bool was_empty);
    void add_read_time(Clock::time_point now);
    void read_begins();
    void read_ends(const Operation& operation);

    const int notify_fd_;
    const size_t depth_, spare_, writes_most_;
    std::mutex mutex_;
    std::condition_variable pool_, clock_, ended_, decoder_;
    Operations urgent_, reads_, writes_, syncs_,
        waiting_;                        // waiting_: syncs whose writes have not completed
    Operations urgent_staged_, staged_;  // reads that need staging memory
    Operations in_kernel_;
    Operations read_, decoding_;  // encoded frames that are completely in memory
    // frames that are partly in memory; their reads are still in the kernel
    std::vector<Operation*> partly_read_;
    PagePool page_pool_;
    const uint64_t staged_most_;
    Moved moved_;
    size_t reads_in_kernel_ = 0;
    uint64_t staged_bytes_ = 0;  // from the start of the read until the frame is decoded
    struct Window {
        Clock::time_point since{}, last{};
        uint64_t bytes = 0;
        int64_t each_ns = 0;  // the sum over all reads
    };
    Window window_;
    size_t writes_in_kernel_ = 0;
    size_t reads_in_a_row_ = 0;
    std::unordered_map<int, File> files_;
    uint64_t sequence_ = 0;
    std::vector<Completion> done_;
    std::vector<Extent> extents_;
    std::vector<uint32_t> released_;
    std::vector<int> sleeping_workers_;  // descriptors of ring workers that wait
    size_t pool_waiting_ = 0;
    size_t alive_ = 0;
    bool stopping_ = false;
    Clock::time_point alarm_ = Clock::time_point::max();
};

// A worker thread with its own ring.
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
    // Registers one piece of the extents, because registering delays everything else. Returns false
    // if no piece is left.
    bool register_one();
    void release(uint32_t extent);
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
    uint64_t wakes_ = 0;  // written by the kernel
    size_t in_progress_ = 0;
    struct Registered {
        const uint8_t* data;
        uint64_t size;
        std::vector<int> buffers;  // one per piece, -1 if the kernel refused it
    };
    std::vector<Registered> extents_;
    uint16_t buffers_ = 0;
    size_t released_ = 0;  // extents, in the order of the queue
    std::atomic<uint64_t> registered_ = 0;
};

// Runs one operation at a time; the main function of a thread.
void run_pool_worker(DiskQueue& queue);

}  // namespace kvtier
