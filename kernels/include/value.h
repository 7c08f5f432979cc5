// Expected reuse, learned from use: a block is worth as much as earlier blocks of its kind and age
// were. If use counts or recency would have hit more, the policy uses that order instead.
//
// It needs 12 bytes per block in its chain, and two mebibytes for what is learned.
#pragma once
#include <array>
#include <vector>

#include "ages.h"
#include "chunks.h"
#include "policy_selector.h"

namespace kvtier {

class Value final : public Ages {
 public:
    explicit Value(const Constants& constants = {});
    void now(double seconds) override;
    void hinted(std::span<const Id> ids, std::span<const Name> names, double importance) override;
    std::size_t memory_bytes() const override;

 private:
    // A kind is the use count of a block, whether it was the last of its request, and, while the
    // count is low, the number of blocks of the same batch in six steps. For higher counts the six
    // steps divide the count. Ages have steps of the square root of two, from a second to two days.
    // Blocks with a hint have kinds of their own, one for each family, hint and last or not. So the
    // policy learns what hints are worth; until then, a factor is assumed.
    static constexpr unsigned families = 16, parts = 6, plain = families * 2 * parts, ages = 36;
    static constexpr unsigned kinds = plain + 3 * 2 * families;
    static constexpr std::array<double, 3> first_worth = {1.0 / 8, 1, 8};  // little, medium, much
    static constexpr double unseen_chance = 1e-6;
    static constexpr unsigned seldom = 4;
    // A watched block, in any tier, since its last use.
    struct Seen {
        std::uint32_t name;  // 0 if the entry is free
        std::uint32_t at : 23, kind : 9;
    };
    static_assert(sizeof(Seen) == 8);
    // A block's own bits: how often it was used after the first time, and, while that is low, the
    // number of blocks of the same batch; whether it was the last.
    static constexpr unsigned wanted_bits = 255, last_bit = 256;

    // Orders: learned; least used first, then oldest; oldest first.
    static constexpr unsigned learned = 0, least_wanted = 1;

    using Row = std::array<double, ages>;
    using Table = std::array<Row, kinds>;
    using Kinds = std::array<double, kinds>;

    void on_added(Id id, Name name, bool again, std::size_t batch, bool last) override;
    void used(Id id, Name name, bool last) override;
    void on_batch_used(std::span<const Id> ids, std::span<const Name> names) override;
    void on_continued(Id id) override;
    unsigned kind_of(Id id) const override;
    // Twice the family, plus one if the block was the last of its request.
    static unsigned both_of(unsigned kind) {
        return kind < plain ? kind / parts : (kind - plain) % (2 * families);
    }
    std::uint64_t rank_of(unsigned kind, std::uint64_t aged, unsigned place) const override;

    std::uint32_t worth(unsigned order, unsigned kind, std::uint64_t age) const;
    std::uint32_t waited(const Seen& seen) const;
    class Watch;
    void use(Watch& watch, Id id, Name name, std::uint32_t called, bool last);
    void set_kind(Watch& watch, Id id, std::uint32_t called, unsigned level, unsigned came_with,
                  bool last);
    void next_request();
    unsigned more(unsigned level);
    static std::uint8_t counted_kind_of(std::uint32_t own);
    static std::size_t home(std::uint32_t name) { return name * 0x9E3779B1U >> 16; }
    std::size_t find(std::uint32_t name) const;
    void thin();
    void refit();
    void scale(double by);
    unsigned known(Name name) const;
    void know(Name name, unsigned level);

    Constants constants_;
    ZeroPages<Seen> seen_;
    std::size_t watched_ = 0;
    std::uint32_t sample_ = 0xFFFFFFFF;                     // names up to this are watched
    std::array<std::pair<Id, std::uint32_t>, 64> lasts_{};  // the last blocks of requests
    std::size_t requests_ = 0;
    std::uint64_t chance_ = mix(0);  // of this request
    bool rewrites_count_ = true;
    unsigned drawn_level_ = ~0U;  // the level for which `rises_` was drawn
    bool rises_ = false;
    std::array<std::uint8_t, 2 * last_bit> kinds_of_own_{};
    std::vector<Hint> hints_;  // by id; empty until the first hint

    Table hits_{}, ends_{};  // at each age: used again, or no longer watched
    // Runs: consecutive blocks of a kind in one request. The number of blocks, and the sum of the
    // squares of the runs' lengths.
    Kinds blocks_{}, squares_{};
    unsigned run_kind_ = 0, run_ = 0;
    std::size_t run_request_ = 0;
    std::array<std::array<std::uint16_t, ages>, kinds> ranks_{};
    static constexpr std::uint64_t first_news = 64;
    std::uint64_t news_ = 0, fitted_ = 0, enough_news_ = first_news;

    ZeroPages<std::uint8_t> sketch_;
    std::size_t sketched_ = 0;

    PolicySelector selector_;
};

}  // namespace kvtier
