// The prefix and attention policies.
#include "prefix.h"

#include <algorithm>

#include "policies.h"

namespace kvtier {

// The path to a fork is shared too.
void Prefix::on_continued(Id id) {
    if (!(state_of(id).own & continued_bit)) {
        state_of(id).own |= continued_bit;
        return;
    }
    for (; id != none && is_known(id) && !(state_of(id).own & shared_bit); id = parent_of(id))
        state_of(id).own |= shared_bit;
}

// Orders by age; the age of more important blocks counts less.
std::uint64_t Prefix::rank_of(unsigned kind, std::uint64_t age, unsigned place) const {
    constexpr std::uint64_t shared = 8, oldest = 0x7FFFFFFF;
    const std::uint64_t weight = eighths(kind / 2) * (kind % 2 ? shared : 1);
    return (oldest + 1 - std::min(oldest, (age + 1) * 512 / weight)) * epochs + place;
}

void Attention::hinted(std::span<const Id> ids, std::span<const Name>, double importance) {
    const std::uint32_t level = hint_of(importance);
    for (Id id : ids) {
        if (!is_known(id)) continue;
        state_of(id).own = (state_of(id).own & (continued_bit | shared_bit)) | level << level_shift;
        if (state_of(id).listed && !state_of(id).demoted) relist(id);
    }
}

std::unique_ptr<Policy> make_prefix() { return std::make_unique<Prefix>(); }
std::unique_ptr<Policy> make_attention() { return std::make_unique<Attention>(); }

}  // namespace kvtier
