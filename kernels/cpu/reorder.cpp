// Puts the elements of pages into the order that channel codecs need, and back.
#include "codec/reorder.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "codec/codec.h"

namespace kvtier::codec {
namespace {

using Together = Order::Together;

constexpr size_t kLane = 16;  // bytes; the unit of the registers of each level

// A piece of a page: these heads and tokens; and how many elements of the page precede it.
struct Piece {
    size_t head, heads, token, tokens;
    size_t before = 0;
};

// One part of a page, and its positions in the page.
struct Part {
    size_t heads, tokens, dims;
    const uint32_t *head_at, *token_at, *dim_at;
    Order::Way way;
    Piece piece{};

    size_t ours(size_t token, size_t head) const { return (token * heads + head) * dims; }
    size_t theirs(size_t token, size_t head) const {
        return size_t{head_at[head]} + token_at[token] - piece.before;
    }
};

// --- one by one, and runs ------------------------------------------------------------------------

template <size_t kWidth, bool kBack>
void move_elements(const Part& part, size_t head, size_t dim, const uint8_t* from, uint8_t* to) {
    for (size_t token = part.piece.token; token < part.piece.tokens; token++) {
        const size_t here = part.ours(token, head), there = part.theirs(token, head);
        for (size_t i = dim; i < part.dims; i++) {
            const size_t a = here + i, b = there + part.dim_at[i];
            std::memcpy(to + (kBack ? b : a) * kWidth, from + (kBack ? a : b) * kWidth, kWidth);
        }
    }
}

template <size_t kBytes>
KVTIER_LOOP void copy_run(uint8_t* to, const uint8_t* from, size_t nbytes) {
    constexpr size_t kFew = 512;  // below this a call costs more than the copy
    if (nbytes > kFew || nbytes % kBytes != 0) {
        std::memcpy(to, from, nbytes);
        return;
    }
    for (size_t i = 0; i < nbytes; i += kBytes) std::memcpy(to + i, from + i, kBytes);
}

template <size_t kBytes, size_t kWidth, bool kBack>
KVTIER_LOOP void move_runs(const Part& part, const uint8_t* from, uint8_t* to) {
    const Piece& piece = part.piece;
    const size_t heads = part.way.count == part.dims ? 1 : piece.heads - piece.head;
    for (size_t token = piece.token; token < piece.tokens; token++) {
        for (size_t head = piece.head; head < piece.heads; head += heads) {
            const size_t a = part.ours(token, head) * kWidth;
            const size_t b = (part.theirs(token, head) + part.dim_at[0]) * kWidth;
            copy_run<kBytes>(to + (kBack ? b : a), from + (kBack ? a : b),
                             heads * part.dims * kWidth);
        }
    }
}

// --- matrices turned round -----------------------------------------------------------------------

// Vectors of the compiler's extension: each level compiles them differently. Passed by reference,
// because not every level has registers for them.
template <typename Unit, size_t kBytes>
struct Vector {
    typedef Unit Of __attribute__((vector_size(kBytes)));
};
template <size_t kBytes>
using Bytes = typename Vector<uint8_t, kBytes>::Of;

// Selects units of two vectors by position; positions of the second follow those of the first.
template <size_t... kAt, typename Out, typename In>
KVTIER_LOOP void shuffle(Out& out, const In& a, const In& b) {
#if __has_builtin(__builtin_shufflevector)
    out = __builtin_shufflevector(a, b, kAt...);
#else  // before GCC 12
    if constexpr (sizeof(out) == sizeof(a)) {
        out = __builtin_shuffle(a, b, Out{kAt...});
    } else {
        constexpr size_t kUnits = sizeof(a) / sizeof(a[0]);
        out = Out{(kAt < kUnits ? a[kAt % kUnits] : b[kAt % kUnits])...};
    }
#endif
}

// Interleaves the lower or upper halves of each lane of two registers, unit by unit.
template <typename Unit, size_t kBytes, bool kUpper, size_t... kAt>
KVTIER_LOOP void zip(Bytes<kBytes>& out, const Bytes<kBytes>& a, const Bytes<kBytes>& b,
                     std::index_sequence<kAt...>) {
    using Units = typename Vector<Unit, kBytes>::Of;
    constexpr size_t kOfLane = kLane / sizeof(Unit);
    Units units;
    shuffle<(kAt % 2 * sizeof...(kAt) + kAt / kOfLane * kOfLane + (kUpper ? kOfLane / 2 : 0) +
             kAt % kOfLane / 2)...>(units, reinterpret_cast<Units>(a), reinterpret_cast<Units>(b));
    out = reinterpret_cast<Bytes<kBytes>>(units);
}

template <size_t kBytes, size_t... kAt>
KVTIER_LOOP void side_by_side(Bytes<kBytes>& out, const Bytes<kBytes / 2>& a,
                              const Bytes<kBytes / 2>& b, std::index_sequence<kAt...>) {
    using Half = typename Vector<uint64_t, kBytes / 2>::Of;
    typename Vector<uint64_t, kBytes>::Of whole;
    shuffle<kAt...>(whole, reinterpret_cast<Half>(a), reinterpret_cast<Half>(b));
    out = reinterpret_cast<Bytes<kBytes>>(whole);
}

// Loads kBytes bytes: each lane from another row.
template <size_t kBytes, typename Rows>
KVTIER_LOOP void load_lanes(Bytes<kBytes>& out, const uint8_t* from, const Rows& rows, size_t row,
                            size_t apart) {
    if constexpr (kBytes == kLane) {
        std::memcpy(&out, from + rows(row), kLane);
    } else {
        constexpr size_t kLanes = kBytes / kLane;
        Bytes<kBytes / 2> a, b;
        load_lanes<kBytes / 2>(a, from, rows, row, apart);
        load_lanes<kBytes / 2>(b, from, rows, row + kLanes / 2 * apart, apart);
        side_by_side<kBytes>(out, a, b, std::make_index_sequence<kBytes / 8>());
    }
}

// The positions of rows or columns of a matrix, in bytes.
struct Listed {
    const uint32_t* at;
    size_t step, width;
    KVTIER_LOOP size_t operator()(size_t i) const { return at[i * step] * width; }
};
struct Alike {
    size_t step;
    KVTIER_LOOP size_t operator()(size_t i) const { return i * step; }
};

// Transposes as many rows as fit into a register, and one lane of each: as many columns. Each
// interleaving of register halves rotates the bits of a unit's position (register, place in its
// lane) by one, until the bits of registers and places are exchanged.
template <typename Unit, size_t kBytes, typename Rows, typename Columns>
KVTIER_LOOP void turn_tile(const uint8_t* from, const Rows& rows, uint8_t* to,
                           const Columns& columns) {
    constexpr size_t kAcross = kLane / sizeof(Unit);
    constexpr std::make_index_sequence<kBytes / sizeof(Unit)> kAll;
    Bytes<kBytes> registers[kAcross], zipped[kAcross];
    for (size_t i = 0; i < kAcross; i++) {
        load_lanes<kBytes>(registers[i], from, rows, i, kAcross);
    }
    for (size_t stage = 1; stage < kAcross; stage *= 2) {
        for (size_t i = 0; i < kAcross / 2; i++) {
            const Bytes<kBytes>&a = registers[i], &b = registers[kAcross / 2 + i];
            zip<Unit, kBytes, false>(zipped[2 * i], a, b, kAll);
            zip<Unit, kBytes, true>(zipped[2 * i + 1], a, b, kAll);
        }
        for (size_t i = 0; i < kAcross; i++) registers[i] = zipped[i];
    }
    for (size_t i = 0; i < kAcross; i++) std::memcpy(to + columns(i), &registers[i], kBytes);
}

// The tokens and dims of a head; a unit is one of them, or several consecutive ones.
template <typename Unit, size_t kBytes, size_t kWidth, bool kBack>
KVTIER_LOOP void turn_head(const Part& part, size_t head, const uint8_t* from, uint8_t* to) {
    constexpr size_t kDims = sizeof(Unit) / kWidth;  // per unit
    constexpr size_t kAcross = kLane / sizeof(Unit), kRows = kBytes / sizeof(Unit);
    constexpr size_t kTokens = kBack ? kRows : kAcross, kUnits = kBack ? kAcross : kRows;
    const size_t fit = part.dims / (kUnits * kDims) * kUnits * kDims;
    const Alike mine{part.heads * part.dims * kWidth};
    for (size_t token = part.piece.token; token < part.piece.tokens; token += kTokens) {
        for (size_t dim = 0; dim < fit; dim += kUnits * kDims) {
            const Listed its{part.dim_at + dim, kDims, kWidth};
            const size_t here = (part.ours(token, head) + dim) * kWidth;
            const size_t there = part.theirs(token, head) * kWidth;
            if constexpr (kBack) {
                turn_tile<Unit, kBytes>(from + here, mine, to + there, its);
            } else {
                turn_tile<Unit, kBytes>(from + there, its, to + here, mine);
            }
        }
    }
    move_elements<kWidth, kBack>(part, head, fit, from, to);
}

template <typename Unit, size_t kBytes, size_t kWidth, bool kBack>
KVTIER_LOOP bool turned(const Part& part, const uint8_t* from, uint8_t* to) {
    constexpr size_t kTokens = (kBack ? kBytes : kLane) / sizeof(Unit);
    constexpr size_t kUnits = (kBack ? kLane : kBytes) / sizeof(Unit);
    const Piece& piece = part.piece;
    if (part.way.count % kTokens != 0 || (piece.tokens - piece.token) % kTokens != 0 ||
        part.dims < kUnits * sizeof(Unit) / kWidth) {
        return false;
    }
    for (size_t head = piece.head; head < piece.heads; head++) {
        turn_head<Unit, kBytes, kWidth, kBack>(part, head, from, to);
    }
    return true;
}

// Interleaves two tokens unit by unit, or separates them: as many as fit into a register.
template <size_t kBytes, size_t kWidth, bool kBack, typename Unit, size_t... kAt>
KVTIER_LOOP void move_pairs(const Part& part, const uint8_t* from, uint8_t* to,
                            std::index_sequence<kAt...>) {
    using Units = typename Vector<Unit, kBytes>::Of;
    constexpr size_t kAll = sizeof...(kAt), kDims = kAll / 2;
    const size_t fit = part.dims / kDims * kDims;
    for (size_t head = part.piece.head; head < part.piece.heads; head++) {
        for (size_t token = part.piece.token; token < part.piece.tokens; token += 2) {
            const size_t first = part.ours(token, head), second = part.ours(token + 1, head);
            for (size_t dim = 0; dim < fit; dim += kDims) {
                const size_t a = (first + dim) * kWidth, b = (second + dim) * kWidth;
                const size_t pairs = (part.theirs(token, head) + part.dim_at[dim]) * kWidth;
                Bytes<kBytes> found;
                if constexpr (kBack) {
                    Bytes<kBytes / 2> one, other;
                    std::memcpy(&one, from + a, kBytes / 2);
                    std::memcpy(&other, from + b, kBytes / 2);
                    side_by_side<kBytes>(found, one, other, std::make_index_sequence<kBytes / 8>());
                } else {
                    std::memcpy(&found, from + pairs, kBytes);
                }
                const auto units = reinterpret_cast<Units>(found);
                Units apart;
                if constexpr (kBack) {
                    shuffle<(kAt % 2 * kDims + kAt / 2)...>(apart, units, units);
                } else {
                    shuffle<(kAt % kDims * 2 + kAt / kDims)...>(apart, units, units);
                }
                found = reinterpret_cast<Bytes<kBytes>>(apart);
                if constexpr (kBack) {
                    std::memcpy(to + pairs, &found, kBytes);
                } else {
                    std::memcpy(to + a, &found, kBytes / 2);
                    std::memcpy(to + b, reinterpret_cast<const uint8_t*>(&found) + kBytes / 2,
                                kBytes / 2);
                }
            }
        }
        move_elements<kWidth, kBack>(part, head, fit, from, to);
    }
}

// --- pages ---------------------------------------------------------------------------------------

template <size_t kBytes, size_t kWidth, bool kBack>
KVTIER_LOOP bool moved(const Part& part, const uint8_t* from, uint8_t* to) {
    switch (part.way.together) {
        case Together::kDims:
            move_runs<kBytes, kWidth, kBack>(part, from, to);
            return true;
        case Together::kTokens:
            if constexpr (kWidth == 2)
                return turned<uint16_t, kBytes, kWidth, kBack>(part, from, to);
            return turned<uint32_t, kBytes, kWidth, kBack>(part, from, to);
        case Together::kPairsOfDims:
            if constexpr (kWidth == 2)
                return turned<uint32_t, kBytes, kWidth, kBack>(part, from, to);
            return false;
        case Together::kPairsOfTokens:
            if (part.way.count % (kBytes / kWidth / 2) != 0) return false;
            move_pairs<kBytes, kWidth, kBack, std::conditional_t<kWidth == 2, uint16_t, uint32_t>>(
                part, from, to, std::make_index_sequence<kBytes / kWidth>());
            return true;
        default:
            return false;
    }
}

// Copies from a page and to a page, or from a page of parts to the start of a piece of it.
template <size_t kBytes, size_t kWidth, bool kBack>
KVTIER_LOOP void move_piece(const Order& by, const Piece& piece, const uint8_t* from, uint8_t* to) {
    const size_t heads = by.heads.size() / by.parts, tokens = by.tokens.size() / by.parts;
    const size_t dims = by.dims.size() / by.parts, size = heads * tokens * dims * kWidth;
    for (size_t i = 0; i < by.parts; i++) {
        const Part part = {heads,
                           tokens,
                           dims,
                           by.heads.data() + i * heads,
                           by.tokens.data() + i * tokens,
                           by.dims.data() + i * dims,
                           by.ways[i],
                           piece};
        const uint8_t* const source = from + (kBack ? i * size : 0);
        uint8_t* const target = to + (kBack ? 0 : i * size);
        if (moved<kBytes, kWidth, kBack>(part, source, target)) continue;
        if constexpr (kBytes > kLane) {
            if (moved<kBytes / 2, kWidth, kBack>(part, source, target)) continue;
        }
        for (size_t head = piece.head; head < piece.heads; head++) {
            move_elements<kWidth, kBack>(part, head, 0, source, target);
        }
    }
}

// The kernels for each width of elements, in both directions.
struct LevelKernels {
    void (*pieces[2][2])(const Order& by, const Piece& piece, const uint8_t* from, uint8_t* to);
};

template <template <auto> class At, size_t kBytes>
constexpr LevelKernels kLevel = {
    {{At<move_piece<kBytes, 2, false>>::run, At<move_piece<kBytes, 2, true>>::run},
     {At<move_piece<kBytes, 4, false>>::run, At<move_piece<kBytes, 4, true>>::run}}};

KVTIER_COMPILED(Plain, )
#if KVTIER_X86
KVTIER_COMPILED(Half, KVTIER_AVX2)
KVTIER_COMPILED(Whole, KVTIER_VBMI)
#endif

const LevelKernels& level() {
    return KVTIER_LEVELS((kLevel<Plain, 16>), (kLevel<Half, 32>), (kLevel<Whole, 64>));
}

// --- contiguous elements -------------------------------------------------------------------------

// The largest power of 2 that divides these positions into groups with a constant step inside.
size_t in_groups(const uint32_t* at, size_t count, size_t step) {
    constexpr size_t kMost = 32;
    for (size_t group = kMost; group > 1; group /= 2) {
        bool lie = count % group == 0;
        for (size_t i = 0; lie && i < count; i++) {
            lie = at[i] == at[i - i % group] + i % group * step;
        }
        if (lie) return group;
    }
    return 1;
}

bool follow(const uint32_t* at, size_t count, size_t step) {
    for (size_t i = 0; i < count; i++) {
        if (at[i] != at[0] + i * step) return false;
    }
    return true;
}

Order::Way way_of(const Part& part) {
    if (follow(part.dim_at, part.dims, 1)) {
        const bool heads = follow(part.head_at, part.heads, part.dims);
        return {Together::kDims, heads ? part.heads * part.dims : part.dims};
    }
    const size_t tokens = in_groups(part.token_at, part.tokens, 1);
    if (tokens > 2) return {Together::kTokens, tokens};
    if (in_groups(part.dim_at, part.dims, 1) == 2) {
        return {Together::kPairsOfDims, in_groups(part.token_at, part.tokens, 2)};
    }
    if (tokens == 2) return {Together::kPairsOfTokens, in_groups(part.dim_at, part.dims, 2)};
    return {};
}

// True if these positions divide a page into equal pieces with `each` positions per piece, in
// order. No position is before its piece begins, so the last ones fill the last piece, and so on.
bool divide(const std::vector<uint32_t>& at, size_t parts, size_t each, size_t page) {
    const size_t count = at.size() / parts;
    if (count % each != 0) return false;
    for (size_t i = 0; i < at.size(); i++) {
        if (at[i] < i % count / each * (page / count * each)) return false;
    }
    return true;
}

// Powers of a number, modulo a prime.
class Powers {
 public:
    static constexpr uint64_t kBase = 0x0B7E151628AED2A6, kPrime = (uint64_t{1} << 61) - 1;

    Powers() {
        uint64_t step = kBase;
        for (auto& some : of_) {
            some[0] = 1;
            for (size_t i = 1; i < kMost; i++) some[i] = times(some[i - 1], step);
            step = times(some[kMost - 1], step);
        }
    }

    static uint64_t times(uint64_t a, uint64_t b) {
        return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b % kPrime);
    }
    uint64_t operator()(uint64_t exponent) const {
        uint64_t found = 1;
        for (const auto& some : of_) {
            found = times(found, some[exponent % kMost]);
            exponent /= kMost;
        }
        return found;
    }
    uint64_t sum(const uint32_t* exponents, size_t count) const {
        uint64_t found = 0;
        for (size_t i = 0; i < count; i++) found = (found + (*this)(exponents[i])) % kPrime;
        return found;
    }

 private:
    static constexpr size_t kMost = 256;
    uint64_t of_[8][kMost];
};

// The sum of a number's powers over all positions of a part.
uint64_t places_of(const Part& part, const Powers& powers) {
    const uint64_t heads = powers.sum(part.head_at, part.heads);
    const uint64_t tokens = powers.sum(part.token_at, part.tokens);
    return Powers::times(Powers::times(heads, tokens), powers.sum(part.dim_at, part.dims));
}

// True if the sum for all parts equals that of a page with one element in each position. The odds
// of an equal sum for another layout are one in 2^27, and no real one has it. Checking each
// position took seconds for a large page, and a client can send such a layout to a shared daemon.
bool is_page(uint64_t places, size_t size, const Powers& powers) {
    return Powers::times(places, Powers::kBase - 1) ==
           (powers(size) + Powers::kPrime - 1) % Powers::kPrime;
}

Piece piece_of(const Order& by, size_t number) {
    const size_t heads = by.heads.size() / by.parts, tokens = by.tokens.size() / by.parts;
    const size_t each = (by.by_heads ? heads : tokens) / by.pieces;
    const size_t before = by.page() / by.pieces * number;
    if (by.by_heads) return {number * each, (number + 1) * each, 0, tokens, before};
    return {0, heads, number * each, (number + 1) * each, before};
}

}  // namespace

bool Order::prepare() {
    for (const auto* some : {&heads, &tokens, &dims}) {
        if (parts == 0 || some->empty() || some->size() % parts != 0) return false;
    }
    constexpr size_t kTokens = 32;  // per piece
    const size_t of_heads = heads.size() / parts, of_tokens = tokens.size() / parts;
    const size_t of_dims = dims.size() / parts;
    static const Powers powers;
    uint64_t places = 0;
    ways.clear();
    for (size_t i = 0; i < parts; i++) {
        const Part part = {of_heads,
                           of_tokens,
                           of_dims,
                           heads.data() + i * of_heads,
                           tokens.data() + i * of_tokens,
                           dims.data() + i * of_dims,
                           {}};
        places = (places + places_of(part, powers)) % Powers::kPrime;
        ways.push_back(way_of(part));
    }
    if (!is_page(places, page(), powers)) return false;
    by_heads = divide(heads, parts, 1, page());
    if (by_heads) {
        pieces = of_heads;
    } else {
        pieces = divide(tokens, parts, kTokens, page()) ? of_tokens / kTokens : 1;
    }
    return true;
}

size_t Order::page() const { return heads.size() / parts * (tokens.size() / parts) * dims.size(); }

void reorder(const Order& by, size_t width, const uint8_t* from, uint8_t* to, size_t pages,
             bool back) {
    const auto move = level().pieces[width == 2 ? 0 : 1][back ? 1 : 0];
    const Piece whole = {0, by.heads.size() / by.parts, 0, by.tokens.size() / by.parts};
    const size_t size = by.page() * width;
    for (size_t page = 0; page < pages; page++, from += size, to += size) move(by, whole, from, to);
}

void reorder_piece(const Order& by, size_t width, const uint8_t* page, size_t piece, uint8_t* to) {
    level().pieces[width == 2 ? 0 : 1][1](by, piece_of(by, piece), page, to);
}

}  // namespace kvtier::codec
