// Least recently used by chains: tails are evicted first, and blocks that several chains share stay
// longer. The attention policy adds the hints of an engine about the attention that blocks receive.
#pragma once
#include "ages.h"

namespace kvtier {

class Prefix : public Ages {
 public:
    Prefix() : Prefix(1) {}

 protected:
    explicit Prefix(unsigned levels) : Ages(2 * levels) {}
    // How much longer than others a block of this level stays, in eighths.
    virtual std::uint64_t eighths(unsigned) const { return 8; }

    // A block's own bits: a block follows it; two or more blocks follow it or one of its
    // descendants; its level.
    static constexpr std::uint32_t continued_bit = 1, shared_bit = 2;
    static constexpr unsigned level_shift = 2;

 private:
    void on_added(Id, Name, bool, std::size_t, bool) override {}
    void used(Id, Name, bool) override {}
    void on_continued(Id id) override;
    unsigned kind_of(Id id) const override {
        const std::uint32_t own = state_of(id).own;
        return (own >> level_shift) * 2 + (own & shared_bit ? 1 : 0);
    }
    std::uint64_t rank_of(unsigned kind, std::uint64_t age, unsigned place) const override;
};

class Attention final : public Prefix {
 public:
    Attention() : Prefix(3) {}
    void hinted(std::span<const Id> ids, std::span<const Name> names, double importance) override;

 private:
    std::uint64_t eighths(unsigned level) const override {
        return level == unhinted ? 8 : level == little ? 1 : 64;
    }
};

}  // namespace kvtier
