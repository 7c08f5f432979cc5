// LFU, ARC and S3-FIFO. None knows its size: it is as large as what is in memory now.
#include "classics.h"

#include <algorithm>
#include <deque>
#include <tuple>

namespace kvtier {

namespace {

constexpr unsigned times_bits = 8;
constexpr std::size_t few = 1U << 16, few_uses = 8192, uses_of_each = 32;

// As many ghosts as blocks, and of large tiers half as many: they cost as much as blocks.
std::size_t half_of_many(std::size_t blocks) { return std::max(std::min(blocks, few), blocks / 2); }

}  // namespace

// ---- LFU ----

Queues::Queue Lfu::count(unsigned times) {
    ++uses_;
    return std::min(times, most_times);
}

Queues::Queue Lfu::met(Block& block) {
    const std::uint32_t note = ghosts_.take(block.name).value_or(0);
    const std::uint32_t since = ((folds() << times_bits) + most_times - note) >> times_bits;
    return count(1 + ((note & most_times) >> std::min(since, times_bits)));
}

void Lfu::left_it(const Block& block) {
    ghosts_.add(block.name, folds() << times_bits | queue_of(block));
    ghosts_.trim(std::max(few, in_memory() / 2));
    if (uses_ < uses_of_each * std::max(in_memory(), few_uses)) return;
    uses_ = 0;
    fold();
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
    if (once_.take(block.name)) {
        room_ = std::min(room_ + std::max(1.0, had_often / had_once),
                         static_cast<double>(in_memory() + 1));
        queue = often;
    } else if (often_.take(block.name)) {
        room_ = std::max(room_ - std::max(1.0, had_once / had_often), 0.0);
        queue = often;
    }
    return queue;
}

void Arc::left_it(const Block& block) {
    (block.queue == once ? once_ : often_).add(block.name);
    const std::size_t all = half_of_many(in_memory() + 1);
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

Queues::Queue S3Fifo::met(Block& block) { return ghosts_.take(block.name) ? main : small; }

Queues::Queue S3Fifo::used(Block& block) {
    block.times = std::min<unsigned>(block.times + 1, most_times) & most_times;
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
