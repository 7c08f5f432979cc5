// Elements of pages in another order: as codecs that look at channels want them, and back.
#include "codec/reorder.h"

#include <algorithm>
#include <cstring>

namespace kvtier::codec {
namespace {

template <typename T, bool kBack>
void reorder_page(const Order& by, const uint8_t* from, uint8_t* to) {
    constexpr size_t kWidth = sizeof(T);  // bytes may lie at any address
    const size_t parts = by.parts;
    const size_t heads = by.heads.size() / parts, tokens = by.tokens.size() / parts;
    const size_t dims = by.dims.size() / parts;
    size_t at = 0;
    for (size_t part = 0; part < parts; part++) {
        const uint32_t* dim_at = by.dims.data() + part * dims;
        const bool runs = by.runs[part];
        for (size_t token = 0; token < tokens; token++) {
            for (size_t head = 0; head < heads; head++, at += dims) {
                const size_t base =
                    size_t{by.heads[part * heads + head]} + by.tokens[part * tokens + token];
                if (runs) {
                    std::memcpy(to + (kBack ? base : at) * kWidth,
                                from + (kBack ? at : base) * kWidth, dims * kWidth);
                    continue;
                }
                for (size_t dim = 0; dim < dims; dim++) {
                    const size_t there = base + dim_at[dim], here = at + dim;
                    std::memcpy(to + (kBack ? there : here) * kWidth,
                                from + (kBack ? here : there) * kWidth, kWidth);
                }
            }
        }
    }
}

template <typename T>
void reorder_all(const Order& by, const uint8_t* from, uint8_t* to, size_t pages, bool back) {
    const size_t size = by.page() * sizeof(T);
    for (size_t page = 0; page < pages; page++, from += size, to += size) {
        if (back) {
            reorder_page<T, true>(by, from, to);
        } else {
            reorder_page<T, false>(by, from, to);
        }
    }
}

size_t greatest(const std::vector<uint32_t>& places, size_t part, size_t parts) {
    const size_t each = places.size() / parts;
    const auto first = places.begin() + static_cast<std::ptrdiff_t>(part * each);
    return *std::max_element(first, first + static_cast<std::ptrdiff_t>(each));
}

}  // namespace

bool Order::prepare() {
    for (const auto* places : {&heads, &tokens, &dims}) {
        if (parts == 0 || places->empty() || places->size() % parts != 0) return false;
    }
    runs.assign(parts, 1);
    const size_t each = dims.size() / parts;
    for (size_t part = 0; part < parts; part++) {
        const size_t last = greatest(heads, part, parts) + greatest(tokens, part, parts) +
                            greatest(dims, part, parts);
        if (last >= page()) return false;
        for (size_t dim = 0; dim < each; dim++) {
            if (dims[part * each + dim] != dims[part * each] + dim) runs[part] = 0;
        }
        if (dims[part * each] != 0) runs[part] = 0;
    }
    return true;
}

size_t Order::page() const { return heads.size() / parts * (tokens.size() / parts) * dims.size(); }

void reorder(const Order& by, size_t width, const uint8_t* from, uint8_t* to, size_t pages,
             bool back) {
    if (width == 2) {
        reorder_all<uint16_t>(by, from, to, pages, back);
    } else {
        reorder_all<uint32_t>(by, from, to, pages, back);
    }
}

}  // namespace kvtier::codec
