// Chains that are listed by kind and by age: what was wanted at about the same time goes together.
#pragma once
#include <array>
#include <vector>

#include "chains.h"

namespace kvtier {

class Ages : public Chains {
 public:
    void now(double seconds) override;

 protected:
    static constexpr unsigned epochs = 128;

    explicit Ages(unsigned kinds);
    // Of what is the policy's own of a block.
    virtual unsigned kind_of(std::uint32_t own) const = 0;
    // Lower for what goes sooner, never 0. Ages are quarters of a second; places count from 0, the
    // oldest, and are less than `epochs`.
    virtual std::uint64_t rank_of(unsigned kind, std::uint64_t age, unsigned place) const = 0;
    std::uint64_t quarters() const { return quarters_; }

 private:
    // What was wanted at about the same time, in a list for each kind.
    struct Epoch {
        std::uint64_t start, quarters;  // from this tick on, and when that was
        unsigned slot;
    };

    void began(std::size_t blocks) override;
    List list_of(Id id) const override;
    std::uint64_t rank(List list) const override;
    void open();

    unsigned kinds_;
    std::uint64_t quarters_ = 0;
    std::size_t told_ = 0;       // blocks, in this tick
    std::vector<Epoch> epochs_;  // oldest first
    std::vector<unsigned> spare_slots_;
    std::array<std::uint8_t, epochs> place_{};  // of each slot in epochs_
};

}  // namespace kvtier
