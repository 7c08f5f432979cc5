// Requests that share prefixes, and what a cache of so many blocks would have had of them.
//
// A block counts as a hit if every block before it in its request does. After a request all its
// blocks were wanted; then the cache is cut back to its size, and new blocks may be among those
// that go.
#pragma once
#include <cstdint>
#include <queue>
#include <span>
#include <tuple>
#include <vector>

#include "policy.h"

namespace kvtier {

// A trace with its blocks numbered by first sight.
class Trace {
 public:
    Trace(std::span<const std::uint64_t> names, std::span<const std::uint32_t> lengths,
          std::span<const double> seconds);

    std::size_t requests() const { return seconds_.size(); }
    std::size_t accesses() const { return nodes_.size(); }
    std::size_t unique() const { return names_.size(); }
    std::int64_t repeats() const { return repeats_; }  // the first request that has a block twice
    double seconds(std::size_t request) const { return seconds_[request]; }
    Name name(std::uint32_t node) const { return names_[node]; }
    std::span<const std::uint32_t> nodes() const { return nodes_; }
    std::span<const std::uint32_t> nodes(std::size_t request) const {
        return nodes().subspan(starts_[request], starts_[request + 1] - starts_[request]);
    }
    std::size_t start(std::size_t request) const { return starts_[request]; }

 private:
    std::vector<std::uint32_t> nodes_;
    std::vector<std::size_t> starts_;
    std::vector<double> seconds_;
    std::vector<Name> names_;
    std::int64_t repeats_ = -1;
};

// One tier under a policy, from an empty one on.
class Replay {
 public:
    Replay(const Trace& trace, Policy& policy, std::size_t blocks);
    // Plays the next n requests, or those that are left: for each, how many of its blocks hit.
    std::vector<std::uint32_t> run(std::size_t n);

 private:
    std::uint32_t play(std::size_t request);
    void evict(std::size_t n);

    const Trace& trace_;
    Policy& policy_;
    std::size_t blocks_, next_ = 0, held_ = 0;
    std::vector<Id> id_of_;               // by node
    std::vector<std::uint32_t> node_of_;  // by id
    std::vector<Id> free_;
    std::vector<Id> ids_, present_, fresh_, parents_;  // of one request
    std::vector<Name> known_, names_;                  // of those present, of the fresh ones
};

// The most that any choice could have had, knowing the future: L. A. Belady, "A study of
// replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. What is
// wanted last goes first, and of a chain its end; a block is never wanted before the one that it
// follows, so what stays is always whole chains.
class Optimum {
 public:
    Optimum(const Trace& trace, std::size_t blocks);
    std::vector<std::uint32_t> run(std::size_t n);

 private:
    struct Use {
        std::uint32_t request, depth;  // when it is wanted again, how many blocks are before it
        auto operator<=>(const Use&) const = default;
    };

    std::uint32_t play(std::size_t request);

    const Trace& trace_;
    std::size_t blocks_, next_ = 0, held_ = 0;
    std::vector<std::uint32_t> again_;  // for each access the request that wants its block next
    std::vector<Use> use_;              // by node, of those that are held
    std::vector<bool> here_;
    std::priority_queue<std::pair<Use, std::uint32_t>> order_;
};

}  // namespace kvtier
