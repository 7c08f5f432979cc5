// Replays requests that share prefixes, and counts the hits of a cache of a given size.
//
// A block counts as a hit if all blocks before it in its request do. After a request all of its
// blocks count as used; then the cache evicts down to its size, and may evict new blocks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <queue>
#include <span>
#include <stdexcept>
#include <vector>

#include "bytes.h"
#include "policy.h"
#include "unlocked.h"

namespace kvtier {

namespace {

constexpr std::uint32_t never = 0xFFFFFFFF;

// A trace whose blocks are numbered in the order of their first use.
class Trace {
 public:
    Trace(std::span<const std::uint64_t> names, std::span<const std::uint32_t> lengths,
          std::span<const double> seconds, std::span<const double> hints)
        : seconds_(seconds.begin(), seconds.end()), hints_(hints.begin(), hints.end()) {
        if (!hints.empty() && hints.size() != seconds.size())
            throw std::invalid_argument("need a hint per request, or no hints");
        if (lengths.size() != seconds.size())
            throw std::invalid_argument("need a length and a time per request");
        if (names.size() >= max_records || lengths.size() >= never)
            throw std::length_error("the trace has too many blocks");
        starts_.reserve(lengths.size() + 1);
        starts_.push_back(0);
        for (std::uint32_t length : lengths) starts_.push_back(starts_.back() + length);
        if (starts_.back() != names.size())
            throw std::invalid_argument("the lengths do not match the names");
        // Open addressing over mixed names, at most half full.
        std::size_t places = std::bit_ceil(2 * names.size() + 2), mask = places - 1;
        std::vector<std::uint32_t> table(places, never);
        std::vector<std::uint32_t> last;  // by node: the last request that contained it
        nodes_.reserve(names.size());
        for (std::size_t request = 0; request < lengths.size(); ++request)
            for (std::size_t i = starts_[request]; i < starts_[request + 1]; ++i) {
                // A name may be a small number; this makes it look like a hash.
                Name name = mix(names[i] + 0x9E3779B97F4A7C15);
                std::size_t at = name & mask;
                while (table[at] != never && names_[table[at]] != name) at = (at + 1) & mask;
                if (table[at] == never) {
                    table[at] = static_cast<std::uint32_t>(names_.size());
                    names_.push_back(name);
                    last.push_back(never);
                }
                std::uint32_t node = table[at];
                if (last[node] == request && repeats_ < 0)
                    repeats_ = static_cast<std::int64_t>(request);
                last[node] = static_cast<std::uint32_t>(request);
                nodes_.push_back(node);
            }
    }

    std::size_t requests() const { return seconds_.size(); }
    std::size_t accesses() const { return nodes_.size(); }
    std::size_t unique() const { return names_.size(); }
    // the first request that contains a block twice
    std::int64_t repeats() const { return repeats_; }
    double seconds(std::size_t request) const { return seconds_[request]; }
    // The importance that an engine reported of these blocks; negative if it used or saved them.
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
    Replay(const Trace& trace, Policy& policy, std::size_t blocks)
        : trace_(trace), policy_(policy), blocks_(blocks), id_of_(trace.unique(), none) {
        if (policy.size()) throw std::invalid_argument("a replay needs an empty policy");
    }
    // Replays the next n requests, or the remaining ones. Returns the number of hits of each.
    std::vector<std::uint32_t> run(std::size_t n) {
        std::vector<std::uint32_t> hits;
        for (; n && next_ < trace_.requests(); --n) hits.push_back(play(next_++));
        return hits;
    }

 private:
    std::uint32_t play(std::size_t request) {
        auto nodes = trace_.nodes(request);
        policy_.now(trace_.seconds(request));
        ids_.clear(), present_.clear(), fresh_.clear(), parents_.clear();
        known_.clear(), names_.clear();
        if (trace_.hint(request) >= 0) {
            hint(request);
            return 0;
        }
        std::uint32_t hits = 0;
        for (std::uint32_t node : nodes) {
            Id id = id_of_[node];
            if (id != none) {
                if (present_.size() == ids_.size()) ++hits;
                present_.push_back(id);
                known_.push_back(trace_.name(node));
            } else {
                if (free_.empty()) {
                    free_.push_back(static_cast<Id>(node_of_.size()));
                    node_of_.push_back(0);
                }
                id = free_.back();
                free_.pop_back();
                node_of_[id] = node;
                id_of_[node] = id;
                fresh_.push_back(id);
                names_.push_back(trace_.name(node));
                parents_.push_back(ids_.empty() ? none : ids_.back());
            }
            ids_.push_back(id);
        }
        if (!present_.empty()) policy_.wanted(present_, known_);
        if (fresh_.empty()) return hits;
        policy_.added(fresh_, names_, parents_);
        // Blocks before the new ones in the chain become as recent as these.
        if (!present_.empty()) policy_.refreshed(ids_);
        held_ += fresh_.size();
        if (held_ > blocks_) evict(held_ - blocks_);
        return hits;
    }
    // As the catalog: blocks without importance are evicted first, a chain's end before its
    // head.
    void hint(std::size_t request) {
        if (trace_.hint(request) > 1) return;  // an announcement: one tier reads nothing
        for (std::uint32_t node : trace_.nodes(request)) {
            if (id_of_[node] == none) continue;
            present_.push_back(id_of_[node]);
            known_.push_back(trace_.name(node));
        }
        policy_.hinted(present_, known_, trace_.hint(request));
        if (trace_.hint(request) <= 0) {
            std::ranges::reverse(present_);
            policy_.demoted(present_);
        }
    }
    void evict(std::size_t n) {
        std::vector<Id> victims = policy_.victims(n);
        if (victims.size() != n) throw std::logic_error("the policy returned too few victims");
        for (Id id : victims) {
            if (id >= node_of_.size() || id_of_[node_of_[id]] != id)
                throw std::logic_error("the policy returned a victim that is not in the cache");
            id_of_[node_of_[id]] = none;
            free_.push_back(id);
        }
        policy_.gone(victims);
        held_ -= n;
    }

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
    Optimum(const Trace& trace, std::size_t blocks)
        : trace_(trace),
          blocks_(blocks),
          again_(trace.accesses()),
          use_(trace.unique()),
          here_(trace.unique()) {
        std::vector<std::uint32_t> wanted(trace.unique(), never);
        for (std::size_t request = trace.requests(); request-- > 0;) {
            if (trace.hint(request) >= 0) continue;
            auto nodes = trace.nodes(request);
            for (std::size_t i = 0; i < nodes.size(); ++i) {
                again_[trace.start(request) + i] = wanted[nodes[i]];
                wanted[nodes[i]] = static_cast<std::uint32_t>(request);
            }
        }
    }
    std::vector<std::uint32_t> run(std::size_t n) {
        std::vector<std::uint32_t> hits;
        for (; n && next_ < trace_.requests(); --n) hits.push_back(play(next_++));
        return hits;
    }

 private:
    struct Use {
        std::uint32_t request, depth;  // the next request that uses it, and its depth
        auto operator<=>(const Use&) const = default;
    };

    std::uint32_t play(std::size_t request) {
        if (trace_.hint(request) >= 0) return 0;
        auto nodes = trace_.nodes(request);
        std::uint32_t hits = 0;
        while (hits < nodes.size() && here_[nodes[hits]]) ++hits;
        for (std::size_t i = 0; i < nodes.size(); ++i) {
            std::uint32_t node = nodes[i];
            use_[node] = {again_[trace_.start(request) + i], static_cast<std::uint32_t>(i)};
            order_.push({use_[node], node});
            if (!here_[node]) ++held_;
            here_[node] = true;
        }
        while (held_ > blocks_) {
            auto [use, node] = order_.top();
            order_.pop();
            if (!here_[node] || use_[node] != use) continue;  // used since
            here_[node] = false;
            --held_;
        }
        return hits;
    }

    const Trace& trace_;
    std::size_t blocks_, next_ = 0, held_ = 0;
    std::vector<std::uint32_t> again_;  // for each access, the request that uses its block next
    std::vector<Use> use_;              // by node, of the blocks in the cache
    std::vector<bool> here_;
    std::priority_queue<std::pair<Use, std::uint32_t>> order_;
};

}  // namespace
}  // namespace kvtier

void bind_replay(nanobind::module_& m) {
    namespace nb = nanobind;
    using namespace nb::literals;
    using namespace kvtier;

    // Copies the items, because those of a bytes object may be unaligned.
    auto items = []<class T>(const nb::bytes& bytes, T) {
        std::vector<T> found(count_in(bytes, sizeof(T), "not a whole number of items"));
        if (!found.empty()) std::memcpy(found.data(), bytes.data(), bytes.size());
        return found;
    };
    nb::class_<Trace>(m, "Trace", "Requests, with blocks numbered in the order of their first use.")
        .def(
            "__init__",
            [items](Trace* self, nb::bytes names, nb::bytes lengths, nb::bytes seconds,
                    nb::bytes hints) {
                new (self) Trace(items(names, std::uint64_t{}), items(lengths, std::uint32_t{}),
                                 items(seconds, double{}), items(hints, double{}));
            },
            "names"_a, "lengths"_a, "seconds"_a, "hints"_a = nb::bytes("", 0))
        .def_prop_ro("requests", &Trace::requests)
        .def_prop_ro("accesses", &Trace::accesses)
        .def_prop_ro("unique", &Trace::unique)
        .def_prop_ro("repeats",
                     [](const Trace& trace) {
                         return trace.repeats() < 0 ? std::nullopt : std::optional(trace.repeats());
                     })
        .def("nodes", [](const Trace& trace) {
            auto nodes = trace.nodes();
            return nb::bytes(nodes.data(), nodes.size_bytes());
        });
    auto run = [](auto& replay, std::size_t n) {
        std::vector<std::uint32_t> hits;
        {
            const Unlocked unlocked;
            hits = replay.run(n);
        }
        return ids_out(hits);
    };
    nb::class_<Replay>(m, "Replay", "One tier under a policy.")
        .def(nb::init<const Trace&, Policy&, std::size_t>(), "trace"_a, "policy"_a, "blocks"_a,
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("run", [run](Replay& replay, std::size_t n) { return run(replay, n); }, "requests"_a);
    nb::class_<Optimum>(m, "Optimum", "One tier with knowledge of the future.")
        .def(nb::init<const Trace&, std::size_t>(), "trace"_a, "blocks"_a, nb::keep_alive<1, 2>())
        .def("run", [run](Optimum& best, std::size_t n) { return run(best, n); }, "requests"_a);
}
