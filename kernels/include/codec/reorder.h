// Orders the elements of pages by part, token and head; and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::codec {

// The position of an element in a page: the sum of those of its head, token and dim in its part.
struct Order {
    // Which elements of a part are contiguous in a page and can be moved together.
    enum class Together : uint8_t { kNothing, kDims, kTokens, kPairsOfDims, kPairsOfTokens };
    struct Way {
        Together together = Together::kNothing;
        size_t count = 1;  // of contiguous elements, or of tokens or dims (in pairs of tokens)
    };

    size_t parts = 0;
    std::vector<uint32_t> heads, tokens, dims;  // of the first part, then of the next
    std::vector<Way> ways;                      // one per part

    // Divides a page into equal contiguous pieces: some heads or some tokens of all parts.
    size_t pieces = 1;
    bool by_heads = true;

    bool prepare();  // false unless each position of a page has exactly one element
    size_t page() const;
};

// Elements have 2 or 4 bytes.
void reorder(const Order& by, size_t width, const uint8_t* from, uint8_t* to, size_t pages,
             bool back);
// Restores one piece of a page from its parts.
void reorder_piece(const Order& by, size_t width, const uint8_t* page, size_t piece, uint8_t* to);

}  // namespace kvtier::codec
