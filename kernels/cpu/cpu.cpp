// Run-time dispatch: detects processor features and chooses among the implementations of a kernel.
#include "cpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "blake3.h"

namespace kvtier {
namespace {

Level processor_level() {
#if KVTIER_X86
    // The builtins also ask the operating system: registers that it does not save do not count.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2")
                   ? Level::kVbmi
                   : Level::kAvx512;
    }
    if (avx2) return Level::kAvx2;
    if (__builtin_cpu_supports("sse4.1")) return Level::kSse41;
#endif
    return Level::kScalar;
}

}  // namespace

const char* level_name(Level level) {
    switch (level) {
        case Level::kSse41:
            return "sse41";
        case Level::kAvx2:
            return "avx2";
        case Level::kAvx512:
            return "avx512";
        case Level::kVbmi:
            return "avx512vbmi";
        default:
            return "scalar";
    }
}

Level machine_level() {
    static const Level level = [] {
        const Level best = processor_level();
        const char* wanted = std::getenv("KVTIER_CPU");
        if (wanted == nullptr) return best;
        for (Level limit : {Level::kScalar, Level::kSse41, Level::kAvx2, Level::kAvx512}) {
            if (std::strcmp(wanted, level_name(limit)) == 0) return limit < best ? limit : best;
        }
        return best;
    }();
    return level;
}

Choice::Choice(const char* kind, std::vector<Level> levels) : kind_(kind) {
    for (Level level : levels) {
        if (level <= machine_level()) levels_.push_back(level);
    }
    chosen_ = static_cast<int>(levels_.front());
}

Choice& copy_choice() {
    static Choice choice("copy", {Level::kAvx512, Level::kAvx2, Level::kScalar});
    return choice;
}

Choice& xxh3_choice() {
    static Choice choice("xxh3", {Level::kAvx512, Level::kAvx2, Level::kScalar});
    return choice;
}

Choice& codec_choice() {
    static Choice choice("codec", {Level::kVbmi, Level::kAvx2, Level::kScalar});
    return choice;
}

Choice& blake3_choice() {
    // Each compression depends on the previous one, so latency decides, not width: on Zen 5 the
    // scalar version is a third faster. A trial takes about 50 us, once.
    static Choice choice("blake3", [] {
        std::vector<std::pair<double, Level>> trials;
        for (Level level : {Level::kAvx512, Level::kSse41, Level::kScalar}) {
            if (level <= machine_level()) trials.emplace_back(blake3::trial(level), level);
        }
        std::sort(trials.begin(), trials.end());
        std::vector<Level> levels;
        for (const auto& trial : trials) levels.push_back(trial.second);
        return levels;
    }());
    return choice;
}

}  // namespace kvtier
