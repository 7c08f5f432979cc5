// The size of a page.
#pragma once

#include <cstdint>

namespace kvtier {

inline constexpr uint64_t kPage = 4096;  // granularity of slots and of the generation tables

}  // namespace kvtier
