// The page size.
#pragma once

#include <cstdint>

namespace kvtier {

inline constexpr uint64_t kPage = 4096;  // granularity of slots and of generation tables

}  // namespace kvtier
