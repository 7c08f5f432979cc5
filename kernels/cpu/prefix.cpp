// The prefix and attention policies.
#include "prefix.h"

#include <algorithm>

namespace kvtier {

// What leads to a fork is shared too.
void Prefix::continued(Id id) {
    if (!(about(id).own & continued_bit)) {
        about(id).own |= continued_bit;
        return;
    }
    for (; id != none && knows(id) && !(about(id).own & shared_bit); id = parent_of(id))
        about(id).own |= shared_bit;
}

// By age, which for those that matter more counts less.
std::uint64_t Prefix::rank_of(unsigned kind, std::uint64_t age, unsigned place) const {
    constexpr std::uint64_t shared = 8, oldest = 0x7FFFFFFF;
    const std::uint64_t weight = eighths(kind / 2) * (kind % 2 ? shared : 1);
    return (oldest + 1 - std::min(oldest, (age + 1) * 512 / weight)) * epochs + place;
}

void Attention::hinted(std::span<const Id> ids, double importance) {
    const std::uint32_t level = importance < 1.0 / 3 ? 1 : importance < 2.0 / 3 ? 0 : 2;
    for (Id id : ids) {
        if (!knows(id)) continue;
        about(id).own = (about(id).own & (continued_bit | shared_bit)) | level << level_shift;
        if (about(id).listed && !about(id).demoted) relist(id);
    }
}

}  // namespace kvtier
