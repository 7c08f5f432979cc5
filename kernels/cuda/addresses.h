// Values in the device's memory, by address.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace kvtier::cuda {

template <typename T>
KVTIER_DEVICE T* at(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

// The address is a multiple of the value's size.
template <typename T>
KVTIER_DEVICE T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, __builtin_assume_aligned(from, sizeof value), sizeof value);
    return value;
}
template <typename T>
KVTIER_DEVICE void store(uint8_t* to, T value) {
    std::memcpy(__builtin_assume_aligned(to, sizeof value), &value, sizeof value);
}

}  // namespace kvtier::cuda
