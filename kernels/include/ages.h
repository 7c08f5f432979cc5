// Chains in lists by kind and age: blocks that were requested at about the same time share a list.
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
    virtual unsigned kind_of(Id id) const = 0;
    // Lists with lower ranks are evicted first; a rank is never 0. Ages are quarters of a second.
    // `place` counts from 0, the oldest epoch, and is less than `epochs`.
    virtual std::uint64_t rank_of(unsigned kind, std::uint64_t age, unsigned place) const = 0;
    std::uint64_t quarters() const { return quarters_; }

 private:
    // A period of time, with one list of blocks for each kind.
    struct Epoch {
        std::uint64_t start, quarters;  // the first tick of the period, and the time then
        unsigned slot;
    };

    void on_batch(std::size_t blocks) override;
    List list_of(Id id) const override;
    std::uint64_t rank(List list) const override;
    void open_epoch();

    unsigned kinds_;
    std::uint64_t quarters_ = 0;
    std::size_t reported_ = 0;   // blocks reported in this tick
    std::vector<Epoch> epochs_;  // oldest first
    std::vector<unsigned> spare_slots_;
    std::array<std::uint8_t, epochs> place_{};  // of each slot in epochs_
};

}  // namespace kvtier
