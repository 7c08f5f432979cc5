// The worth of a block: its expected hits per second of its space, at the best horizon.
//
// For watched blocks, counts at which age they were used again: for each kind, the probability of a
// use at every age; with few observations, those of related kinds count more. Floating-point
// operations have the order of the model (tests/models/policies/value.py), for equal results.
#include "value.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "policies.h"

namespace kvtier {
namespace {

constexpr std::size_t seen_slots = 1U << 16, seen_most = seen_slots / 4 * 3;
constexpr std::size_t counters = 3U << 18, sketch_window = counters / 4;
constexpr unsigned rows = 4;
constexpr unsigned again = 16;  // one of this many requests writes its counts to the sketch again
constexpr std::uint32_t watch_quarters = 3600 * 4, quarters_mask = (1U << 23) - 1;

// Levels of use counts: exact up to 40, then in steps of a twentieth, up to about 2,000; the steps
// to the next level are that much rarer.
constexpr unsigned last_level = 127;
const auto times_more = [] {
    std::array<std::uint16_t, last_level> widths{};
    unsigned times = 0;
    for (std::uint16_t& width : widths) {
        width = static_cast<std::uint16_t>(std::max(1U, times / 20));
        times += width;
    }
    return widths;
}();

// Steps for blocks that are used often: two levels in one from 24 on.
unsigned step_of(unsigned level) { return level < 24 ? level - 4 : 20 + (level - 24) / 2; }

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
        static_cast<unsigned>(std::bit_width(quarters - 1) - 3) * 2;  // it is more than 2^ of this
    if (below + 1 >= all_ages) return all_ages - 1;
    return quarters <= ends_of_ages()[below + 1] ? below + 1 : std::min(below + 2, all_ages - 1);
}

}  // namespace

Value::Value(const Constants& constants)
    : Ages(kinds),
      constants_(constants),
      seen_(seen_slots),
      sketch_(counters),
      selector_(
          [this](unsigned order, const PolicySelector::Entry& entry) {
              return worth(order, entry.kind, quarters() - entry.at);
          },
          constants) {
    static_assert(ages == all_ages && kinds <= 512);
    for (std::uint32_t own = 0; own < kinds_of_own_.size(); ++own)
        kinds_of_own_[own] = counted_kind_of(own);
}

void Value::now(double seconds) {
    Ages::now(seconds);
    if (news_ >= enough_news_) refit();
}

std::uint32_t Value::worth(unsigned order, unsigned kind, std::uint64_t age) const {
    if (order == learned) return ranks_[kind][age_kind(age)];
    if (order != least_wanted) return 0;
    const unsigned family = both_of(kind) / 2;
    return family * parts + (family < seldom || kind >= plain ? 0 : kind % parts);
}

// Among equals the oldest is evicted first.
std::uint64_t Value::rank_of(unsigned kind, std::uint64_t age, unsigned place) const {
    return 1 + ((worth(selector_.best(), kind, age) * epochs + place) * 512 + kind);
}

// ---- blocks ----

unsigned Value::kind_of(Id id) const {
    const unsigned kind = kinds_of_own_[state_of(id).own];
    const Hint hint = id < hints_.size() ? hints_[id] : unhinted;
    return hint == unhinted ? kind : plain + (hint - 1) * 2 * families + kind / parts;
}

void Value::hinted(std::span<const Id> ids, std::span<const Name> names, double importance) {
    const bool is_first = hints_.empty();
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const Id id = ids[i];
        if (!is_known(id)) continue;
        if (id >= hints_.size()) hints_.resize(id + 1, unhinted);
        hints_[id] = hint_of(importance);
        const std::uint32_t called = short_name(names[i]);
        if (called <= sample_)
            if (Seen& seen = seen_[find(called)]; seen.name != 0) seen.kind = kind_of(id) & 511;
        selector_.corrected(called, kind_of(id));
        if (state_of(id).listed && !state_of(id).demoted) relist(id);
    }
    if (is_first && !hints_.empty() && news_ > 0) refit();  // no kind with a hint has a rank yet
}

std::uint8_t Value::counted_kind_of(std::uint32_t own) {
    unsigned family = (own & wanted_bits) / parts, part = (own & wanted_bits) % parts;
    if (family >= seldom) {
        const unsigned step = step_of((own & wanted_bits) - seldom * parts + seldom);
        family = seldom + step / parts;
        part = step % parts;
    }
    return static_cast<std::uint8_t>((family * 2 + (own & last_bit ? 1 : 0)) * parts + part);
}

// Watches the blocks of a batch in order. Keeps in registers the sums that the next block is most
// likely to change: each addition depends on the previous one, and memory doubles the latency.
class Value::Watch {
 public:
    explicit Watch(Value& value)
        : value_(value), now_(static_cast<std::uint32_t>(value.quarters()) & quarters_mask) {}
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() { write(); }

    [[gnu::always_inline]] void operator()(std::uint32_t name, unsigned kind) {
        if (name > value_.sample_) return;
        if (value_.watched_ >= seen_most) {
            write();
            value_.thin();
            if (name > value_.sample_) return;
        }
        ++value_.news_;
        const bool goes_on = kind == value_.run_kind_ && value_.requests_ == value_.run_request_;
        value_.run_ = goes_on ? value_.run_ + 1 : 1;
        value_.run_kind_ = kind;
        value_.run_request_ = value_.requests_;
        if (kind != kind_) take(kind);
        blocks_ += 1;
        squares_ += 2 * value_.run_ - 1;  // the growth of the square of this run
        Seen& seen = value_.seen_[value_.find(name)];
        if (seen.name != 0) {
            hit(seen);
        } else {
            ++value_.watched_;
        }
        seen = {name, now_, kind & 511};
    }

 private:
    [[gnu::always_inline]] void hit(const Seen& seen) {
        const std::uint32_t waited = (now_ - seen.at) & quarters_mask;
        if (waited != waited_) {
            waited_ = waited;
            age_ = age_kind(waited);
        }
        double* cell = &value_.hits_[seen.kind][age_];
        if (cell != cell_) {
            if (cell_ != nullptr) *cell_ = hits_;
            cell_ = cell;
            hits_ = *cell;
        }
        hits_ += 1;
    }
    void take(unsigned kind) {
        write_kind();
        kind_ = kind;
        blocks_ = value_.blocks_[kind];
        squares_ = value_.squares_[kind];
    }
    void write_kind() {
        if (kind_ == kinds) return;
        value_.blocks_[kind_] = blocks_;
        value_.squares_[kind_] = squares_;
        kind_ = kinds;
    }
    void write() {
        write_kind();
        if (cell_ != nullptr) *cell_ = hits_;
        cell_ = nullptr;
    }

    Value& value_;
    const std::uint32_t now_;
    unsigned kind_ = kinds;  // the kind of these sums; `kinds` for none
    double blocks_ = 0, squares_ = 0;
    double* cell_ = nullptr;  // the cell of this value
    double hits_ = 0;
    std::uint32_t waited_ = 0;
    unsigned age_ = age_kind(0);
};

[[gnu::always_inline]] inline void Value::set_kind(Watch& watch, Id id, std::uint32_t called,
                                                   unsigned level, unsigned came_with, bool last) {
    const unsigned wanted =
        level < seldom ? level * parts + came_with : seldom * parts + level - seldom;
    const unsigned own = wanted | (last ? last_bit : 0);
    state_of(id).own = own;
    if (last) lasts_[requests_ % lasts_.size()] = {id, called};
    const unsigned kind = kind_of(id);
    watch(called, kind);
    selector_.used(called, static_cast<std::uint32_t>(quarters()), kind, in_memory(), last);
}

// A forgotten block has the count that the sketch remembers.
void Value::on_added(Id id, Name name, bool again, std::size_t batch, bool last) {
    if (again) {
        used(id, name, last);
        return;
    }
    if (last) next_request();
    if (id < hints_.size()) hints_[id] = unhinted;
    const unsigned before = known(name);
    const unsigned level = before == 0 ? 0 : more(before - 1);
    know(name, level);
    Watch watch(*this);
    set_kind(watch, id, short_name(name), level, new_kind_of(batch), last);
}

[[gnu::always_inline]] inline void Value::use(Watch& watch, Id id, Name name, std::uint32_t called,
                                              bool last) {
    if (last) next_request();
    const unsigned wanted = state_of(id).own & wanted_bits;
    const bool few = wanted < seldom * parts;
    const unsigned level = few ? wanted / parts : wanted - seldom * parts + seldom;
    const unsigned now = more(level);
    // The sketch answers for evicted blocks. A block that stays at its level is written to it
    // periodically, because counters are halved in between.
    if (now != level || rewrites_count_) know(name, now);
    set_kind(watch, id, called, now, few ? wanted % parts : 0, last);
}

void Value::used(Id id, Name name, bool last) {
    Watch watch(*this);
    use(watch, id, name, short_name(name), last);
}

void Value::on_batch_used(std::span<const Id> ids, std::span<const Name> names) {
    // Prefetches the entries of a name a few blocks ahead.
    constexpr std::size_t ahead = 16;
    std::array<std::uint32_t, ahead> called;
    auto ask = [&](std::size_t i) {
        const std::uint32_t name = short_name(names[i]);
        called[i % ahead] = name;
        if (name <= sample_) __builtin_prefetch(&seen_[home(name)], 1);
        selector_.prefetch(name);
    };
    for (std::size_t i = ids.size(); i > 0 && i + ahead > ids.size(); --i) ask(i - 1);
    Watch watch(*this);
    for (std::size_t i = ids.size(); i-- > 0;) {
        const std::uint32_t name = called[i % ahead];
        if (i >= ahead) ask(i - ahead);
        if (in_memory(ids[i])) use(watch, ids[i], names[i], name, i + 1 == ids.size());
    }
}

void Value::next_request() {
    ++requests_;
    chance_ = mix(requests_);
    rewrites_count_ = (chance_ >> 32) % again == 0;
    drawn_level_ = last_level + 1;
}

// A level that stands for several uses rises randomly; one random number for a whole request.
unsigned Value::more(unsigned level) {
    if (level != drawn_level_) {
        drawn_level_ = level;
        rises_ =
            level != last_level && (times_more[level] == 1 || chance_ % times_more[level] == 0);
    }
    return level + rises_;
}

// It was not the last of its request: the rest has only arrived now.
void Value::on_continued(Id id) {
    if (!(state_of(id).own & last_bit)) return;
    state_of(id).own &= ~last_bit;
    for (std::size_t back = 0; back < std::min(requests_, lasts_.size()); ++back) {
        const auto& [last, called] = lasts_[(requests_ - back) % lasts_.size()];
        if (last != id) continue;
        const unsigned kind = kind_of(id);
        Seen& seen = seen_[find(called)];
        if (seen.name != 0) seen.kind = kind & 511;
        selector_.corrected(called, kind);
        selector_.follows(called);
        return;
    }
}

// ---- learning ----

std::uint32_t Value::waited(const Seen& seen) const {
    return (static_cast<std::uint32_t>(quarters()) - seen.at) & quarters_mask;
}

std::size_t Value::find(std::uint32_t name) const {
    std::size_t at = home(name);
    while (seen_[at].name != 0 && seen_[at].name != name) at = (at + 1) % seen_slots;
    return at;
}

// Drops what was watched long enough; if that is little, drops every other name.
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
        scale(0.5);  // the counts come from twice as many names
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
    for (Kinds* sums : {&blocks_, &squares_})
        for (double& one : *sums) one *= by;
}

void Value::refit() {
    enough_news_ = news_ + std::min(news_, constants_.memory) / constants_.more_seen + first_news;
    Table ends = ends_;
    for (const Seen& seen : seen_)
        if (seen.name != 0) ends[seen.kind][age_kind(waited(seen))] += 1;
    // With few observations, a factor on the values of related kinds; many observations determine
    // the value per age. The blocks of a run hit together: they count as one observation.
    auto chances = [](const Row& hit, const Row& end, const Row& relatives, double few,
                      double run) {
        Row found{}, seen{};
        const double weight = few * run;
        double risk = 0, hits = run, expected = run;
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
    constexpr unsigned both = 2 * families;  // last of a request, or not
    Row hit{}, end{};
    std::array<Row, both> family_hit{}, family_end{};
    for (unsigned kind = 0; kind < kinds; ++kind)
        for (unsigned j = 0; j < ages; ++j) {
            hit[j] += hits_[kind][j];
            end[j] += ends[kind][j];
            family_hit[both_of(kind)][j] += hits_[kind][j];
            family_end[both_of(kind)][j] += ends[kind][j];
        }
    Row all = chances(hit, end, Row{}, 1e-6, 1);
    if (!hints_.empty())  // so that hints count before the first hit
        for (double& one : all) one = std::max(one, unseen_chance);
    // The average length of the runs of a kind, or of a family, weighted by blocks.
    auto run_of = [](double blocks, double squares) { return blocks > 0 ? squares / blocks : 1.0; };
    std::array<double, both> family_blocks{}, family_squares{};
    for (unsigned kind = 0; kind < kinds; ++kind) {
        family_blocks[both_of(kind)] += blocks_[kind];
        family_squares[both_of(kind)] += squares_[kind];
    }
    std::array<double, ages> widths{};
    for (unsigned j = 0; j < ages; ++j)
        widths[j] = (ends_of_ages()[j] - (j ? ends_of_ages()[j - 1] : 0)) / 4.0;
    Table worth{};
    std::vector<double> order;
    std::array<Row, both> near{};
    // The prior of a family is that of an earlier one, scaled up: more uses make another likelier.
    for (unsigned family = 0; family < both; ++family) {
        Row relatives = family < 2 ? all : near[family - 2];
        if (family >= 2)
            for (double& one : relatives)
                one = std::min(one * (1 + 1.0 / std::min(family / 2, seldom - 1)), 0.999);
        near[family] = chances(family_hit[family], family_end[family], relatives, constants_.few,
                               run_of(family_blocks[family], family_squares[family]));
    }
    // The kinds of a family without observations have equal worth: only the first is computed.
    std::array<unsigned, kinds> same_as{};
    std::array<unsigned, both> unseen;
    unseen.fill(kinds);
    for (unsigned kind = 0; kind < (hints_.empty() ? plain : kinds); ++kind) {
        same_as[kind] = kind;
        Row relatives = near[both_of(kind)];
        if (kind >= plain) {
            const double factor = first_worth[(kind - plain) / both];
            for (double& one : relatives) one = std::min(one * factor, 0.999);
        } else if (hits_[kind] == Row{} && ends[kind] == Row{} && blocks_[kind] == 0) {
            unsigned& first = unseen[kind / parts];
            if (first < kinds) {
                same_as[kind] = first;
                continue;
            }
            first = kind;
        }
        const Row own = chances(hits_[kind], ends[kind], relatives, constants_.few,
                                run_of(blocks_[kind], squares_[kind]));
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
    for (unsigned kind = 0; kind < (hints_.empty() ? plain : kinds); ++kind) {
        if (same_as[kind] != kind) {
            ranks_[kind] = ranks_[same_as[kind]];
            continue;
        }
        for (unsigned j = 0; j < ages; ++j)
            ranks_[kind][j] = static_cast<std::uint16_t>(
                std::ranges::lower_bound(order, worth[kind][j]) - order.begin());
    }
    // The first observations, when all blocks were new, become outdated quickly.
    const std::uint64_t memory = std::min(constants_.memory, news_);
    scale(std::max(0.0, 1 - static_cast<double>(news_ - fitted_) / static_cast<double>(memory)));
    fitted_ = news_;
}

// ---- use counts of evicted blocks ----

// The least of four counters: the level plus one, 0 is unknown. Many new names halve all of them.
unsigned Value::known(Name name) const {
    unsigned least = last_level + 1;
    std::uint64_t hash = name;
    for (unsigned row = 0; row < rows; ++row) {
        hash = mix(hash + row + 1);
        least = std::min<unsigned>(least, sketch_[hash % counters]);
    }
    return least;
}

void Value::know(Name name, unsigned level) {
    bool fresh = false;
    std::uint64_t hash = name;
    for (unsigned row = 0; row < rows; ++row) {
        hash = mix(hash + row + 1);
        std::uint8_t& counter = sketch_[hash % counters];
        fresh |= counter == 0;
        counter = static_cast<std::uint8_t>(std::max<unsigned>(counter, level + 1));
    }
    if (!fresh || ++sketched_ < sketch_window) return;
    sketched_ = 0;
    for (std::uint8_t& one : sketch_) one /= 2;
}

std::size_t Value::memory_bytes() const {
    return Ages::memory_bytes() + sizeof(*this) + seen_.size() * sizeof(Seen) + sketch_.size() +
           hints_.capacity() + selector_.memory_bytes();
}

std::unique_ptr<Policy> make_value() { return std::make_unique<Value>(); }

}  // namespace kvtier
