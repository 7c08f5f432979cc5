// Python's bytes as batches of ids, and back.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace kvtier {

// The number of items in `bytes`; throws unless they are whole. Valid while the object exists.
inline std::size_t count_in(const nanobind::bytes& bytes, std::size_t item_bytes,
                            const char* what) {
    if (bytes.size() % item_bytes) throw std::invalid_argument(what);
    return bytes.size() / item_bytes;
}

inline std::span<const std::uint32_t> ids_in(const nanobind::bytes& bytes) {
    std::size_t n = count_in(bytes, 4, "ids have 4 bytes each");
    return {static_cast<const std::uint32_t*>(bytes.data()), n};
}

inline nanobind::bytes ids_out(const std::vector<std::uint32_t>& ids) {
    return nanobind::bytes(ids.data(), ids.size() * 4);
}

}  // namespace kvtier
