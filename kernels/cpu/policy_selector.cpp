// Compares orders by requests, because the blocks of a request hit or miss together.
#include "policy_selector.h"

#include <algorithm>

namespace kvtier {
namespace {

constexpr std::size_t slack = 16;       // the margin of room, one in this many blocks
constexpr std::size_t room_least = 64;  // blocks
constexpr std::size_t some = 4;         // batches: a single request can fill the whole room

constexpr unsigned pair(unsigned a, unsigned b) { return a + b - 1; }

}  // namespace

PolicySelector::PolicySelector(Rank rank, const Constants& constants)
    : rank_(std::move(rank)), constants_(constants), index_(slots) {
    static_assert(orders == 3, "each pair of orders has a sum of its own");
    entries_.reserve(most_entries);
}

void PolicySelector::start_batch(std::uint32_t name, std::size_t held) {
    end_batch();
    batch_.last = name;
    while (held >> shift_ > most_room) thin();
    room_ = std::max<std::size_t>(held >> shift_, 1);
}

void PolicySelector::add_entry(std::size_t slot, std::uint32_t name) {
    entries_.push_back({name, 0, 0, 0, 0, 0});
    index_[slot] = static_cast<std::uint16_t>(entries_.size());
}

// Corrects the kind of a block that was reported before.
void PolicySelector::corrected(std::uint32_t name, unsigned kind) {
    if (Entry* entry = entry_of(name)) entry->kind = static_cast<std::uint16_t>(kind);
}

PolicySelector::Entry* PolicySelector::entry_of(std::uint32_t name) {
    const std::uint16_t at = index_[find(name)];
    return at != 0 ? &entries_[at - 1] : nullptr;
}

void PolicySelector::index() {
    std::ranges::fill(index_, 0);
    head_at_ = none_at;
    for (std::size_t i = 0; i < entries_.size(); ++i)
        index_[find(entries_[i].name)] = static_cast<std::uint16_t>(i + 1);
}

void PolicySelector::thin() {
    ++shift_;
    std::erase_if(entries_, [&](const Entry& entry) { return !samples(entry.name); });
    inside_.fill(0);
    for (const Entry& entry : entries_)
        for (unsigned order = 0; order < orders; ++order) inside_[order] += entry.in >> order & 1;
    index();
}

// Evicts after the whole request: blocks that are used together hit together, even if they exceed
// the room.
void PolicySelector::trim_all() {
    for (unsigned order = 0; order < orders; ++order)
        if (inside_[order] > room_ + room_ / slack) trim(order, room_ - room_ / slack);
}

void PolicySelector::trim(unsigned order, std::size_t room) {
    std::vector<std::pair<std::uint64_t, std::size_t>> inside;  // rank and turn, and which
    inside.reserve(inside_[order]);
    for (std::size_t i = 0; i < entries_.size(); ++i)
        if (entries_[i].in >> order & 1) inside.emplace_back(entries_[i].turn, i);
    std::ranges::sort(inside);
    // The block behind was used before.
    std::vector<std::uint32_t> least(entries_.size());
    for (auto& [by, i] : inside) {
        const std::uint32_t rank = std::max(least[i], rank_(order, entries_[i]));
        by |= std::uint64_t{rank} << 32;
        if (const std::uint16_t at = index_[find(entries_[i].before)]; at != 0)
            least[at - 1] = std::max(least[at - 1], rank);
    }
    const auto kept = inside.begin() + static_cast<std::ptrdiff_t>(inside.size() - room);
    std::ranges::nth_element(inside, kept);
    for (auto one = inside.begin(); one != kept; ++one)
        entries_[one->second].in &= static_cast<std::uint8_t>(~(1U << order));
    inside_[order] = room;
    if (std::erase_if(entries_, [](const Entry& entry) { return entry.in == 0; }) != 0) index();
}

void PolicySelector::end_batch() {
    for (unsigned a = 0; a < orders; ++a) {
        hits_[a] += request_hits_[a] + request_hits_of_all_;
        for (unsigned b = a + 1; b < orders; ++b) {
            const double more = static_cast<double>(request_hits_[a]) - request_hits_[b];
            variance_[pair(a, b)] += more * more;
        }
    }
    request_hits_.fill(0);
    request_hits_of_all_ = 0;
    if (++unjudged_batches_ >= some && static_cast<double>(unjudged_) * constants_.judgements >=
                                           static_cast<double>(std::max(room_, room_least)))
        judge();
    if (followed_ != 0) link_to_followed();
    trim_all();
    batches_[batches_at_++ % batches_.size()] = batch_;
    batch_ = {};
    head_ = followed_ = 0;
    head_at_ = none_at;
}

// Blocks above are as recent as those that follow them, and are evicted later.
void PolicySelector::link_to_followed() {
    const auto found = std::ranges::find(batches_, followed_, &Batch::last);
    if (found == batches_.end()) return;
    if (Entry* head = entry_of(head_)) head->before = found->tail;
    std::uint32_t name = found->tail;
    for (std::size_t left = found->length; left > 0 && name != 0; --left) {
        Entry* above = entry_of(name);
        if (above == nullptr) break;
        above->turn = turn_++;
        name = above->before;
    }
    if (batch_.tail == 0) batch_.tail = found->tail;
    batch_.length += found->length;
    found->last = 0;
}

// Judges only requests in which two orders differ, and only complete requests.
void PolicySelector::judge() {
    unjudged_ = unjudged_batches_ = 0;
    unsigned top = best_;
    double most = 0;
    for (unsigned order = 0; order < orders; ++order) {
        const double more = hits_[order] - hits_[best_];
        if (more <= 0) continue;
        const double needed = order == 0 ? constants_.back : constants_.to_leave;
        const double times = more * more / (variance_[pair(order, best_)] + 1e-9);
        if (times <= needed * needed || times <= most) continue;
        most = times;
        top = order;
    }
    best_ = top;
    for (double& one : hits_) one *= constants_.fading;
    for (double& one : variance_) one *= constants_.fading;
}

std::size_t PolicySelector::memory_bytes() const {
    return entries_.capacity() * sizeof(Entry) + index_.size() * sizeof(std::uint16_t);
}

}  // namespace kvtier
