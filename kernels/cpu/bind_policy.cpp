// The Python bindings of the policies: batches are passed as bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "bytes.h"
#include "policies.h"
#include "value.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvtier;

namespace {

// The names of blocks, valid while the bytes live. Without names, the name of a block is its id.
class Names {
 public:
    Names(const nb::bytes& names, std::span<const Id> ids) {
        if (names.size() != 0 && names.size() != ids.size() * sizeof(Name))
            throw std::invalid_argument("need 8 bytes of name per id, or no names");
        if (names.size() != 0 &&
            reinterpret_cast<std::uintptr_t>(names.c_str()) % alignof(Name) == 0) {
            span_ = {static_cast<const Name*>(names.data()), ids.size()};
            return;
        }
        copied_.assign(ids.begin(), ids.end());
        if (names.size() != 0) std::memcpy(copied_.data(), names.c_str(), names.size());
        span_ = copied_;
    }
    Names(const Names&) = delete;
    Names& operator=(const Names&) = delete;
    operator std::span<const Name>() const { return span_; }

 private:
    std::span<const Name> span_;
    std::vector<Name> copied_;
};

// Without parents, the blocks are roots.
void added(Policy& policy, const nb::bytes& ids, const nb::bytes& names, const nb::bytes& parents) {
    std::span<const Id> list = ids_in(ids), above = ids_in(parents);
    const Names called(names, list);
    if (above.size() != 0 && above.size() != list.size())
        throw std::invalid_argument("need one parent per id, or no parents");
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

struct Entry {
    const char* name;
    std::unique_ptr<Policy> (*make)();
};

#define KVTIER_ENTRY(name) {#name, &make_##name},
constexpr Entry policies[] = {KVTIER_POLICIES(KVTIER_ENTRY)};
#undef KVTIER_ENTRY

std::unique_ptr<Policy> make_policy(const std::string& name) {
    for (const Entry& entry : policies)
        if (name == entry.name) return entry.make();
    throw std::invalid_argument("unknown policy: " + name);
}

}  // namespace

void bind_policy(nb::module_& m) {
    nb::class_<Policy>(m, "Policy", "The interface of all native policies.")
        .def("now", &Policy::now, "seconds"_a)
        .def("added", &added, "ids"_a, "names"_a = nb::bytes("", 0), "parents"_a = nb::bytes("", 0))
        .def(
            "wanted",
            [](Policy& policy, const nb::bytes& ids, const nb::bytes& names) {
                policy.wanted(ids_in(ids), Names(names, ids_in(ids)));
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
            [](Policy& policy, const nb::bytes& ids, double importance, const nb::bytes& names) {
                policy.hinted(ids_in(ids), Names(names, ids_in(ids)), importance);
            },
            "ids"_a, "importance"_a, "names"_a = nb::bytes("", 0))
        .def(
            "victims",
            [](const Policy& policy, std::size_t n) { return ids_out(policy.victims(n)); }, "n"_a)
        .def("__len__", &Policy::size)
        .def("memory_bytes", &Policy::memory_bytes);
    m.def("make_policy", &make_policy, "name"_a,
          "A new policy of this name; ValueError for any other.");
    nb::list names;
    for (const auto& [name, make] : policies) names.append(name);
    m.attr("POLICIES") = nb::tuple(names);
    m.def(
        "value_policy",
        [](double to_leave, double back, double fading, double judgements, double few,
           std::uint64_t memory, std::uint64_t more_seen) -> std::unique_ptr<Policy> {
            return std::make_unique<Value>(
                Constants{to_leave, back, fading, judgements, few, memory, more_seen});
        },
        nb::kw_only(), "to_leave"_a = Constants{}.to_leave, "back"_a = Constants{}.back,
        "fading"_a = Constants{}.fading, "judgements"_a = Constants{}.judgements,
        "few"_a = Constants{}.few, "memory"_a = Constants{}.memory,
        "more_seen"_a = Constants{}.more_seen,
        "The value policy with other constants, for measurements.");
}
