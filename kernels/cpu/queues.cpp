// Blocks in queues. Batches are walked from their ends: the head of a chain is the most recent.
#include "queues.h"

#include <algorithm>

namespace kvtier {

void Ghosts::add(Name name, unsigned times) {
    turns_[name] = {++turn_, times};
    order_.emplace_back(name, turn_);
}

unsigned Ghosts::take(Name name) {
    auto found = turns_.find(name);
    if (found == turns_.end()) return 0;
    const unsigned times = found->second.second;
    turns_.erase(found);
    return times;
}

void Ghosts::halve() {
    for (auto one = turns_.begin(); one != turns_.end();)
        one = (one->second.second /= 2) == 0 ? turns_.erase(one) : std::next(one);
}

void Ghosts::trim(std::size_t most) {
    while (!order_.empty()) {
        const auto [name, turn] = order_.front();
        auto found = turns_.find(name);
        const bool living = found != turns_.end() && found->second.first == turn;
        if (living && turns_.size() <= most) return;
        if (living) turns_.erase(found);
        order_.pop_front();
    }
}

Queues::Queues(Queue queues) : ends_(queues), lengths_(queues) {
    for (Queue queue = 0; queue < queues; ++queue)
        ends_[queue].prev = ends_[queue].next = ends_from + queue;
}

void Queues::push(Id id, bool hot) {
    Block& one = blocks_[id];
    const Queue queue = one.demoted ? demoted_queue : one.queue;
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
    --lengths_[one.demoted ? demoted_queue : one.queue];
}

// To the hot end, unless its place in the same queue says when it came.
void Queues::move(Id id, Queue to) {
    Block& one = blocks_[id];
    if (one.queue == to && !one.demoted && !by_recency()) return;
    if (!one.held) take(id);
    one.queue = to;
    one.demoted = 0;
    if (!one.held) push(id, true);
}

void Queues::added(std::span<const Id> ids, std::span<const Name> names, std::span<const Id>) {
    check_ids(ids);
    for (std::size_t i = ids.size(); i-- > 0;) {
        blocks_.reach(ids[i]);
        Block& one = blocks_[ids[i]];
        if (one.here) {
            move(ids[i], used(one));
            continue;
        }
        one = Block{};
        one.here = 1;
        one.name = names[i];
        one.queue = met(one);
        push(ids[i], true);
        ++size_;
        ++in_memory_;
    }
}

void Queues::wanted(std::span<const Id> ids, std::span<const Name>) {
    for (std::size_t i = ids.size(); i-- > 0;)
        if (here(ids[i])) move(ids[i], used(blocks_[ids[i]]));
}

void Queues::refreshed(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;)
        if (here(ids[i])) move(ids[i], blocks_[ids[i]].queue);
}

void Queues::held(std::span<const Id> ids) {
    for (Id id : ids) {
        if (!here(id) || blocks_[id].held) continue;
        take(id);
        blocks_[id].held = 1;
        --size_;
    }
}

void Queues::freed(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        if (!here(ids[i]) || !blocks_[ids[i]].held) continue;
        blocks_[ids[i]].held = 0;
        push(ids[i], true);
        ++size_;
    }
}

void Queues::leave(std::span<const Id> ids) {
    for (Id id : ids) {
        if (!here(id)) continue;
        Block& one = blocks_[id];
        leaving(id);
        if (!one.held) {
            take(id);
            --size_;
        }
        one.here = 0;
        --in_memory_;
        left_it(one);
    }
}

void Queues::demoted(std::span<const Id> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        if (!here(ids[i]) || blocks_[ids[i]].held) continue;
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
