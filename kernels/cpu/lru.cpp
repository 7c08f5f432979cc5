// The LRU policy and its binding.
#include "lru.h"

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "bytes.h"

namespace kvtier {

Lru::Lru() {
    links_.reach(ends);
    links_[ends] = {ends, ends};
}

void Lru::insert(std::uint64_t at, std::uint32_t prev, std::uint32_t next) {
    auto here = static_cast<std::uint32_t>(at);
    links_[at] = {prev, next};
    links_[prev].next = here;
    links_[next].prev = here;
    ++size_;
}

void Lru::erase(std::uint64_t at) {
    Link link = links_[at];
    links_[link.prev].next = link.next;
    links_[link.next].prev = link.prev;
    links_[at] = {0, 0};
    --size_;
}

void Lru::prefetch(std::span<const std::uint32_t> ids, std::size_t i) const {
    constexpr std::size_t links_ahead = 16, neighbours_ahead = 8;
    if (i + links_ahead < ids.size()) {
        std::uint64_t at = ids[i + links_ahead] + first;
        if (links_.reaches(at)) __builtin_prefetch(&links_[at], 1);
    }
    if (i + neighbours_ahead < ids.size()) {
        std::uint64_t at = ids[i + neighbours_ahead] + first;
        if (!holds(at)) return;
        __builtin_prefetch(&links_[links_[at].prev], 1);
        __builtin_prefetch(&links_[links_[at].next], 1);
    }
}

void Lru::added(std::span<const std::uint32_t> ids) {
    for (std::uint32_t id : ids)
        if (id >= 0xFFFFFFF0) throw std::out_of_range("lru: no block has such an id");
    for (std::size_t i = 0; i < ids.size(); ++i) {
        prefetch(ids, i);
        std::uint64_t at = ids[i] + first;
        links_.reach(at);
        if (holds(at)) erase(at);
        insert(at, links_[ends].prev, ends);
    }
}

void Lru::touched(std::span<const std::uint32_t> ids) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
        prefetch(ids, i);
        std::uint64_t at = ids[i] + first;
        if (!holds(at)) continue;
        erase(at);
        insert(at, links_[ends].prev, ends);
    }
}

void Lru::removed(std::span<const std::uint32_t> ids) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
        prefetch(ids, i);
        std::uint64_t at = ids[i] + first;
        if (holds(at)) erase(at);
    }
}

void Lru::demoted(std::span<const std::uint32_t> ids) {
    for (std::size_t i = ids.size(); i-- > 0;) {
        std::uint64_t at = ids[i] + first;
        if (!holds(at)) continue;
        erase(at);
        insert(at, ends, links_[ends].next);
    }
}

std::vector<std::uint32_t> Lru::victims(std::size_t n) const {
    std::vector<std::uint32_t> ids;
    ids.reserve(n < size_ ? n : size_);
    for (std::uint64_t at = links_[ends].next; at != ends && ids.size() < n; at = links_[at].next)
        ids.push_back(static_cast<std::uint32_t>(at - first));
    return ids;
}

}  // namespace kvtier

void bind_policy(nanobind::module_& m) {
    namespace nb = nanobind;
    using kvtier::Lru;
    nb::class_<Lru>(m, "Lru",
                    "Least recently used: the block that nobody wanted longest goes first.")
        .def(nb::init<>())
        .def(
            "added", [](Lru& lru, nb::bytes ids) { lru.added(kvtier::ids_in(ids)); },
            nb::arg("ids"))
        .def(
            "touched", [](Lru& lru, nb::bytes ids) { lru.touched(kvtier::ids_in(ids)); },
            nb::arg("ids"))
        .def(
            "removed", [](Lru& lru, nb::bytes ids) { lru.removed(kvtier::ids_in(ids)); },
            nb::arg("ids"))
        .def(
            "demoted", [](Lru& lru, nb::bytes ids) { lru.demoted(kvtier::ids_in(ids)); },
            nb::arg("ids"))
        .def(
            "hinted", [](Lru&, nb::bytes ids, double) { kvtier::ids_in(ids); }, nb::arg("ids"),
            nb::arg("importance"))
        .def(
            "victims",
            [](const Lru& lru, std::size_t n) { return kvtier::ids_out(lru.victims(n)); },
            nb::arg("n"))
        .def("__len__", &Lru::size)
        .def("memory_bytes", &Lru::memory_bytes);
}
