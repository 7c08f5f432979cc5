// Blocks in queues. Batches are traversed from their end: the head of a chain is the most recent.
#include "queues.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvtier {

constexpr std::size_t a_bucket = 4;

// ---- ghosts ----

Ghosts::Ghosts() {
    nodes_.reach(0);
    buckets_.reach(0);
}

// The number of buckets is any integer; the first bit of a name is always 1 and not used.
std::uint32_t& Ghosts::bucket_of(std::uint32_t name) {
    const std::size_t hash = name >> 1, all = std::bit_ceil(split_);
    const std::size_t at = hash & (all - 1);
    return buckets_[at < split_ ? at : at - all / 2];
}

// Splits the bucket that is next in order.
void Ghosts::grow() {
    const std::size_t from = split_ - std::bit_floor(split_);
    buckets_.reach(split_);
    std::uint32_t node = buckets_[from];
    buckets_[from] = 0;
    ++split_;
    while (node != 0) {
        const std::uint32_t after = nodes_[node].after;
        std::uint32_t& bucket = bucket_of(nodes_[node].name);
        nodes_[node].after = bucket;
        bucket = node;
        node = after;
    }
}

void Ghosts::add(std::uint32_t name, std::uint32_t note) {
    take(name);
    if (size_ >= a_bucket * split_) grow();
    std::uint32_t node = spare_;
    if (node != 0) {
        spare_ = nodes_[node].after;
    } else {
        node = made_++;
        nodes_.reach(node);
    }
    const std::uint32_t newest = nodes_[0].older;
    std::uint32_t& bucket = bucket_of(name);
    nodes_[node] = {name, bucket, newest, 0};
    bucket = node;
    nodes_[newest].newer = nodes_[0].older = node;
    if (note != 0 || notes_.reaches(node)) {
        notes_.reach(node);
        notes_[node] = note;
    }
    ++size_;
}

void Ghosts::remove(std::uint32_t node) {
    std::uint32_t* at = &bucket_of(nodes_[node].name);
    while (*at != node) at = &nodes_[*at].after;
    const Node gone = nodes_[node];
    *at = gone.after;
    nodes_[gone.older].newer = gone.newer;
    nodes_[gone.newer].older = gone.older;
    nodes_[node].after = spare_;
    spare_ = node;
    --size_;
}

std::optional<std::uint32_t> Ghosts::take(std::uint32_t name) {
    std::uint32_t node = bucket_of(name);
    while (node != 0 && nodes_[node].name != name) node = nodes_[node].after;
    if (node == 0) return std::nullopt;
    remove(node);
    return notes_.reaches(node) ? notes_[node] : 0;
}

void Ghosts::trim(std::size_t most) {
    while (size_ > most) remove(nodes_[0].newer);
}

std::size_t Ghosts::memory_bytes() const {
    // Counts only the written part of the first chunks.
    auto of = [](const auto& items, std::size_t written) {
        const std::size_t bytes = items.memory_bytes();
        return bytes - std::min(bytes, chunk_bytes) + std::min(written, chunk_bytes);
    };
    return of(nodes_, made_ * sizeof(Node)) + of(buckets_, split_ * sizeof(std::uint32_t)) +
           of(notes_, notes_.reaches(1) ? made_ * sizeof(std::uint32_t) : 0);
}

// ---- queues ----

Queues::Queues(Queue queues) : ends_(queues), lengths_(queues) {
    for (Queue queue = 0; queue < queues; ++queue)
        ends_[queue].prev = ends_[queue].next = ends_from + queue;
}

void Queues::push(Id id, bool hot) {
    Block& one = blocks_[id];
    const Queue queue = one.demoted ? demoted_queue : queue_of(one);
    const Id end = ends_from + queue;
    one.next = hot ? end : ends_[queue].next;
    one.prev = at(one.next).prev;
    at(one.prev).next = at(one.next).prev = id;
    ++lengths_[queue];
}

void Queues::take(Id id) {
    const Block& one = blocks_[id];
    at(one.prev).next = one.next;
    at(one.next).prev = one.prev;
    --lengths_[one.demoted ? demoted_queue : queue_of(one)];
}

void Queues::fold() {
    ++folds_;
    for (Queue queue = 2; queue < ends_.size(); ++queue) {
        const Id end = ends_from + queue, to = ends_from + queue / 2;
        Block &from = ends_[queue], &into = ends_[queue / 2];
        if (from.next == end) continue;
        at(from.next).prev = into.prev;
        at(into.prev).next = from.next;
        at(from.prev).next = to;
        into.prev = from.prev;
        from.prev = from.next = end;
        lengths_[queue / 2] += std::exchange(lengths_[queue], 0);
    }
}

// Moves to the hot end, except within the same queue if the queue is ordered by arrival.
void Queues::move(Id id, Queue to) {
    Block& one = blocks_[id];
    if (queue_of(one) == to && !one.demoted && !by_recency()) return;
    if (!one.held) take(id);
    settle(one, to);
    one.demoted = 0;
    if (!one.held) push(id, true);
}

void Queues::added(std::span<const Id> ids, std::span<const Name> names, std::span<const Id>) {
    check_ids(ids);
    for (std::size_t i = ids.size(); i-- > 0;) {
        blocks_.reach(ids[i]);
        Block& one = blocks_[ids[i]];
        if (one.present) {
            move(ids[i], queue_for_used(one));
            continue;
        }
        one = Block{};
        one.present = 1;
        one.name = short_name(names[i]);
        settle(one, queue_for_new(one));
        push(ids[i], true);
        ++size_;
        ++in_memory_;
    }
}

void Queues::wanted(std::span<const Id> ids, std::span<const Name>) {
    for (std::size_t i = ids.size(); i-- > 0;)
        if (present(ids[i])) move(ids[i], queue_for_used(blocks_[ids[i]]));
}

void Queues::refreshed(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;)
        if (present(ids[i])) move(ids[i], queue_of(blocks_[ids[i]]));
}

void Queues::held(std::span<const Id> ids) {
    for (Id id : ids) {
        if (!present(id) || blocks_[id].held) continue;
        take(id);
        blocks_[id].held = 1;
        --size_;
    }
}

void Queues::freed(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        if (!present(ids[i]) || !blocks_[ids[i]].held) continue;
        blocks_[ids[i]].held = 0;
        push(ids[i], true);
        ++size_;
    }
}

void Queues::leave(std::span<const Id> ids) {
    for (Id id : ids) {
        if (!present(id)) continue;
        Block& one = blocks_[id];
        on_leaving(id);
        if (!one.held) {
            take(id);
            --size_;
        }
        one.present = 0;
        --in_memory_;
        on_left(one);
    }
}

void Queues::demoted(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        if (!present(ids[i]) || blocks_[ids[i]].held) continue;
        take(ids[i]);
        blocks_[ids[i]].demoted = 1;
        push(ids[i], false);
    }
}

void Queues::append(std::vector<Id>& named, Queue queue, std::size_t n) const {
    for (Id id = coldest(queue); !is_end(id) && named.size() < n; id = next(id))
        named.push_back(id);
}

}  // namespace kvtier
