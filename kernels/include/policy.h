// The interface of an eviction policy, which gets the events of blocks by their ids.
//
// A policy knows a block from the time it is READY until it is in no tier. A batch is a part of a
// chain, head first; a policy evicts the tail before the head. Unknown ids are ignored.
#pragma once
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "record.h"

namespace kvtier {

using Name = std::uint64_t;  // identifies a block in all tiers; the same if it is saved again later

// splitmix64, because clients choose names.
inline std::uint64_t mix(std::uint64_t name) {
    name = (name ^ name >> 30) * 0xBF58476D1CE4E5B9;
    name = (name ^ name >> 27) * 0x94D049BB133111EB;
    return name ^ name >> 31;
}

// Never 0. Among a million names, about one in 2,000 shares its short name with another.
inline std::uint32_t short_name(Name name) {
    return static_cast<std::uint32_t>(mix(name) >> 32) | 1;
}

// Levels of importance: 0 is no hint.
enum Hint : std::uint8_t { unhinted, little, medium, much };
inline Hint hint_of(double importance) {
    return importance < 1.0 / 3 ? little : importance < 2.0 / 3 ? medium : much;
}

class Policy {
 public:
    virtual ~Policy() = default;

    // Sets the time in seconds, from a clock that never goes back. No other call reads a clock.
    virtual void now(double seconds) { now_ = seconds > now_ ? seconds : now_; }

    // The blocks became READY: they are new, or were read from disk. `parents` are the blocks
    // before them in their chains, or none.
    virtual void added(std::span<const Id> ids, std::span<const Name> names,
                       std::span<const Id> parents) = 0;
    // A request used the blocks, reported once per request; the same request used them again.
    virtual void wanted(std::span<const Id> ids, std::span<const Name> names) = 0;
    virtual void refreshed(std::span<const Id> ids) = 0;
    virtual void held(std::span<const Id> ids) = 0;  // no victims until they are freed
    virtual void freed(std::span<const Id> ids) = 0;
    virtual void left(std::span<const Id> ids) = 0;  // only on disk from now on, and still known
    virtual void gone(std::span<const Id> ids) = 0;
    virtual void demoted(std::span<const Id> ids) = 0;  // the next victims, in this order
    // An engine reported the importance of the blocks, from 0 to 1.
    virtual void hinted(std::span<const Id> ids, std::span<const Name> names,
                        double importance) = 0;

    // The next victims, coldest first. Repeated calls return the same blocks.
    virtual std::vector<Id> victims(std::size_t n) const = 0;
    virtual std::size_t size() const = 0;  // how many blocks may be victims
    virtual std::size_t memory_bytes() const = 0;

 protected:
    double now_ = 0;
};

// Throws for ids above the highest possible one.
inline void check_ids(std::span<const Id> ids) {
    for (Id id : ids)
        if (id >= max_records) throw std::out_of_range("policy: no block can have this id");
}

}  // namespace kvtier
