// What says which blocks go first. The catalog tells it of blocks by their ids, the simulator too.
//
// A policy knows a block from the time it is READY until it is nowhere. Batches are a chain's, head
// first; a policy makes the head outlive the tail. Ids that it doesn't know are passed over.
#pragma once
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "record.h"

namespace kvtier {

using Name = std::uint64_t;  // of a block, wherever it is: the same after it was gone

// splitmix64's: clients choose names.
inline std::uint64_t mix(std::uint64_t name) {
    name = (name ^ name >> 30) * 0xBF58476D1CE4E5B9;
    name = (name ^ name >> 27) * 0x94D049BB133111EB;
    return name ^ name >> 31;
}

// Never 0. Among a million, one of some 2,000 has another's.
inline std::uint32_t short_name(Name name) {
    return static_cast<std::uint32_t>(mix(name) >> 32) | 1;
}

class Policy {
 public:
    virtual ~Policy() = default;

    // Seconds of a clock that never goes back; none of the calls below looks at another.
    virtual void now(double seconds) { now_ = seconds > now_ ? seconds : now_; }

    // READY from now on: new, or back from the disk. `parents` are the blocks before them, or none.
    virtual void added(std::span<const Id> ids, std::span<const Name> names,
                       std::span<const Id> parents) = 0;
    // By a request, told once of each; and by the same request again.
    virtual void wanted(std::span<const Id> ids, std::span<const Name> names) = 0;
    virtual void refreshed(std::span<const Id> ids) = 0;
    virtual void held(std::span<const Id> ids) = 0;  // no victims until they are freed
    virtual void freed(std::span<const Id> ids) = 0;
    virtual void left(std::span<const Id> ids) = 0;  // on disk alone, and known yet
    virtual void gone(std::span<const Id> ids) = 0;
    virtual void demoted(std::span<const Id> ids) = 0;  // first to go, in this order
    virtual void hinted(std::span<const Id> ids, double importance) = 0;

    // Those that should go first, coldest first. Called again, it says the same.
    virtual std::vector<Id> victims(std::size_t n) const = 0;
    virtual std::size_t size() const = 0;  // how many may be named
    virtual std::size_t memory_bytes() const = 0;

 protected:
    double now_ = 0;
};

// The last ids are no block's.
inline void check_ids(std::span<const Id> ids) {
    for (Id id : ids)
        if (id >= max_records) throw std::out_of_range("policy: no block has such an id");
}

}  // namespace kvtier
