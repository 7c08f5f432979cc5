// LFU, ARC and S3-FIFO. None knows its size: it is as large as what is in memory now.
#include "classics.h"

#include <algorithm>

namespace kvtier {

// ---- LFU ----

Queues::Queue Lfu::count(Block& block, unsigned times) {
    block.times = std::min(times, most_times);
    ++uses_;
    return block.times;
}

void Lfu::left_it(const Block& block) {
    const std::size_t all = 8 * std::max<std::size_t>(in_memory(), 8192);
    ghosts_.add(block.name, block.times);
    ghosts_.trim(all);
    if (uses_ < 4 * all) return;
    uses_ = 0;
    ghosts_.halve();
    for (Queue queue = 2; queue <= most_times; ++queue)
        while (!is_end(coldest(queue))) {
            const Id id = coldest(queue);
            take(id);
            this->block(id).queue = this->block(id).times = queue / 2;
            push(id, true);
        }
}

std::vector<Id> Lfu::victims(std::size_t n) const {
    std::vector<Id> named;
    for (Queue queue = demoted_queue; queue <= most_times; ++queue) append(named, queue, n);
    return named;
}

// ---- ARC ----

Queues::Queue Arc::met(Block& block) {
    const auto had_once = static_cast<double>(once_.size()),
               had_often = static_cast<double>(often_.size());
    Queue queue = once;
    if (once_.take(block.name) != 0) {
        room_ = std::min(room_ + std::max(1.0, had_often / had_once),
                         static_cast<double>(in_memory() + 1));
        queue = often;
    } else if (often_.take(block.name) != 0) {
        room_ = std::max(room_ - std::max(1.0, had_once / had_often), 0.0);
        queue = often;
    }
    return queue;
}

void Arc::left_it(const Block& block) {
    (block.queue == once ? once_ : often_).add(block.name);
    const std::size_t all = in_memory() + 1;
    once_.trim(all);
    often_.trim(all);
}

std::vector<Id> Arc::victims(std::size_t n) const {
    std::vector<Id> named;
    append(named, demoted_queue, n);
    Id first = coldest(once), second = coldest(often);
    std::size_t left = length(once);
    while (named.size() < n && !(is_end(first) && is_end(second))) {
        const bool from_once =
            !is_end(first) && (static_cast<double>(left) > room_ || is_end(second));
        Id& id = from_once ? first : second;
        named.push_back(id);
        id = next(id);
        left -= from_once;
    }
    return named;
}

// ---- S3-FIFO ----

Queues::Queue S3Fifo::met(Block& block) { return ghosts_.take(block.name) != 0 ? main : small; }

Queues::Queue S3Fifo::used(Block& block) {
    block.times = std::min<unsigned>(block.times + 1, most_times);
    return block.queue;
}

// Those that it went before pay for having been passed over.
void S3Fifo::leaving(Id id) {
    const Block& one = block(id);
    if (one.held || one.demoted) return;
    const Queue queue = one.queue;
    for (Id passed = coldest(queue); passed != id;) {
        Block& other = block(passed);
        if (queue == small ? other.times < 2 : other.times < 1) return;
        const Id after = next(passed);
        take(passed);
        other.queue = main;
        other.times = queue == small ? 0 : other.times - 1;
        push(passed, true);
        passed = after;
    }
}

void S3Fifo::left_it(const Block& block) {
    if (block.queue == small) ghosts_.add(block.name);
    ghosts_.trim(in_memory());
}

// As it would go one by one: those passed over change queues, or start again at the end of theirs.
std::vector<Id> S3Fifo::victims(std::size_t n) const {
    n = std::min(n, size());
    std::vector<Id> named;
    append(named, demoted_queue, n);
    std::size_t in_small = length(small), in_main = length(main);
    Id first = coldest(small), second = coldest(main);
    std::deque<std::pair<Id, unsigned>> again;
    while (named.size() < n) {
        if (in_small != 0 && (in_small * 10 >= in_small + in_main || in_main == 0)) {
            if (block(first).times >= 2) {
                again.emplace_back(first, 0);
                ++in_main;
            } else {
                named.push_back(first);
            }
            first = next(first);
            --in_small;
            continue;
        }
        Id id = second;
        unsigned times;
        if (is_end(id)) {
            std::tie(id, times) = again.front();
            again.pop_front();
        } else {
            times = block(id).times;
            second = next(id);
        }
        if (times > 0) {
            again.emplace_back(id, times - 1);
        } else {
            named.push_back(id);
            --in_main;
        }
    }
    return named;
}

}  // namespace kvtier
