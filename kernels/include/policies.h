// The eviction policies, by the names that a configuration uses. To add one, write cpu/NAME.cpp,
// which defines make_NAME, and add its line here.
#pragma once
#include <memory>

#include "policy.h"

#define KVTIER_POLICIES(POLICY) \
    POLICY(lru)                 \
    POLICY(lfu)                 \
    POLICY(arc)                 \
    POLICY(s3fifo)              \
    POLICY(prefix)              \
    POLICY(attention)           \
    POLICY(value)

namespace kvtier {

#define KVTIER_DECLARE(name) std::unique_ptr<Policy> make_##name();
KVTIER_POLICIES(KVTIER_DECLARE)
#undef KVTIER_DECLARE

}  // namespace kvtier
