// Expected reuse, learned as it goes: blocks of a kind and an age are worth what such blocks were;
// and where that does worse, how often they were wanted or how long ago.
//
// 12 bytes a block in its chain, and two mebibytes for what is learned.
#pragma once
#include <array>
#include <vector>

#include "ages.h"
#include "duel.h"

namespace kvtier {

class Value final : public Ages {
 public:
    explicit Value(const Constants& constants = {});
    void now(double seconds) override;
    std::size_t memory_bytes() const override;

 private:
    // A kind is how often a block was wanted, whether it was the last of its request, and, as long
    // as it was wanted seldom, how many came with it: one of six. What was wanted more often is in
    // six steps of that instead. Ages go in steps of the square root of two, from a second to two
    // days.
    static constexpr unsigned families = 16, parts = 6, kinds = families * 2 * parts, ages = 36;
    static constexpr unsigned seldom = 4;
    // A block that is watched, wherever it is, since it was wanted last.
    struct Seen {
        std::uint32_t name;  // 0 where there is none
        std::uint32_t at : 24, kind : 8;
    };
    static_assert(sizeof(Seen) == 8);
    // Own bits of a block: how often it was wanted after the first time, and as long as that is
    // seldom, how many came with it; last.
    static constexpr unsigned wanted_bits = 255, last_bit = 256;

    // Orders: by what was learned; least wanted first, then oldest; and oldest first.
    static constexpr unsigned learned = 0, least_wanted = 1;

    using Row = std::array<double, ages>;
    using Table = std::array<Row, kinds>;
    using Kinds = std::array<double, kinds>;

    void met(Id id, Name name, bool again, std::size_t batch, bool last) override;
    void used(Id id, Name name, bool last) override;
    void continued(Id id) override;
    unsigned kind_of(std::uint32_t own) const override;
    std::uint64_t rank_of(unsigned kind, std::uint64_t aged, unsigned place) const override;

    std::uint32_t worth(unsigned order, unsigned kind, std::uint64_t age) const;
    std::uint32_t waited(const Seen& seen) const;
    void become(Id id, Name name, unsigned level, unsigned came_with, bool last);
    void next_request();
    unsigned more(unsigned level);
    static std::uint8_t counted_kind_of(std::uint32_t own);
    std::size_t find(std::uint32_t name) const;
    void watch(std::uint32_t name, unsigned kind);
    void thin();
    void refit();
    void scale(double by);
    unsigned known(Name name) const;
    void know(Name name, unsigned level);

    Constants constants_;
    std::vector<Seen> seen_;
    std::size_t watched_ = 0;
    std::uint32_t sample_ = 0xFFFFFFFF;                     // names up to this are watched
    std::array<std::pair<Id, std::uint32_t>, 64> lasts_{};  // of requests, lately
    std::size_t requests_ = 0;
    std::uint64_t chance_ = mix(0);  // of this request
    bool tells_again_ = true;
    unsigned drawn_level_ = ~0U;  // the level that `rises_` was drawn for
    bool rises_ = false;
    std::array<std::uint8_t, 2 * last_bit> kinds_of_own_{};

    Table hits_{}, ends_{};  // at each age: wanted again, or watched no longer
    // Runs: blocks of a kind that a request used one after the other. How many blocks there were,
    // and the sum of the squares of the runs' lengths.
    Kinds blocks_{}, squares_{};
    unsigned run_kind_ = 0, run_ = 0;
    std::size_t run_request_ = 0;
    std::array<std::array<std::uint16_t, ages>, kinds> ranks_{};
    static constexpr std::uint64_t first_news = 64;
    std::uint64_t news_ = 0, fitted_ = 0, enough_news_ = first_news;

    std::vector<std::uint8_t> sketch_;
    std::size_t sketched_ = 0;

    Duel duel_;
};

}  // namespace kvtier
