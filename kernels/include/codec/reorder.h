// Elements of pages in another order: part by part, token by token, head by head; and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::codec {

// Where a page has the element of a part's head, token and dim: at the sum of their three places.
struct Order {
    // What of a part follows one another in a page, so that it need not be moved one by one.
    enum class Together : uint8_t { kNothing, kDims, kTokens, kPairsOfDims, kPairsOfTokens };
    struct Way {
        Together together = Together::kNothing;
        size_t count = 1;  // elements, or so many tokens or dims (of pairs of tokens)
    };

    size_t parts = 0;
    std::vector<uint32_t> heads, tokens, dims;  // of the first part, then of the next
    std::vector<Way> ways;                      // of each part

    // A page as equal pieces, one after the other, of which each is some heads or some tokens of
    // all parts.
    size_t pieces = 1;
    bool by_heads = true;

    bool prepare();  // false unless every place of a page is one element's
    size_t page() const;
};

// Of elements of 2 or 4 bytes.
void reorder(const Order& by, size_t width, const uint8_t* from, uint8_t* to, size_t pages,
             bool back);
// One piece of a page that lies in parts, back as it was.
void reorder_piece(const Order& by, size_t width, const uint8_t* page, size_t piece, uint8_t* to);

}  // namespace kvtier::codec
