// Lists the blocks of a store, a range of records per call: for operators, who can wait.
#include <algorithm>
#include <unordered_map>

#include "store.h"

namespace kvtier {

std::pair<Id, std::vector<Tally>> Store::tally(Id first, Id look) const {
    std::vector<Tally> found;
    std::unordered_map<std::uint32_t, std::size_t> which;  // the index of a space's tally
    const Id end = first + std::min(look, records_.limit() - std::min(first, records_.limit()));
    for (Id id = first; id < end; ++id) {
        if (!records_.known(id) || records_[id].is() == State::absent) continue;
        const Record& record = records_[id];
        const Place& place = places_[record.place];
        const auto [there, is_new] = which.try_emplace(place.space, found.size());
        if (is_new) found.push_back(Tally{place.space, 0, 0, 0, 0, 0});
        Tally* const at = &found[there->second];
        if (record.in_memory()) {
            ++at->in_memory;
            at->memory_bytes += place.block_bytes;
        } else if (!record.framed) {
            ++at->other;
        }
        if (record.framed) {
            ++at->below;
            at->below_bytes += records_.frame(id).bytes();
        }
    }
    return {end < records_.limit() ? end : 0, found};
}

std::pair<Id, IdList> Store::listed(std::uint32_t in, Id first, Id look, std::size_t limit) const {
    space(in);
    IdList found;
    const Id end = first + std::min(look, records_.limit() - std::min(first, records_.limit()));
    Id id = first;
    for (; id < end && found.size() < limit; ++id)
        if (records_.known(id) && records_[id].is() != State::absent &&
            places_[records_[id].place].space == in)
            found.push_back(id);
    return {id < records_.limit() ? id : 0, found};
}

}  // namespace kvtier
