// Least recently used, by chains: tails first, and what several chains share stays for longer; and
// the same with what an engine says of how much attention blocks get.
#pragma once
#include "ages.h"

namespace kvtier {

class Prefix : public Ages {
 public:
    Prefix() : Prefix(1) {}

 protected:
    explicit Prefix(unsigned levels) : Ages(2 * levels), levels_(levels) {}
    // How much longer than others a block of this level stays, in eighths.
    virtual std::uint64_t eighths(unsigned) const { return 8; }

    // Own bits of a block: something hung on it; two things did, or on one below it; level.
    static constexpr std::uint32_t continued_bit = 1, shared_bit = 2;
    static constexpr unsigned level_shift = 2;

 private:
    void met(Id, Name, bool, std::size_t, bool) override {}
    void used(Id, Name, bool) override {}
    void continued(Id id) override;
    unsigned kind_of(std::uint32_t own) const override {
        return (own >> level_shift) * 2 + (own & shared_bit ? 1 : 0);
    }
    std::uint64_t rank_of(unsigned kind, std::uint64_t age, unsigned place) const override;

    unsigned levels_;
};

class Attention final : public Prefix {
 public:
    Attention() : Prefix(3) {}
    void hinted(std::span<const Id> ids, double importance) override;

 private:
    std::uint64_t eighths(unsigned level) const override {
        return level == 0 ? 8 : level == 1 ? 1 : 64;
    }
};

}  // namespace kvtier
