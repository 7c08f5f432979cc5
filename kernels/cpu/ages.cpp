// Divides time into epochs and merges old ones, so that their number is limited.
#include "ages.h"

#include <algorithm>

namespace kvtier {

Ages::Ages(unsigned kinds) : Chains(1 + kinds * epochs), kinds_(kinds) {
    for (unsigned slot = epochs; slot-- > 0;) spare_slots_.push_back(slot);
    open_epoch();
}

// One tick per quarter of a second.
void Ages::now(double seconds) {
    const std::uint64_t before = quarters_;
    Policy::now(seconds);
    quarters_ = static_cast<std::uint64_t>(now_ * 4);
    if (quarters_ == before) return;
    ticks_ += quarters_ - before;
    open_epoch();
}

// Also one tick per reported 64th of the blocks in memory, because the clock may be too coarse.
void Ages::on_batch(std::size_t blocks) {
    constexpr std::size_t part = 64, least = 16;
    reported_ += blocks;
    if (reported_ < std::max(in_memory() / part, least)) return;
    ++ticks_;
    open_epoch();
}

// Merges two adjacent epochs if their common length is small compared with their age.
void Ages::open_epoch() {
    constexpr std::uint64_t narrow = 5;
    reported_ = 0;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < epochs_.size(); ++i) {
        const std::uint64_t end = i + 1 < epochs_.size() ? epochs_[i + 1].start : ticks_;
        const bool crowded = i == 1 && spare_slots_.empty();
        if (kept > 0 && (crowded || narrow * (end - epochs_[kept - 1].start) <= ticks_ - end)) {
            const Epoch older = epochs_[kept - 1];
            for (unsigned kind = 0; kind < kinds_; ++kind)
                splice(1 + older.slot * kinds_ + kind, 1 + epochs_[i].slot * kinds_ + kind);
            spare_slots_.push_back(older.slot);
            epochs_[kept - 1] = {older.start, older.quarters, epochs_[i].slot};
        } else {
            epochs_[kept++] = epochs_[i];
        }
    }
    epochs_.resize(kept);
    epochs_.push_back({ticks_, quarters(), spare_slots_.back()});
    spare_slots_.pop_back();
    for (unsigned i = 0; i < epochs_.size(); ++i)
        place_[epochs_[i].slot] = static_cast<std::uint8_t>(i);
}

Chains::List Ages::list_of(Id id) const {
    const std::uint64_t then = ticks_ - std::min(ticks_, age(id));
    auto after = std::ranges::upper_bound(epochs_, then, {}, &Epoch::start);
    if (after != epochs_.begin()) --after;
    return 1 + after->slot * kinds_ + kind_of(id);
}

std::uint64_t Ages::rank(List list) const {
    const unsigned place = place_[(list - 1) / kinds_];
    return rank_of((list - 1) % kinds_, quarters() - epochs_[place].quarters, place);
}

}  // namespace kvtier
