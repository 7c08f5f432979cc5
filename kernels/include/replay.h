// Replays requests that share prefixes, and counts the hits of a cache of a given size.
//
// A block counts as a hit if all blocks before it in its request do. After a request all of its
// blocks count as used; then the cache evicts down to its size, and may evict new blocks.
#pragma once
#include <cstdint>
#include <queue>
#include <span>
#include <tuple>
#include <vector>

#include "policy.h"

namespace kvtier {

// A trace whose blocks are numbered in the order of their first use.
class Trace {
 public:
    Trace(std::span<const std::uint64_t> names, std::span<const std::uint32_t> lengths,
          std::span<const double> seconds, std::span<const double> hints);

    std::size_t requests() const { return seconds_.size(); }
    std::size_t accesses() const { return nodes_.size(); }
    std::size_t unique() const { return names_.size(); }
    // the first request that contains a block twice
    std::int64_t repeats() const { return repeats_; }
    double seconds(std::size_t request) const { return seconds_[request]; }
    // The importance that an engine reported of these blocks; negative: they were looked up or
    // saved
    double hint(std::size_t request) const { return hints_.empty() ? -1 : hints_[request]; }
    Name name(std::uint32_t node) const { return names_[node]; }
    std::span<const std::uint32_t> nodes() const { return nodes_; }
    std::span<const std::uint32_t> nodes(std::size_t request) const {
        return nodes().subspan(starts_[request], starts_[request + 1] - starts_[request]);
    }
    std::size_t start(std::size_t request) const { return starts_[request]; }

 private:
    std::vector<std::uint32_t> nodes_;
    std::vector<std::size_t> starts_;
    std::vector<double> seconds_, hints_;
    std::vector<Name> names_;
    std::int64_t repeats_ = -1;
};

// One tier under a policy; it starts empty.
class Replay {
 public:
    Replay(const Trace& trace, Policy& policy, std::size_t blocks);
    // Replays the next n requests, or the remaining ones. Returns the number of hits of each.
    std::vector<std::uint32_t> run(std::size_t n);

 private:
    std::uint32_t play(std::size_t request);
    void hint(std::size_t request);
    void evict(std::size_t n);

    const Trace& trace_;
    Policy& policy_;
    std::size_t blocks_, next_ = 0, held_ = 0;
    std::vector<Id> id_of_;               // by node
    std::vector<std::uint32_t> node_of_;  // by id
    std::vector<Id> free_;
    std::vector<Id> ids_, present_, fresh_, parents_;  // of one request
    std::vector<Name> known_, names_;                  // of its present blocks, of its new blocks
};

// The highest possible number of hits, computed from the future: L. A. Belady, "A study of
// replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. Evicts
// the block whose next use is last, and in a chain its end. A block is never used without the block
// before it, so complete chains remain.
class Optimum {
 public:
    Optimum(const Trace& trace, std::size_t blocks);
    std::vector<std::uint32_t> run(std::size_t n);

 private:
    struct Use {
        std::uint32_t request, depth;  // the next request that uses it, and its depth
        auto operator<=>(const Use&) const = default;
    };

    std::uint32_t play(std::size_t request);

    const Trace& trace_;
    std::size_t blocks_, next_ = 0, held_ = 0;
    std::vector<std::uint32_t> again_;  // for each access, the request that uses its block next
    std::vector<Use> use_;              // by node, of the blocks in the cache
    std::vector<bool> here_;
    std::priority_queue<std::pair<Use, std::uint32_t>> order_;
};

}  // namespace kvtier
