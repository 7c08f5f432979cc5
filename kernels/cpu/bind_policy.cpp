// The policies as Python classes: batches come as bytes.
#include <nanobind/nanobind.h>

#include "bytes.h"
#include "classics.h"
#include "lru.h"
#include "prefix.h"
#include "value.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvtier;

namespace {

// Where nobody can say names, a block is its own.
std::vector<Name> names_in(const nb::bytes& names, std::span<const Id> ids) {
    if (names.size() != 0 && names.size() != ids.size() * sizeof(Name))
        throw std::invalid_argument("a name of 8 bytes for each id, or none");
    std::vector<Name> called(ids.begin(), ids.end());
    if (names.size() != 0) std::memcpy(called.data(), names.c_str(), names.size());
    return called;
}

// Nor parents: then it is at a root.
void added(Policy& policy, const nb::bytes& ids, const nb::bytes& names, const nb::bytes& parents) {
    std::span<const Id> list = ids_in(ids), above = ids_in(parents);
    const std::vector<Name> called = names_in(names, list);
    if (above.size() != 0 && above.size() != list.size())
        throw std::invalid_argument("a parent for each id, or none");
    check_ids(list);
    for (Id parent : above)
        if (parent != none) check_ids({&parent, 1});
    const std::vector<Id> roots(above.empty() ? list.size() : 0, none);
    policy.added(list, called, above.empty() ? std::span<const Id>(roots) : above);
}

template <void (Policy::*tell)(std::span<const Id>)>
void batch(Policy& policy, const nb::bytes& ids) {
    (policy.*tell)(ids_in(ids));
}

}  // namespace

void bind_policy(nb::module_& m) {
    nb::class_<Policy>(m, "Policy", "What every native policy does.")
        .def("now", &Policy::now, "seconds"_a)
        .def("added", &added, "ids"_a, "names"_a = nb::bytes("", 0), "parents"_a = nb::bytes("", 0))
        .def(
            "wanted",
            [](Policy& policy, const nb::bytes& ids, const nb::bytes& names) {
                policy.wanted(ids_in(ids), names_in(names, ids_in(ids)));
            },
            "ids"_a, "names"_a = nb::bytes("", 0))
        .def("refreshed", &batch<&Policy::refreshed>, "ids"_a)
        .def("held", &batch<&Policy::held>, "ids"_a)
        .def("freed", &batch<&Policy::freed>, "ids"_a)
        .def("left", &batch<&Policy::left>, "ids"_a)
        .def("gone", &batch<&Policy::gone>, "ids"_a)
        .def("demoted", &batch<&Policy::demoted>, "ids"_a)
        .def(
            "hinted",
            [](Policy& policy, const nb::bytes& ids, double importance) {
                policy.hinted(ids_in(ids), importance);
            },
            "ids"_a, "importance"_a)
        .def(
            "victims",
            [](const Policy& policy, std::size_t n) { return ids_out(policy.victims(n)); }, "n"_a)
        .def("__len__", &Policy::size)
        .def("memory_bytes", &Policy::memory_bytes);
    nb::class_<Lru, Policy>(m, "Lru",
                            "Least recently used: the block that nobody wanted longest goes first.")
        .def(nb::init<>());
    nb::class_<Lfu, Policy>(m, "Lfu", "Least frequently used, with counts that age.")
        .def(nb::init<>());
    nb::class_<Arc, Policy>(m, "Arc", "Adaptive replacement.").def(nb::init<>());
    nb::class_<S3Fifo, Policy>(m, "S3Fifo", "Three queues, first in, first out.").def(nb::init<>());
    nb::class_<Prefix, Policy>(m, "Prefix", "Least recently used chains, what is shared last.")
        .def(nb::init<>());
    nb::class_<Attention, Policy>(m, "Attention", "Prefix, with an engine's hints.")
        .def(nb::init<>());
    nb::class_<Value, Policy>(m, "Value", "Expected reuse, learned as it goes.")
        .def(nb::init<>())
        .def_static(
            "with_constants",
            [](double to_leave, double back, double fading, double judgements, double few,
               std::uint64_t memory, std::uint64_t more_seen) {
                return new Value({to_leave, back, fading, judgements, few, memory, more_seen});
            },
            nb::kw_only(), "to_leave"_a = Constants{}.to_leave, "back"_a = Constants{}.back,
            "fading"_a = Constants{}.fading, "judgements"_a = Constants{}.judgements,
            "few"_a = Constants{}.few, "memory"_a = Constants{}.memory,
            "more_seen"_a = Constants{}.more_seen, nb::rv_policy::take_ownership,
            "For measurements: other constants than its own.");
}
