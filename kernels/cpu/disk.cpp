// What all disk threads share: queues by urgency, syncs after their writes, deadlines, completions.
#include "disk.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

#include "frame.h"

namespace kvtier {
namespace {

// After this many consecutive EAGAIN or EINTR, they count as an error.
constexpr int kRetriesMost = 100;
constexpr uint64_t kLargePage = uint64_t{2} << 20, kHeaderMost = uint64_t{64} << 10;
// Non-urgent reads that may start while a write waits.
constexpr size_t kReadsInARow = 16;
// The granularity of deadlines in the queue, so that one check covers many deadlines.
constexpr std::chrono::milliseconds kClockStep{1};

// The pieces of an encoded frame: one is decoded while the next is read.
constexpr uint64_t kPieceLeast = uint64_t{256} << 10, kPieceMost = uint64_t{1} << 20;

// The shortest period over which the speed of reads is measured.
constexpr std::chrono::milliseconds kWindow{100};

int64_t since(Clock::time_point then) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - then).count();
}

}  // namespace

Pages::Pages(uint64_t nbytes) {
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kPage, whole_pages(nbytes))));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = whole_pages(nbytes);
    std::memset(data_.get(), 0, size_);
}

Pages Pages::unset(uint64_t nbytes) {
    // The kernel pins a large page as quickly as a small one, but clears all of it at the first
    // use: the header of a frame of one large page takes no second one.
    const uint64_t page = nbytes < kLargePage / 2 ? kPage : kLargePage;
    const uint64_t end = nbytes % page <= kHeaderMost ? std::min(page, kHeaderMost) : page;
    const uint64_t size = (nbytes + end - 1) / end * end;
    Pages pages;
    void* made = nullptr;  // std::aligned_alloc takes only multiples of the alignment
    if (posix_memalign(&made, page, size) != 0) return pages;
    pages.data_.reset(static_cast<uint8_t*>(made));
    if (page == kLargePage) madvise(pages.data_.get(), size, MADV_HUGEPAGE);
    pages.size_ = size;
    return pages;
}

Pages PagePool::take(uint64_t nbytes) {
    Pages taken;
    std::vector<Pages> dropped;  // unmapped after the mutex is released
    {
        const std::lock_guard lock(mutex_);
        // Selects the smallest sufficient buffer, if it does not waste much.
        size_t best = free_.size();
        for (size_t i = 0; i < free_.size(); i++) {
            const uint64_t size = free_[i].size();
            if (size < nbytes || size / 2 > std::max(nbytes, kLargePage)) continue;
            if (best == free_.size() || size < free_[best].size()) best = i;
        }
        if (best != free_.size()) {
            taken = remove_at(best);
        } else {
            // Drops buffers of other sizes to make room for the new one.
            while (!free_.empty() && nbytes + bytes_ > most_) dropped.push_back(remove_at(0));
        }
    }
    return taken.data() != nullptr ? std::move(taken) : Pages::unset(nbytes);
}

Pages PagePool::remove_at(size_t at) {
    std::swap(free_[at], free_.back());
    Pages pages = std::move(free_.back());
    free_.pop_back();
    bytes_ -= pages.size();
    return pages;
}

void PagePool::give(Pages pages) {
    if (pages.data() == nullptr) return;
    const std::lock_guard lock(mutex_);
    if (pages.size() > most_ - bytes_) return;
    bytes_ += pages.size();
    free_.push_back(std::move(pages));
}

bool Operation::begin(PagePool& pool) {
    if (encoded || kind == Kind::kReadBytes) {
        own = staged ? pool.take(total) : Pages::unset(total);
        payload = own.data();
        if (payload == nullptr) error = ENOMEM;
        piece = std::clamp(whole_pages(total / 4), kPieceLeast, kPieceMost);
        in_pieces = encoded && total > piece;
        return error == 0;
    }
    if (!seal) return true;
    // Whole pages are written. The rest of the last page may have bytes of an earlier block.
    if (may_pad) std::memset(payload + nbytes, 0, whole_pages(nbytes) - nbytes);
    if (!seal_frame(own.data(), header_bytes, payload, nbytes, digest.data())) error = EINVAL;
    return error == 0;
}

int Operation::rest(uint64_t most) {
    int count = 0;
    uint64_t at = from(), left = most;
    if (at < header_bytes) {
        const uint64_t size = std::min(header_bytes - at, left);
        parts[count++] = {own.data() + at, size};
        at += size, left -= size;
    }
    const uint64_t size = std::min(total - at, left);
    if (size != 0) parts[count++] = {payload + (at - header_bytes), size};
    return count;
}

int64_t Operation::combined_result() const {
    if (header_result < 0 || call_result < 0) return std::min(header_result, call_result);
    const bool whole = static_cast<uint64_t>(header_result) == header_bytes;
    return whole ? header_result + call_result : header_result;
}

bool Operation::advance(int64_t result) {
    if (result == -EINTR || result == -EAGAIN) {
        if (++retries < kRetriesMost) return false;
    }
    if (result < 0) {
        error = static_cast<int>(-result);
        return true;
    }
    if (kind == Kind::kSync) return true;
    const uint64_t reached = from() + static_cast<uint64_t>(result);
    if (reached <= moved) {  // end of file
        error = reads() ? ENODATA : EIO;
        return true;
    }
    moved = reached;
    retries = 0;
    return moved >= (reads() ? needed : total);
}

std::optional<size_t> Operation::next_piece() {
    const size_t which = pieces[front].nbytes == 0 ? front : 1 - front;
    if (requested >= total || pieces[which].nbytes != 0) return std::nullopt;
    pieces[which].nbytes = std::min(piece, total - requested);
    return which;
}

bool Operation::advance_piece(size_t which, int64_t result) {
    pieces[which].call_result = result;
    pieces[which].has_ended = true;
    calls--;
    while (pieces[front].has_ended &&
           pieces[front].call_result == static_cast<int64_t>(pieces[front].nbytes)) {
        moved += pieces[front].nbytes;
        pieces[front] = {};
        front = 1 - front;
    }
    if (moved >= total) return true;
    if (!pieces[front].has_ended) return false;
    // A short read or an error: when no call is in progress, reads the rest in one piece.
    requested = total;
    if (calls != 0) return false;
    in_pieces = false;
    return advance(pieces[front].call_result);
}

bool Operation::decode(uint64_t until) {
    const auto began = Clock::now();
    try {
        if (decoder == nullptr) {
            decoder = std::make_unique<FrameDecoder>(lossy.get(), element, payload, frame_header,
                                                     payload + frame_header, nbytes, digest.data(),
                                                     block, block_bytes, keys.get(), &identity);
        }
        if (!decoder->take(std::min(until, needed) - frame_header))
            damaged = decoder->error();
        else if (until >= needed)
            digest = decoder->block_digest();
    } catch (const std::bad_alloc&) {
        damaged = ENOMEM;
    }
    decoding_ns += since(began);
    codec = frame_codec(payload);
    return damaged != 0 || until >= needed;
}

void Operation::finish() {
    if (error != 0) return;
    if (!with_digest || seal) return;
    Digest found;
    xxh3_128(payload, nbytes, 0, found.data());
    if (kind == Kind::kWrite) {
        digest = found;
    } else if (found != digest) {
        error = EBADMSG;
    }
}

DiskQueue::DiskQueue(int notify_fd, size_t depth, uint64_t staged_most)
    : notify_fd_(notify_fd),
      depth_(depth),
      spare_(depth < 2 ? 0 : std::max<size_t>(1, depth / 8)),
      writes_most_(std::max<size_t>(1, depth / 2)),
      page_pool_(staged_most),
      staged_most_(staged_most) {
    partly_read_.reserve(depth);  // enough for all operations in the kernel
}

DiskQueue::~DiskQueue() { close(notify_fd_); }

uint32_t DiskQueue::add_extent(Extent extent) {
    const std::lock_guard lock(mutex_);
    extents_.push_back(extent);
    wake(sleeping_workers_.size());
    return static_cast<uint32_t>(extents_.size() - 1);
}

std::vector<DiskQueue::Extent> DiskQueue::extents_from(size_t first) {
    const std::lock_guard lock(mutex_);
    if (first >= extents_.size()) return {};
    return {extents_.begin() + static_cast<ptrdiff_t>(first), extents_.end()};
}

void DiskQueue::release_extent(uint32_t number) {
    const std::lock_guard lock(mutex_);
    extents_.at(number).fixed = false;
    released_.push_back(number);
    wake(sleeping_workers_.size());
}

std::vector<uint32_t> DiskQueue::released_from(size_t first) {
    const std::lock_guard lock(mutex_);
    if (first >= released_.size()) return {};
    return {released_.begin() + static_cast<ptrdiff_t>(first), released_.end()};
}

bool DiskQueue::submit(Operations&& batch) {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    const size_t count = batch.size();
    Clock::time_point first = Clock::time_point::max();
    while (!batch.empty()) {
        const auto at = batch.begin();
        at->self = at;
        first = std::min(first, at->deadline);
        at->sequence = ++sequence_;
        if (at->reads()) {
            Operations& list = at->staged ? (at->urgent ? urgent_staged_ : staged_)
                                          : (at->urgent ? urgent_ : reads_);
            list.splice(list.end(), batch, at);
            continue;
        }
        File& file = files_[at->fd];
        if (at->kind == Kind::kWrite) {
            file.writes++;
            writes_.splice(writes_.end(), batch, at);
            continue;
        }
        at->waiting = file.writes;
        at->failed = std::exchange(file.failed, 0);
        file.syncs.push_back(&*at);
        Operations& list = at->waiting == 0 ? syncs_ : waiting_;
        list.splice(list.end(), batch, at);
    }
    wake(count);
    if (first < alarm_) {
        alarm_ = first;
        clock_.notify_one();
    }
    return true;
}

std::vector<Completion> DiskQueue::done() {
    const std::lock_guard lock(mutex_);
    return std::exchange(done_, {});
}

void DiskQueue::unstage(Pages pages, uint64_t nbytes) {
    page_pool_.give(std::move(pages));
    const std::lock_guard lock(mutex_);
    staged_bytes_ -= nbytes;
    if (next() != nullptr) wake(1);
}

bool DiskQueue::forget(int fd) {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(fd);
    if (found == files_.end()) return true;
    if (found->second.writes != 0 || !found->second.syncs.empty()) return false;
    files_.erase(found);
    return true;
}

DiskQueue::Lengths DiskQueue::lengths() {
    const std::lock_guard lock(mutex_);
    Lengths all = {urgent_.size() + urgent_staged_.size(), reads_.size() + staged_.size(),
                   writes_.size() + syncs_.size() + waiting_.size(),
                   in_kernel_.size() + read_.size() + decoding_.size(), 0};
    const auto now = Clock::now();
    for (const Operation& operation : in_kernel_) all.overdue += operation.deadline <= now;
    return all;
}

size_t DiskQueue::stop(double timeout_s) {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    const bool was_empty = done_.empty();
    for (Operations* list :
         {&urgent_, &urgent_staged_, &reads_, &staged_, &writes_, &syncs_, &waiting_}) {
        while (!list->empty()) end(*list, list->begin(), ECANCELED);
    }
    notify(was_empty);
    wake(sleeping_workers_.size());
    pool_.notify_all();
    clock_.notify_all();
    decoder_.notify_all();
    ended_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return alive_ == 0; });
    return in_kernel_.size() + read_.size() + decoding_.size();
}

bool DiskQueue::ended() {
    const std::lock_guard lock(mutex_);
    return alive_ == 0;
}

void DiskQueue::thread_begins() {
    const std::lock_guard lock(mutex_);
    alive_++;
}

void DiskQueue::thread_ends() {
    const std::lock_guard lock(mutex_);
    alive_--;
    ended_.notify_all();
}

// Urgent reads may use the whole depth; a part of it is reserved for them. Otherwise reads come
// first, but one write follows after kReadsInARow reads, because it also occupies memory.
DiskQueue::Operations* DiskQueue::next() {
    if (in_kernel_.size() >= depth_) return nullptr;
    if (Operations* const urgent = earlier(urgent_, urgent_staged_)) return urgent;
    if (in_kernel_.size() >= depth_ - spare_) return nullptr;
    Operations* writes = !syncs_.empty() ? &syncs_ : !writes_.empty() ? &writes_ : nullptr;
    if (writes_in_kernel_ >= writes_most_) writes = nullptr;
    Operations* const reads = earlier(reads_, staged_);
    if (reads != nullptr && (writes == nullptr || reads_in_a_row_ < kReadsInARow)) return reads;
    return writes;
}

// Starts no read into staging memory while `depth` frames wait for a decoder, or while the staging
// limit is reached. Other reads continue.
DiskQueue::Operations* DiskQueue::earlier(Operations& reads, Operations& staged) {
    const bool may = read_.size() < depth_ && staged_bytes_ < staged_most_;
    if (staged.empty() || !may) return reads.empty() ? nullptr : &reads;
    if (reads.empty() || staged.front().sequence < reads.front().sequence) return &staged;
    return &reads;
}

Operation* DiskQueue::begin() {
    while (Operations* list = next()) {
        const auto at = list->begin();
        if (at->deadline != Clock::time_point::max() && at->deadline <= Clock::now()) {
            const bool was_empty = done_.empty();
            end(*list, at, ETIMEDOUT);
            notify(was_empty);
            continue;
        }
        in_kernel_.splice(in_kernel_.end(), *list, at);
        if (at->staged) staged_bytes_ += at->total;
        if (at->measured()) read_begins();
        if (!at->reads()) writes_in_kernel_++;
        const bool passed_over = at->reads() && !(writes_.empty() && syncs_.empty());
        if (!at->urgent) reads_in_a_row_ = passed_over ? reads_in_a_row_ + 1 : 0;
        return &*at;
    }
    return nullptr;
}

void DiskQueue::end(Operations& list, Operations::iterator at, int error) {
    if (!at->reads()) {
        const auto found = files_.find(at->fd);
        File& file = found->second;
        if (at->kind == Kind::kSync) {
            // A sync that was never started reports nothing; the next one reports the error.
            const bool reported = &list == &in_kernel_;
            if (reported && at->failed != 0) error = at->failed;
            forget_sync(file, *at, reported);
        } else {
            file.writes--;
            bool was_reported = error == 0;
            for (Operation* sync : file.syncs) {
                if (sync->sequence < at->sequence) continue;
                if (!was_reported) {
                    if (sync->failed == 0) sync->failed = error;
                    was_reported = true;
                }
                if (--sync->waiting == 0) syncs_.splice(syncs_.end(), waiting_, sync->self);
            }
            if (!was_reported && file.failed == 0) file.failed = error;
        }
        if (file.writes == 0 && file.syncs.empty() && file.failed == 0) files_.erase(found);
    }
    Completion& over = done_.emplace_back();
    if (at->staged && (&list == &in_kernel_ || &list == &decoding_)) {
        if (at->kind == Kind::kReadBytes && error == 0) {
            over.staged = at->total;
        } else {
            staged_bytes_ -= at->total;
        }
    }
    over.token = at->token;
    over.error = error;
    over.kind = at->kind;
    over.with_digest = at->with_digest;
    over.encoded = at->encoded;
    over.digest = at->digest;
    over.skip = at->skip;
    over.nbytes = at->nbytes;
    if (at->kind == Kind::kReadBytes) over.own = std::move(at->own);
    list.erase(at);
}

void DiskQueue::forget_sync(File& file, Operation& sync, bool reported) {
    const auto at = std::find(file.syncs.begin(), file.syncs.end(), &sync);
    if (!reported && sync.failed != 0) {
        int& later = std::next(at) == file.syncs.end() ? file.failed : (*std::next(at))->failed;
        later = sync.failed;
    }
    file.syncs.erase(at);
}

void DiskQueue::more_arrived(Operation& operation) {
    const std::lock_guard lock(mutex_);
    operation.arrived = operation.from();  // the part beyond is read again
    if (operation.waits_for_decoder || operation.decoding || operation.damaged != 0) return;
    if (operation.arrived <= operation.frame_header) return;
    operation.waits_for_decoder = true;
    partly_read_.push_back(&operation);
    decoder_.notify_one();
}

void DiskQueue::complete(const std::vector<Operation*>& over) {
    if (over.empty()) return;
    const std::lock_guard lock(mutex_);
    const bool was_empty = done_.empty();
    for (Operation* operation : over) {
        if (operation->measured()) read_ends(*operation);
        if (!operation->reads()) writes_in_kernel_--;
        if (operation->encoded) {
            if (std::exchange(operation->waits_for_decoder, false))
                std::erase(partly_read_, operation);
            operation->is_read = true;
            operation->arrived = operation->moved;
            if (operation->decoding) {  // that decoder completes it
                decoding_.splice(decoding_.end(), in_kernel_, operation->self);
                continue;
            }
            if (operation->error == 0) operation->error = operation->damaged;
            if (operation->error == 0) {
                read_.splice(read_.end(), in_kernel_, operation->self);
                decoder_.notify_one();
                continue;
            }
        }
        end(in_kernel_, operation->self, operation->error);
    }
    if (stopping_ && in_kernel_.empty()) decoder_.notify_all();
    notify(was_empty);
}

void DiskQueue::add_read_time(Clock::time_point now) {
    const std::chrono::nanoseconds elapsed = now - window_.last;
    window_.each_ns += static_cast<int64_t>(reads_in_kernel_) * elapsed.count();
    window_.last = now;
}

void DiskQueue::read_begins() {
    const auto now = Clock::now();
    if (reads_in_kernel_ == 0) window_ = {now, now};
    add_read_time(now);
    reads_in_kernel_++;
}

// Ignores periods with few concurrent reads (frames wait for decoders): the disk would seem slow.
void DiskQueue::read_ends(const Operation& operation) {
    const auto now = Clock::now();
    add_read_time(now);
    if (operation.error == 0) window_.bytes += operation.total;
    if (--reads_in_kernel_ != 0 && now - window_.since < kWindow) return;
    const std::chrono::nanoseconds took = now - window_.since;
    const auto quarters = static_cast<int64_t>(std::min<size_t>(10, 3 * depth_));  // 2.5 at a time
    if (4 * window_.each_ns >= quarters * took.count()) {
        moved_.read_bytes += window_.bytes;
        moved_.reading_ns += took.count();
    }
    window_ = {now, now};
}

DiskQueue::Moved DiskQueue::moved() {
    const std::lock_guard lock(mutex_);
    return moved_;
}

// Complete frames come before frames that are still being read.
Operation* DiskQueue::next_to_decode() {
    if (!read_.empty()) {
        const auto urgent = std::find_if(read_.begin(), read_.end(),
                                         [](const Operation& one) { return one.urgent; });
        const auto at = urgent != read_.end() ? urgent : read_.begin();
        decoding_.splice(decoding_.end(), read_, at);
        return &*at;
    }
    if (partly_read_.empty()) return nullptr;
    const auto urgent = std::find_if(partly_read_.begin(), partly_read_.end(),
                                     [](const Operation* one) { return one->urgent; });
    const auto at = urgent != partly_read_.end() ? urgent : partly_read_.begin();
    Operation* const one = *at;
    partly_read_.erase(at);
    one->waits_for_decoder = false;
    return one;
}

void DiskQueue::decoded(Operation& one, uint64_t until, bool over) {
    one.decoding = false;
    if (!one.is_read) {
        if (over || one.arrived == until) return;
        one.waits_for_decoder = true;
        partly_read_.push_back(&one);
        return;
    }
    if (one.error == 0 && !over) {
        read_.splice(read_.begin(), decoding_, one.self);
        return;
    }
    if (one.error == 0) one.error = one.damaged;
    if (one.error == 0 && one.codec < kCodecs) {
        Decoded& sum = moved_.decoded[one.codec][static_cast<size_t>(one.element)];
        sum.block_bytes += one.block_bytes;
        sum.nanoseconds += one.decoding_ns;
    }
    const bool was_empty = done_.empty();
    end(decoding_, one.self, one.error);
    notify(was_empty);
}

void DiskQueue::run_decoder() {
    std::unique_lock lock(mutex_);
    while (true) {
        Operation* const one = next_to_decode();
        if (one == nullptr) {
            if (stopping_ && in_kernel_.empty()) return;
            decoder_.wait(lock);
            continue;
        }
        one->decoding = true;
        const uint64_t until = one->arrived;
        if (next() != nullptr) wake(1);
        lock.unlock();
        const bool over = one->decode(until);
        // It has arrived completely.
        if (over && one->damaged == 0) page_pool_.give(std::move(one->own));
        lock.lock();
        decoded(*one, until, over);
        if (next() != nullptr) wake(1);
    }
}

// The owner reads the descriptor before it calls done(): one write is enough until then.
void DiskQueue::notify(bool was_empty) {
    if (!was_empty || done_.empty()) return;
    const uint64_t one = 1;
    // A full counter wakes the reader as well.
    [[maybe_unused]] const ssize_t written = write(notify_fd_, &one, sizeof(one));
}

void DiskQueue::wake(size_t count) {
    for (; count != 0 && !sleeping_workers_.empty(); count--) {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(sleeping_workers_.back(), &one, sizeof(one));
        sleeping_workers_.pop_back();
    }
    for (size_t i = 0; i < std::min(count, pool_waiting_); i++) pool_.notify_one();
}

bool DiskQueue::take(std::vector<Operation*>& into, size_t most, bool has_some, int wake_fd) {
    const std::lock_guard lock(mutex_);
    std::erase(sleeping_workers_, wake_fd);
    while (into.size() < most) {
        Operation* const operation = begin();
        if (operation == nullptr) break;
        into.push_back(operation);
    }
    if (next() != nullptr) wake(1);  // there is more work than for this thread
    if (into.size() < most) sleeping_workers_.push_back(wake_fd);
    return !stopping_ || has_some || !into.empty();
}

Operation* DiskQueue::wait_for_one() {
    std::unique_lock lock(mutex_);
    while (true) {
        if (Operation* const operation = begin()) {
            if (next() != nullptr) wake(1);
            return operation;
        }
        if (stopping_) return nullptr;
        pool_waiting_++;
        pool_.wait(lock);
        pool_waiting_--;
    }
}

void DiskQueue::end_overdue(Operations& list, Clock::time_point now) {
    for (auto at = list.begin(); at != list.end();) {
        const auto here = at++;
        if (here->deadline <= now) {
            end(list, here, ETIMEDOUT);
        } else {
            alarm_ = std::min(alarm_, here->deadline);
        }
    }
}

void DiskQueue::run_clock() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        const auto alarm = alarm_;
        if (alarm == Clock::time_point::max()) {
            clock_.wait(lock);
            continue;
        }
        const auto now = Clock::now();
        if (now < alarm) {
            clock_.wait_until(lock, alarm);
            continue;
        }
        alarm_ = Clock::time_point::max();
        const bool was_empty = done_.empty();
        // Writes first: their end may make a sync ready, or the sync may be overdue itself.
        for (Operations* list :
             {&urgent_, &urgent_staged_, &reads_, &staged_, &writes_, &waiting_, &syncs_}) {
            end_overdue(*list, now);
        }
        notify(was_empty);
        if (next() != nullptr) wake(1);
        if (alarm_ != Clock::time_point::max()) alarm_ = std::max(alarm_, now + kClockStep);
    }
}

}  // namespace kvtier
