// Elements of pages in another order: part by part, token by token, head by head; and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::codec {

// Where a page has the element of a part's head, token and dim: at the sum of their three places.
struct Order {
    size_t parts = 0;
    std::vector<uint32_t> heads, tokens, dims;  // of the first part, then of the next
    std::vector<uint8_t> runs;                  // a part's dims follow one another

    bool prepare();  // false where a place is outside of the page
    size_t page() const;
};

// Of elements of 2 or 4 bytes. Every place of a page is one element's, or what is written to means
// nothing.
void reorder(const Order& by, size_t width, const uint8_t* from, uint8_t* to, size_t pages,
             bool back);

}  // namespace kvtier::codec
