// Least recently used by chains: tails are evicted first, and blocks that several chains share stay
// longer. The attention policy adds the hints of an engine about the attention that blocks receive.
#include <algorithm>

#include "ages.h"
#include "policies.h"

namespace kvtier {
namespace {

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
    // The path to a fork is shared too.
    void on_continued(Id id) override {
        if (!(state_of(id).own & continued_bit)) {
            state_of(id).own |= continued_bit;
            return;
        }
        for (; id != none && is_known(id) && !(state_of(id).own & shared_bit); id = parent_of(id))
            state_of(id).own |= shared_bit;
    }
    unsigned kind_of(Id id) const override {
        const std::uint32_t own = state_of(id).own;
        return (own >> level_shift) * 2 + (own & shared_bit ? 1 : 0);
    }
    // Orders by age; the age of more important blocks counts less.
    std::uint64_t rank_of(unsigned kind, std::uint64_t age, unsigned place) const override {
        constexpr std::uint64_t shared = 8, oldest = 0x7FFFFFFF;
        const std::uint64_t weight = eighths(kind / 2) * (kind % 2 ? shared : 1);
        return (oldest + 1 - std::min(oldest, (age + 1) * 512 / weight)) * epochs + place;
    }
};

class Attention final : public Prefix {
 public:
    Attention() : Prefix(4) {}
    void hinted(std::span<const Id> ids, std::span<const Name>, double importance) override {
        const std::uint32_t level = hint_of(importance);
        for (Id id : ids) {
            if (!is_known(id)) continue;
            state_of(id).own =
                (state_of(id).own & (continued_bit | shared_bit)) | level << level_shift;
            if (state_of(id).listed && !state_of(id).demoted) relist(id);
        }
    }

 private:
    std::uint64_t eighths(unsigned level) const override {
        return level == little ? 1 : level == much ? 64 : 8;
    }
};

}  // namespace

std::unique_ptr<Policy> make_prefix() { return std::make_unique<Prefix>(); }
std::unique_ptr<Policy> make_attention() { return std::make_unique<Attention>(); }

}  // namespace kvtier
