// The tables of what a device decodes, encodes or copies. Those of codecs are written directly to
// the memory from which they are copied to the device: NumPy's intermediate arrays took most of a
// batch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/calibrated.h"
#include "codec/codec.h"
#include "codec/numbers.h"
#include "codec/part.h"
#include "mapping.h"
#include "python_bytes.h"

namespace nb = nanobind;

namespace kvtier::cuda {
namespace {

using codec::Codec;
using codec::Element;

constexpr uint64_t kAligned = 256, kMostBytes = (1u << 31) - 1;
constexpr uint64_t kTopRoom = 64, kQuantizedElements = 4096;

// The layouts of ENCODED_PART, RAW_PART and PAYLOAD, and a part's shape in a calibration.
struct EncodedPart {
    uint32_t codec;
    int32_t known;
    uint64_t address, nbytes, into, raw_bytes;
};
struct RawPart {
    uint64_t address, nbytes;
    uint32_t payload;
    int32_t known;
    uint32_t rows, channels, head, by_token;
};
struct Payload {
    uint64_t into, room;
};
struct KnownPart {
    uint64_t heads, dim, exact, address;
};
static_assert(sizeof(EncodedPart) == 40 && sizeof(RawPart) == 40 && sizeof(Payload) == 16 &&
              sizeof(KnownPart) == 32);

template <typename T>
struct Items {
    Items(nb::handle object, const char* name) : held(object, Access::kRead, name) {
        if (held.size() % sizeof(T) != 0) fail(nb::value_error, name, ": not whole records");
    }
    size_t size() const { return held.size() / sizeof(T); }
    // A copy, because records may be unaligned.
    T operator[](size_t i) const {
        T one;
        std::memcpy(&one, held.data() + i * sizeof(T), sizeof(T));
        return one;
    }
    HeldMemory held;
};

uint64_t divided(uint64_t count, uint64_t by) { return (count + by - 1) / by; }
uint64_t aligned(uint64_t nbytes) { return divided(nbytes, kAligned) * kAligned; }

// What all parts of a batch have in common.
struct Batch {
    Batch(uint32_t by, uint32_t is, bool by_heads, uint32_t first_token, nb::handle shapes,
          uint64_t tokens)
        : codec(static_cast<Codec>(by)),
          element(codec::element_of(is)),
          heads_first(by_heads),
          position(first_token),
          known(shapes, "known"),
          group(tokens) {
        if (group == 0 && codec == Codec::kCachegen) {
            throw nb::value_error("group_tokens: must be at least 1 for cachegen");
        }
    }

    Codec codec;
    Element element;
    uint32_t heads_first, position;
    Items<KnownPart> known;
    uint64_t group;  // tokens
};

// The host's memory for the tables, and the device's scratch memory.
struct Room {
    uint64_t address, nbytes, scratch;
};

// The row of a part, with its units, and how many of its symbols are anchors.
struct Row : Part {
    uint64_t anchors = 0;

    Row(const Batch& batch, uint64_t raw_at, uint64_t size, int32_t number) : Part() {
        constexpr unsigned kShifts[] = {1, 1, 2, 0, 0};  // of an element's bytes
        const unsigned shift = kShifts[static_cast<size_t>(batch.element)];
        if ((raw_at & ((1u << shift) - 1)) != 0) {
            fail(nb::value_error, "parts: addresses are not aligned to elements of ", 1u << shift,
                 " bytes");
        }
        if (size > kMostBytes) {
            fail(nb::value_error, "parts: ", size, " bytes, at most ", kMostBytes, " are possible");
        }
        raw = raw_at, raw_bytes = size;
        element = static_cast<uint32_t>(batch.element);
        bits = codec::fixed_rate(batch.codec);
        heads_first = batch.heads_first, position = batch.position;
        uint64_t count = 0;
        if (codec::calibrated(batch.codec)) {
            count = divided(symbols(batch, number, shift), codec::kStreamSymbols);
        } else {
            // Constants, because a division takes longer than the rest.
            count = bits != 0 ? divided(size >> shift, kQuantizedElements)
                              : divided(size >> shift, codec::kStreamRows * codec::kRow);
        }
        units = static_cast<uint32_t>(count == 0 ? 1 : count);
    }

    // The scratch memory that an encoder needs.
    uint64_t scratch_bytes(Codec by) const {
        const auto streams = [&](uint64_t escape) {
            return units * (2 * codec::kStreamWords + codec::kStatesBytes +
                            escape * codec::kStreamRows * codec::kRow);
        };
        if (by == Codec::kFix4) return kTopRoom;
        if (by == Codec::kR32) return kTopRoom + streams(1);
        // The steps are smaller, or the part is stored raw. Or a magnitude per group and unit.
        if (bits != 0) return raw_bytes + 4 * uint64_t{units};
        return divided(3 * anchors, 8) * 8 + streams(2);
    }

 private:
    // Zero if the part does not consist of its channels.
    uint64_t symbols(const Batch& batch, int32_t number, unsigned shift) {
        if (number < 0 || batch.known.size() == 0) return 0;
        if (static_cast<size_t>(number) >= batch.known.size()) {
            fail(nb::index_error, "parts: ", number, " is outside of a calibration of ",
                 batch.known.size(), " parts");
        }
        const KnownPart shape = batch.known[static_cast<size_t>(number)];
        known = shape.address;
        const uint64_t token = shape.heads * shape.dim << shift;
        if (batch.element > Element::kFp32 || token == 0 || raw_bytes % token != 0) return 0;
        const uint64_t tokens = raw_bytes / token;
        const uint64_t channels = shape.heads * (shape.dim - shape.exact);
        const uint64_t groups = batch.codec == Codec::kCachegen ? divided(tokens, batch.group) : 0;
        anchors = groups * channels;
        return (tokens - groups) * channels;
    }
};

// The tables, in this order: the rows of the parts, their results, the index of the first part of
// each payload, the owner of each unit. What does not fit into the memory is only counted.
class Tables {
 public:
    Tables(const Room& room, size_t parts, size_t payloads)
        : room_(room),
          results_at_(aligned(parts * sizeof(Part))),
          firsts_at_(results_at_ + aligned(parts * sizeof(Result))),
          owners_at_(firsts_at_ + aligned(payloads * 4)) {
        if (owners_at_ <= room.nbytes) {
            std::memset(to<uint8_t>(results_at_), 0, parts * sizeof(Result));
        }
    }

    void add(Row& row, uint64_t scratch_bytes) {
        row.unit = static_cast<uint32_t>(units_);
        if (scratch_bytes != 0) row.scratch = room_.scratch + scratch_;
        scratch_ += aligned(scratch_bytes);
        const uint64_t first = units_;
        units_ += row.units;
        if (nbytes() <= room_.nbytes) {
            to<Part>(0)[parts_] = row;
            std::fill_n(to<uint32_t>(owners_at_) + first, row.units, parts_);
        }
        parts_++;
    }

    void add_payload(size_t first) {
        if (owners_at_ <= room_.nbytes) {
            to<uint32_t>(firsts_at_)[payloads_] = static_cast<uint32_t>(first);
        }
        payloads_++;
    }

    nb::tuple layout() const {
        return nb::make_tuple(units_, payloads_, results_at_, firsts_at_, owners_at_, nbytes(),
                              scratch_);
    }

 private:
    template <typename T>
    T* to(uint64_t place) const {
        return reinterpret_cast<T*>(room_.address + place);
    }
    uint64_t nbytes() const { return aligned(owners_at_ + 4 * units_); }

    const Room room_;
    uint64_t results_at_, firsts_at_, owners_at_;
    uint64_t units_ = 0, payloads_ = 0, scratch_ = 0;
    uint32_t parts_ = 0;
};

nb::tuple rows_to_decode(const Batch& batch, nb::handle said, uint64_t address, uint64_t nbytes) {
    const Items<EncodedPart> parts(said, "parts");
    Tables tables({address, nbytes, 0}, parts.size(), 0);
    for (size_t i = 0; i < parts.size(); i++) {
        const EncodedPart part = parts[i];
        const bool kept = part.codec == static_cast<uint32_t>(Codec::kRaw);
        if (part.codec != static_cast<uint32_t>(batch.codec) && !kept) {
            fail(nb::value_error, "codec: parts of another codec than ",
                 static_cast<unsigned>(batch.codec));
        }
        Row row(batch, part.into, part.raw_bytes, part.known);
        row.text = part.address, row.text_bytes = part.nbytes;
        row.kept = kept;
        tables.add(row, 0);
    }
    return tables.layout();
}

nb::tuple rows_to_encode(const Batch& batch, nb::handle said, nb::handle targets, uint64_t address,
                         uint64_t nbytes, uint64_t scratch) {
    const Items<RawPart> parts(said, "parts");
    const Items<Payload> payloads(targets, "payloads");
    Tables tables({address, nbytes, scratch}, parts.size(), payloads.size());
    for (size_t first = 0, end; first < parts.size(); first = end) {
        const uint32_t number = parts[first].payload;
        uint64_t needs = 0;
        for (end = first; end < parts.size() && parts[end].payload == number; end++) {
            if (__builtin_add_overflow(needs, parts[end].nbytes, &needs)) needs = ~uint64_t{0};
        }
        if (number >= payloads.size() || (end < parts.size() && parts[end].payload < number)) {
            throw nb::value_error(
                "parts: not in the order of their payloads, or with an unknown payload");
        }
        if (payloads[number].room < needs) {
            throw nb::value_error("payloads: too little room for their raw parts");
        }
        tables.add_payload(first);
        for (size_t i = first; i < end; i++) {
            const RawPart part = parts[i];
            Row row(batch, part.address, part.nbytes, part.known);
            row.text = payloads[number].into, row.text_bytes = payloads[number].room;
            row.first = static_cast<uint32_t>(first);
            row.parts = static_cast<uint32_t>(end - first);
            row.rows = part.rows, row.channels = part.channels, row.head = part.head;
            row.by_token = part.by_token;
            tables.add(row, row.scratch_bytes(batch.codec));
        }
    }
    return tables.layout();
}

// The ids of blocks, the addresses of their slots, and which slots are in registered extents: a
// byte each, or None if all are.
nb::tuple placed_blocks(nb::handle block_ids, uint64_t blocks, nb::handle mappings,
                        nb::handle packed, uint64_t nbytes, bool writable,
                        const std::vector<uint32_t>& registered) {
    Slots slots(mappings, packed);
    const std::vector<uint32_t> ids = [&] {
        try {
            return read_u32(block_ids, "block_ids", false);
        } catch (const nb::builtin_exception& error) {
            if (error.type() != nb::exception_type::value_error) throw;
            throw nb::index_error(error.what());
        }
    }();
    if (ids.size() != slots.count()) {
        fail(nb::value_error, ids.size(), " block ids for ", slots.count(), " slots");
    }
    NewBytes numbers(4 * ids.size()), addresses(8 * ids.size()), ready(ids.size());
    std::vector<bool> is_ready;
    for (const uint32_t number : registered) {
        if (number >= is_ready.size()) is_ready.resize(number + size_t{1});
        is_ready[number] = true;
    }
    bool all = true;
    for (size_t i = 0; i < ids.size(); i++) {
        if (ids[i] >= blocks) {
            fail(nb::index_error, "block_ids: ", ids[i], " is outside of ", blocks, " blocks");
        }
        const auto address = reinterpret_cast<uint64_t>(slots.place(i, nbytes, writable));
        std::memcpy(addresses.data() + 8 * i, &address, 8);
        const uint32_t extent = slots.at(i).extent;
        const bool mine = extent < is_ready.size() && is_ready[extent];
        ready.data()[i] = mine;
        all = all && mine;
    }
    if (!ids.empty()) std::memcpy(numbers.data(), ids.data(), 4 * ids.size());
    return nb::make_tuple(numbers.object, addresses.object,
                          all ? nb::object(nb::none()) : nb::object(ready.object));
}

}  // namespace
}  // namespace kvtier::cuda

void bind_device(nb::module_& m) {
    using namespace kvtier::cuda;
    using namespace nb::literals;
    nb::class_<Batch>(m, "DeviceBatch", nb::is_final())
        .def(nb::init<uint32_t, uint32_t, bool, uint32_t, nb::handle, uint64_t>(), "codec"_a,
             "element"_a, "heads_first"_a, "position"_a, "known"_a, "group_tokens"_a)
        .def("to_decode", rows_to_decode, "parts"_a, "address"_a, "nbytes"_a)
        .def("to_encode", rows_to_encode, "parts"_a, "payloads"_a, "address"_a, "nbytes"_a,
             "scratch"_a);
    m.def("placed_blocks", placed_blocks, "block_ids"_a, "blocks"_a, "mappings"_a, "slots"_a,
          "nbytes"_a, "writable"_a, "registered"_a);
}
