// What a block is worth: the hits to be expected for each second of its space, at the best horizon.
//
// Of watched blocks it is counted at which age they were wanted again. That gives each kind the
// chance of it at every age, and with few to go by those of its relatives count more. The floating
// point is done in the order of the twin (kvtier/policy/value.py), which has the same results.
#include "value.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvtier {
namespace {

constexpr std::size_t seen_slots = 1U << 16, seen_most = seen_slots / 4 * 3;
constexpr std::size_t counters = 1U << 20, sketch_window = counters / 4;
constexpr unsigned most_hits = 127, rows = 4;
constexpr std::uint32_t watch_quarters = 3600 * 4, quarters_mask = (1U << 24) - 1;

// What a counter of 4 bits stands for.
constexpr std::array<std::uint8_t, 16> steps{0,  1,  2,  3,  4,  6,  8,  12,
                                             16, 20, 24, 32, 48, 64, 96, 127};

unsigned step_of(unsigned times) {
    return static_cast<unsigned>(std::ranges::upper_bound(steps, times) - steps.begin() - 1);
}

unsigned new_kind_of(std::size_t n) {
    return n < 2 ? 0 : n < 3 ? 1 : n < 6 ? 2 : n < 16 ? 3 : n < 256 ? 4 : 5;
}

constexpr unsigned all_ages = 36;

const std::array<std::uint32_t, all_ages>& ends_of_ages() {  // in quarters
    static const auto made = [] {
        std::array<std::uint32_t, all_ages> ends{};
        for (unsigned i = 0; i < all_ages; ++i)
            ends[i] = static_cast<std::uint32_t>(
                std::ldexp(i % 2 ? 1.4142135623730951 : 1.0, static_cast<int>(i / 2 + 2)));
        return ends;
    }();
    return made;
}

unsigned age_kind(std::uint64_t quarters) {
    if (quarters <= 4) return 0;
    const auto below =
        static_cast<unsigned>(std::bit_width(quarters - 1) - 3) * 2;  // 2^ of it is passed
    if (below + 1 >= all_ages) return all_ages - 1;
    return quarters <= ends_of_ages()[below + 1] ? below + 1 : std::min(below + 2, all_ages - 1);
}

}  // namespace

Value::Value(const Constants& constants)
    : Ages(kinds),
      constants_(constants),
      seen_(seen_slots),
      sketch_(counters / 2),
      duel_(
          [this](unsigned order, const Duel::Entry& entry) {
              return worth(order, entry.kind, quarters() - entry.at);
          },
          constants) {
    static_assert(ages == all_ages && hit_kinds == steps.size() && kinds <= 256);
}

void Value::now(double seconds) {
    Ages::now(seconds);
    if (news_ >= enough_news_) refit();
}

std::uint32_t Value::worth(unsigned order, unsigned kind, std::uint64_t age) const {
    if (order == learned) return ranks_[kind][age_kind(age)];
    return order == least_wanted ? kind / (2 * new_kinds) : 0;
}

// The oldest first where all else is equal.
std::uint32_t Value::rank_of(unsigned kind, std::uint64_t age, unsigned place) const {
    return 1 + ((worth(duel_.best(), kind, age) * epochs + place) * 256 + kind);
}

// ---- blocks ----

unsigned Value::kind_of(std::uint32_t own) const {
    return (step_of(own & hit_bits) * 2 + (own & last_bit ? 1 : 0)) * new_kinds +
           (own >> new_shift);
}

void Value::become(Id id, Name name, unsigned hits, unsigned new_kind, bool last) {
    const unsigned own = std::min(hits, most_hits) | (last ? last_bit : 0) | new_kind << new_shift;
    const std::uint32_t called = short_name(name);
    about(id).own = own;
    if (last) lasts_[lasts_at_++ % lasts_.size()] = {id, called};
    know(name, (own & hit_bits) + 1);
    watch(called, kind_of(own));
    duel_.used(called, static_cast<std::uint32_t>(quarters()), kind_of(own), in_memory(), last);
}

// One that is forgotten was wanted as often as the sketch remembers.
void Value::met(Id id, Name name, bool again, std::size_t batch, bool last) {
    const unsigned hits = again ? (about(id).own & hit_bits) + 1 : times_known(name);
    become(id, name, hits, new_kind_of(batch), last);
}

void Value::used(Id id, Name name, bool last) {
    const unsigned own = about(id).own;
    become(id, name, (own & hit_bits) + 1, own >> new_shift, last);
}

// It was not the last of its request: the rest is only there now.
void Value::continued(Id id) {
    duel_.joined();
    if (!(about(id).own & last_bit)) return;
    about(id).own &= ~last_bit;
    for (std::size_t back = 1; back <= std::min(lasts_at_, lasts_.size()); ++back) {
        const auto& [last, called] = lasts_[(lasts_at_ - back) % lasts_.size()];
        if (last != id) continue;
        const unsigned kind = kind_of(about(id).own);
        Seen& seen = seen_[find(called)];
        if (seen.name != 0) seen.kind = kind & 255;
        duel_.corrected(called, kind);
        return;
    }
}

// ---- learning ----

std::uint32_t Value::waited(const Seen& seen) const {
    return (static_cast<std::uint32_t>(quarters()) - seen.at) & quarters_mask;
}

std::size_t Value::find(std::uint32_t name) const {
    std::size_t at = name * 0x9E3779B1U >> 16;
    while (seen_[at].name != 0 && seen_[at].name != name) at = (at + 1) % seen_slots;
    return at;
}

void Value::watch(std::uint32_t name, unsigned kind) {
    if (name > sample_) return;
    if (watched_ >= seen_most) thin();
    if (name > sample_) return;
    ++news_;
    Seen& seen = seen_[find(name)];
    if (seen.name != 0)
        hits_[seen.kind][age_kind(waited(seen))] += 1;
    else
        ++watched_;
    seen = {name, static_cast<std::uint32_t>(quarters()) & quarters_mask, kind & 255};
}

// Those go that were watched for long enough; where they are few, every other name.
void Value::thin() {
    std::vector<Seen> kept;
    for (const Seen& seen : seen_) {
        if (seen.name == 0) continue;
        if (waited(seen) > watch_quarters)
            ends_[seen.kind][ages - 1] += 1;
        else
            kept.push_back(seen);
    }
    if (kept.size() > seen_most / 4 * 3) {
        sample_ /= 2;
        scale(0.5);  // what others did is not to outweigh what these are waited for
        std::erase_if(kept, [&](const Seen& seen) { return seen.name > sample_; });
    }
    std::ranges::fill(seen_, Seen{});
    for (const Seen& seen : kept) seen_[find(seen.name)] = seen;
    watched_ = kept.size();
}

void Value::scale(double by) {
    for (Table* table : {&hits_, &ends_})
        for (Row& row : *table)
            for (double& one : row) one *= by;
}

void Value::refit() {
    enough_news_ = news_ + std::min(news_, constants_.memory) / constants_.more_seen + first_news;
    Table ends = ends_;
    for (const Seen& seen : seen_)
        if (seen.name != 0) ends[seen.kind][age_kind(waited(seen))] += 1;
    // Few observations say how much likelier than its relatives a kind is, and many at which age.
    auto chances = [](const Row& hit, const Row& end, const Row& relatives, double weight) {
        Row found{}, seen{};
        double risk = 0, hits = 1, expected = 1;
        for (unsigned j = ages; j-- > 0;) {
            risk += hit[j] + end[j];
            seen[j] = std::max(risk - end[j] / 2, 0.0);
            hits += hit[j];
            expected += seen[j] * relatives[j];
        }
        const double likelier = hits / expected;
        for (unsigned j = 0; j < ages; ++j) {
            const double chance = std::min(likelier * relatives[j], 0.999);
            found[j] = std::min((hit[j] + weight * chance) / (seen[j] + weight), 0.999);
        }
        return found;
    };
    constexpr unsigned families = kinds / new_kinds;
    Row hit{}, end{};
    std::array<Row, families> family_hit{}, family_end{};
    for (unsigned kind = 0; kind < kinds; ++kind)
        for (unsigned j = 0; j < ages; ++j) {
            hit[j] += hits_[kind][j];
            end[j] += ends[kind][j];
            family_hit[kind / new_kinds][j] += hits_[kind][j];
            family_end[kind / new_kinds][j] += ends[kind][j];
        }
    const Row all = chances(hit, end, Row{}, 1e-6);
    std::array<double, ages> widths{};
    for (unsigned j = 0; j < ages; ++j)
        widths[j] = (ends_of_ages()[j] - (j ? ends_of_ages()[j - 1] : 0)) / 4.0;
    Table worth{};
    std::vector<double> order;
    for (unsigned kind = 0; kind < kinds; ++kind) {
        const unsigned family = kind / new_kinds;
        const Row near = chances(family_hit[family], family_end[family], all, constants_.few);
        const Row own = chances(hits_[kind], ends[kind], near, constants_.few_of_new);
        for (unsigned from = 0; from < ages; ++from) {
            double left = 1, got = 0, spent = 0, best = 0;
            for (unsigned j = from; j < ages; ++j) {
                const double now = left * own[j];
                got += now;
                spent += (left - now / 2) * widths[j];
                left -= now;
                best = std::max(best, got / spent);
            }
            worth[kind][from] = best;
            order.push_back(best);
        }
    }
    std::ranges::sort(order);
    order.erase(std::unique(order.begin(), order.end()), order.end());
    for (unsigned kind = 0; kind < kinds; ++kind)
        for (unsigned j = 0; j < ages; ++j)
            ranks_[kind][j] = static_cast<std::uint16_t>(
                std::ranges::lower_bound(order, worth[kind][j]) - order.begin());
    scale(std::max(
        0.0, 1 - static_cast<double>(news_ - fitted_) / static_cast<double>(constants_.memory)));
    fitted_ = news_;
}

// ---- how often those were wanted that are gone ----

// The least of four counters of 4 bits; all are halved when many were new.
unsigned Value::times_known(Name name) const {
    unsigned least = steps.size() - 1;
    std::uint64_t hash = name;
    for (unsigned row = 0; row < rows; ++row) {
        hash = mix(hash + row + 1);
        const std::size_t at = hash % counters;
        least = std::min<unsigned>(least, sketch_[at / 2] >> at % 2 * 4 & 15);
    }
    return steps[least];
}

// Between two steps a counter moves by chance, which is the same for all of a request: or else what
// is gone each time before it is wanted would stay at a step.
void Value::know(Name name, unsigned times) {
    const unsigned known = step_of(times_known(name));
    unsigned step = step_of(times);
    if (step <= known) {
        step = known;
        if (known + 1 < steps.size() && mix(lasts_at_) % (steps[known + 1] - steps[known]) == 0)
            ++step;
    }
    bool fresh = false;
    std::uint64_t hash = name;
    for (unsigned row = 0; row < rows; ++row) {
        hash = mix(hash + row + 1);
        const std::size_t at = hash % counters;
        const unsigned shift = at % 2 * 4, was = sketch_[at / 2] >> shift & 15;
        fresh |= was == 0;
        if (step > was)
            sketch_[at / 2] =
                static_cast<std::uint8_t>((sketch_[at / 2] & ~(15U << shift)) | step << shift);
    }
    if (!fresh || ++sketched_ < sketch_window) return;
    sketched_ = 0;
    for (std::uint8_t& two : sketch_) two = two >> 1 & 0x77;
}

std::size_t Value::memory_bytes() const {
    return Ages::memory_bytes() + sizeof(*this) + seen_.size() * sizeof(Seen) + sketch_.size() +
           duel_.memory_bytes();
}

}  // namespace kvtier
