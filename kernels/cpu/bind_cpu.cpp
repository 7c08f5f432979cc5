// The Python bindings of processor features and of the choice of kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cpu.h"
#include "unlocked.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace nb = nanobind;

namespace kvtier {
namespace {

Choice& choice_of(const std::string& kind) {
    for (Choice* choice : {&copy_choice(), &xxh3_choice(), &codec_choice(), &blake3_choice()}) {
        if (kind == choice->kind()) return *choice;
    }
    throw nb::value_error(
        ("unknown kind of kernel '" + kind + "': must be copy, xxh3, codec, blake3").c_str());
}

}  // namespace
}  // namespace kvtier

void bind_cpu(nb::module_& m) {
    using namespace kvtier;
    m.def("cpu_features", [] {
        nb::dict features;
#if KVTIER_X86
        __builtin_cpu_init();
        features["sse41"] = static_cast<bool>(__builtin_cpu_supports("sse4.1"));
        features["avx2"] = static_cast<bool>(__builtin_cpu_supports("avx2"));
        features["avx512f"] = static_cast<bool>(__builtin_cpu_supports("avx512f"));
        features["avx512vbmi2"] = static_cast<bool>(__builtin_cpu_supports("avx512vbmi2"));
        features["avx512vl"] = static_cast<bool>(__builtin_cpu_supports("avx512vl"));
        // Before Zen 3, AMD's processors take tens of cycles for a deposit of bits.
        features["fast_pdep"] = __builtin_cpu_supports("bmi2") && !__builtin_cpu_is("amdfam15h") &&
                                !__builtin_cpu_is("amdfam17h");
#endif
        features["level"] = level_name(machine_level());
        return features;
    });
    m.def(
        "implementations",
        [](const std::string& kind) {
            std::vector<std::string> names;
            for (Level level : choice_of(kind).levels()) names.emplace_back(level_name(level));
            return names;
        },
        nb::arg("kind"));
    m.def(
        "force",
        [](const std::string& kind, const std::string& impl) {
            Choice& choice = choice_of(kind);
            if (impl == "auto") return choice.choose(choice.levels().front());
            for (Level level : choice.levels()) {
                if (impl == level_name(level)) return choice.choose(level);
            }
            throw nb::value_error(
                ("no implementation '" + impl + "' of " + kind + " on this machine").c_str());
        },
        nb::arg("kind"), nb::arg("impl"));
    m.def("trim_heaps", [] {
#ifdef __GLIBC__
        const Unlocked unlocked;
        malloc_trim(0);
#endif
    });
}
