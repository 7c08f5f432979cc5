// The Python bindings of frames.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "codec/numbers.h"
#include "encryption.h"
#include "frame.h"
#include "page.h"
#include "parallel.h"
#include "python_bytes.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

using GridTuple = std::tuple<uint32_t, uint32_t, uint32_t, bool>;  // a Grid

// The memory of a frame's header, of the source and of the target.
struct FrameMemory {
    FrameMemory(nb::handle text, nb::handle source, const char* name, nb::handle target)
        : header(text, Access::kWrite, "header"),
          from(source, Access::kRead, name),
          into(target, Access::kWrite, "into") {}
    HeldMemory header, from, into;
};

// Encodes a block as `by` tells, a codec or a recipe; `how` are its other parameters.
template <typename By, typename... How>
size_t encode(const By& by, uint32_t element, const FrameMemory& held, const How&... how) {
    const codec::Element is = codec::element_of(element);
    if (held.into.size() < codec::bound(held.from.size())) {
        throw nb::value_error("into: smaller than the bound of the parts");
    }
    size_t found = 0;
    {
        const Unlocked unlocked;
        found = encode_frame(by, is, held.header.data(), held.header.size(), held.from.data(),
                             held.from.size(), how..., held.into.data());
    }
    if (found == 0) throw nb::value_error("header: does not describe this block");
    return found;
}

// fd, place, bytes of header and payload, codec, epoch, digest of the payload, identity
using FrameTuple =
    std::tuple<int, uint64_t, size_t, size_t, uint32_t, uint64_t, nb::bytes, nb::bytes>;

// Copies the bytes of an object with exactly that many.
template <size_t kSize>
std::array<uint8_t, kSize> exactly(nb::bytes object, const char* what) {
    if (object.size() != kSize) fail(nb::value_error, what, ": must have ", kSize, " bytes");
    std::array<uint8_t, kSize> copy;
    std::memcpy(copy.data(), object.c_str(), kSize);
    return copy;
}

nb::bytes read_parts(const std::vector<FrameTuple>& rows, uint32_t element, size_t block_bytes,
                     const std::vector<uint64_t>& starts, size_t each, nb::handle into,
                     size_t threads, size_t layer_bytes) {
    const codec::Element is = codec::element_of(element);
    const HeldMemory to(into, Access::kWrite, "into");
    for (const uint64_t start : starts) {
        if (each > block_bytes || start > block_bytes - each) {
            throw nb::index_error("starts: outside of the block");
        }
    }
    const size_t bytes = starts.size() * each;
    if (bytes == 0 || to.size() / bytes != rows.size() || to.size() % bytes != 0) {
        throw nb::value_error("into: not of the size of the parts of all frames");
    }
    if (layer_bytes > block_bytes) throw nb::value_error("layer_bytes: more than the block");
    std::vector<FramePlace> frames;
    for (const auto& [fd, at, header_bytes, payload_bytes, by, epoch, digest, identity] : rows) {
        if (header_bytes == 0 || header_bytes % kPage != 0) {
            throw nb::value_error("header: must be whole pages");
        }
        if (codec::codec_of(by) == codec::Codec::kPlanes) {
            throw nb::value_error("codec: only frames in memory have it");
        }
        frames.push_back({fd, at, header_bytes, payload_bytes, codec::codec_of(by), epoch,
                          exactly<kDigestBytes>(digest, "digest"),
                          exactly<kIdentityBytes>(identity, "identity")});
    }
    NewBytes sound(frames.size());
    {
        const Unlocked unlocked;
        const bool is_read =
            layer_bytes != 0 && read_raw_parts(frames, block_bytes, starts, each, layer_bytes,
                                               to.data(), reinterpret_cast<uint8_t*>(sound.data()));
        in_parallel(
            is_read ? 0 : frames.size(), threads, 0,
            [&](size_t i) {
                sound.data()[i] = read_frame_parts(frames[i], is, block_bytes, starts, each,
                                                   to.data() + i * bytes);
            },
            [] {});
    }
    return sound.object;
}

// An element, a header without the zeros at its end, the bytes that it has with them, the payload,
// and room for the block.
using MemoryFrame = std::tuple<uint32_t, nb::bytes, size_t, nb::object, nb::object>;

// Frames that were never on a disk, and that several threads decode: each the next one.
class FrameBatch {
 public:
    explicit FrameBatch(const std::vector<MemoryFrame>& frames)
        : frames_(frames.begin(), frames.end()), ends_(frames.size()) {}

    void run() {
        const Unlocked unlocked;
        for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < frames_.size();) {
            One& one = frames_[i];
            FrameDecoder decoder(nullptr, one.element, one.header.data(), one.header.size(),
                                 one.payload.data(), one.payload.size(), nullptr, one.into.data(),
                                 one.into.size());
            ends_[i] = decoder.take(one.payload.size()) ? kRight : kWrong;
        }
    }

    nb::bytes ends() const {
        return nb::bytes(reinterpret_cast<const char*>(ends_.data()), ends_.size());
    }

 private:
    static constexpr uint8_t kRight = 1, kWrong = 2;

    struct One {
        explicit One(const MemoryFrame& frame)
            : element(codec::element_of(std::get<0>(frame))),
              header(std::get<2>(frame)),
              payload(std::get<3>(frame), Access::kRead, "payload"),
              into(std::get<4>(frame), Access::kWrite, "into") {
            const nb::bytes& text = std::get<1>(frame);
            if (text.size() > header.size()) throw nb::value_error("header: too many bytes");
            if (text.size() != 0) std::memcpy(header.data(), text.c_str(), text.size());
        }
        codec::Element element;
        std::vector<uint8_t> header;
        HeldMemory payload, into;
    };

    std::deque<One> frames_;  // held memory cannot be moved
    std::vector<uint8_t> ends_;
    std::atomic<size_t> next_{0};
};

SharedKeys keys_of(const std::vector<std::tuple<nb::bytes, nb::bytes>>& secrets) {
    if (secrets.empty()) throw nb::value_error("keys: at least one is needed");
    std::vector<FrameKeys::Key> keys;
    keys.reserve(secrets.size());
    for (const auto& [id, secret] : secrets) {
        keys.push_back({exactly<kKeyIdBytes>(id, "id"), exactly<kFrameKeyBytes>(secret, "secret")});
    }
    return {std::make_shared<const FrameKeys>(std::move(keys))};
}

void encrypt(const SharedKeys& keys, nb::handle header, nb::handle payload, nb::handle into,
             nb::bytes nonce) {
    const FrameMemory held(header, payload, "payload", into);
    const auto once = exactly<kNonceBytes>(nonce, "nonce");
    if (held.into.size() < held.from.size()) throw nb::value_error("into: smaller than payload");
    bool encrypted = false;
    {
        const Unlocked unlocked;
        encrypted = encrypt_frame(*keys.shared, once.data(), held.header.data(), held.header.size(),
                                  held.from.data(), held.from.size(), held.into.data());
    }
    if (!encrypted) throw nb::value_error("header: does not describe this payload");
}

std::tuple<int, nb::bytes> decrypt(const SharedKeys& keys, nb::handle header, nb::handle payload,
                                   nb::bytes identity, nb::handle into) {
    const HeldMemory text(header, Access::kRead, "header");
    const HeldMemory from(payload, Access::kRead, "payload"), to(into, Access::kWrite, "into");
    const FrameIdentity expected = exactly<kIdentityBytes>(identity, "identity");
    if (to.size() < from.size()) throw nb::value_error("into: smaller than payload");
    NewBytes digest(kDigestBytes);
    int error = 0;
    {
        const Unlocked unlocked;
        FrameDecryption decryption(*keys.shared, expected, text.data(), text.size());
        error = decryption.error();
        if (error == 0) {
            decryption.add(from.data(), to.data(), from.size());
            if (!decryption.finish(digest.data())) error = EBADMSG;
        }
    }
    return {error, error == 0 ? digest.object : nb::bytes("", 0)};
}

}  // namespace
}  // namespace kvtier

void bind_frame(nb::module_& m) {
    using namespace kvtier;
    using namespace nb::literals;
    m.def(
        "seal_frame",
        [](nb::handle header, nb::handle payload) {
            const HeldMemory text(header, Access::kWrite, "header");
            const HeldMemory bytes(payload, Access::kRead, "payload");
            NewBytes digest(kDigestBytes);
            bool sealed = false;
            {
                const Unlocked unlocked;
                sealed =
                    seal_frame(text.data(), text.size(), bytes.data(), bytes.size(), digest.data());
            }
            if (!sealed) throw nb::value_error("header: does not describe this payload");
            return digest.object;
        },
        "header"_a, "payload"_a);
    m.def(
        "encode_frame",
        [](uint32_t number, uint32_t element, nb::handle header, nb::handle block,
           nb::handle into) {
            const codec::Codec by = codec::codec_of(number);
            if (!codec::lossless(by)) throw nb::value_error("codec: must be a lossless codec");
            return encode(by, element, FrameMemory(header, block, "block", into));
        },
        "codec"_a, "element"_a, "header"_a, "block"_a, "into"_a);
    m.def(
        "encode_lossy_frame",
        [](const codec::SharedRecipe& by, uint32_t element, nb::handle header, nb::handle block,
           nb::handle into, const std::vector<GridTuple>& lies, uint32_t position) {
            std::vector<codec::Grid> grids;
            for (const auto& [rows, channels, head, by_token] : lies) {
                grids.push_back({rows, channels, head, by_token});
            }
            const FrameMemory held(header, block, "block", into);
            return encode(*by.shared, element, held, grids, position);
        },
        "by"_a, "element"_a, "header"_a, "block"_a, "into"_a, "grids"_a, "position"_a);
    m.def(
        "decode_frame",
        [](uint32_t element, nb::handle header, nb::handle payload,
           const std::optional<nb::bytes>& digest, nb::handle into,
           const codec::SharedRecipe* lossy, const std::vector<size_t>& arrived,
           const SharedKeys* keys, nb::bytes identity) {
            const Access access = keys != nullptr ? Access::kWrite : Access::kRead;
            const HeldMemory text(header, Access::kWrite, "header");
            const HeldMemory bytes(payload, access, "payload"), to(into, Access::kWrite, "into");
            FrameIdentity name{};
            if (keys != nullptr) name = exactly<kIdentityBytes>(identity, "identity");
            const codec::Element is = codec::element_of(element);
            if (digest && digest->size() != kDigestBytes) {
                throw nb::value_error("digest: must have 16 bytes");
            }
            const auto* expected =
                digest ? reinterpret_cast<const uint8_t*>(digest->c_str()) : nullptr;
            const codec::Recipe* const by = lossy != nullptr ? lossy->shared.get() : nullptr;
            if (!std::is_sorted(arrived.begin(), arrived.end()) ||
                (!arrived.empty() && arrived.back() > bytes.size())) {
                throw nb::value_error("arrived: must ascend and not exceed the payload");
            }
            const Unlocked unlocked;
            FrameDecoder decoder(by, is, text.data(), text.size(), bytes.data(), bytes.size(),
                                 expected, to.data(), to.size(),
                                 keys != nullptr ? keys->shared.get() : nullptr, &name);
            for (const size_t so_far : arrived) {
                if (!decoder.take(so_far)) return false;
                if (so_far == bytes.size()) return true;
            }
            return decoder.take(bytes.size());
        },
        "element"_a, "header"_a, "payload"_a, "digest"_a.none(), "into"_a,
        "lossy"_a.none() = nb::none(), "arrived"_a = std::vector<size_t>(),
        "keys"_a.none() = nb::none(), "identity"_a = nb::bytes("", 0));
    nb::class_<FrameBatch>(m, "FrameBatch", nb::is_final())
        .def(nb::init<const std::vector<MemoryFrame>&>(), "frames"_a)
        .def("run", &FrameBatch::run)
        .def("ends", &FrameBatch::ends);
    m.def("read_frame_parts", &read_parts, "frames"_a, "element"_a, "block_bytes"_a, "starts"_a,
          "each"_a, "into"_a, "threads"_a = 1, "layer_bytes"_a = 0);
    nb::class_<SharedKeys>(m, "FrameKeys", nb::is_final())
        .def(
            "__init__",
            [](SharedKeys* self, const std::vector<std::tuple<nb::bytes, nb::bytes>>& secrets) {
                new (self) SharedKeys(keys_of(secrets));
            },
            "keys"_a)
        .def("encrypt", &encrypt, "header"_a, "payload"_a, "into"_a, "nonce"_a)
        .def("decrypt", &decrypt, "header"_a, "payload"_a, "identity"_a, "into"_a);
}
