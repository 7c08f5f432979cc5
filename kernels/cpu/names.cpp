// The keys of blocks: chains of keyed BLAKE3 hashes over tokens, or over hashes of an engine.
#include <cstring>
#include <vector>

#include "blake3.h"
#include "python_bytes.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr size_t kKey = 32;
// A tag between parent and content separates the two kinds of content: 0 for tokens, and for an
// engine's hash its length.
constexpr uint8_t kTokensTag = 0;
constexpr size_t kHashLeast = 16, kHashMost = 64;

struct Fixed {
    Fixed(nb::handle object, const char* what) : held(object, Access::kRead, what) {
        if (held.size() != kKey) {
            fail(nb::value_error, what, ": 32 bytes, not ", held.size());
        }
    }
    HeldMemory held;
};

// The message of a link, +-----------+-----+---------+--------+
//                        | parent 32 | tag | content | extras |
//                        +-----------+-----+---------+--------+
// hashed with the secret into the next link's parent.
class Chain {
 public:
    Chain(const Fixed& secret, const Fixed& parent, const HeldMemory& extras, size_t content_most)
        : compress_(blake3::chosen_compress()),
          message_(kKey + 1 + content_most + extras.size()),
          extras_(extras) {
        std::memcpy(secret_, secret.held.data(), kKey);
        begin(parent);
    }

    void begin(const Fixed& parent) { std::memcpy(message_.data(), parent.held.data(), kKey); }

    void link(uint8_t tag, const void* content, size_t size, uint8_t* key) {
        uint8_t* at = message_.data() + kKey;
        *at++ = tag;
        std::memcpy(at, content, size);
        at += size;
        if (extras_.size() != 0) std::memcpy(at, extras_.data(), extras_.size());
        at += extras_.size();
        blake3::hash(compress_, secret_, blake3::kKeyed, message_.data(),
                     static_cast<size_t>(at - message_.data()), key);
        std::memcpy(message_.data(), key, kKey);
    }

 private:
    blake3::Compress compress_;
    std::vector<uint8_t> message_;
    const HeldMemory& extras_;
    uint32_t secret_[8];
};

nb::bytes chain_keys(nb::handle secret, nb::handle parent, nb::handle tokens, long block_tokens,
                     nb::handle extras) {
    if (block_tokens < 1) throw nb::value_error("block_tokens: must be at least 1");
    const Fixed secret_bytes(secret, "secret"), parent_bytes(parent, "parent");
    const HeldMemory extra_bytes(extras, Access::kRead, "extras");
    const std::vector<uint32_t> numbers = read_u32(tokens, "tokens", false);
    const auto each = static_cast<size_t>(block_tokens);
    const size_t blocks = numbers.size() / each;
    NewBytes keys(kKey * blocks);
    if (blocks != 0) {
        const Unlocked unlocked;
        Chain chain(secret_bytes, parent_bytes, extra_bytes, each * 4);
        for (size_t i = 0; i < blocks; i++) {
            chain.link(kTokensTag, numbers.data() + i * each, each * 4, keys.data() + kKey * i);
        }
    }
    return keys.object;
}

nb::bytes chain_hashes(nb::handle secret, nb::handle parent, nb::sequence hashes, nb::handle extras,
                       bool alone) {
    const Fixed secret_bytes(secret, "secret"), parent_bytes(parent, "parent");
    const HeldMemory extra_bytes(extras, Access::kRead, "extras");
    const nb::object items = nb::steal(PySequence_Tuple(hashes.ptr()));
    if (!items.is_valid()) nb::raise_python_error();
    const auto count = static_cast<size_t>(PyTuple_GET_SIZE(items.ptr()));
    NewBytes keys(kKey * count);
    Chain chain(secret_bytes, parent_bytes, extra_bytes, kHashMost);
    for (size_t i = 0; i < count; i++) {
        PyObject* item = PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
        if (!PyBytes_Check(item)) {
            fail(nb::type_error, "hash ", i, ": must be bytes");
        }
        const auto size = static_cast<size_t>(PyBytes_GET_SIZE(item));
        if (size < kHashLeast || size > kHashMost) {
            fail(nb::value_error, "hash ", i, ": 16 to 64 bytes, not ", size);
        }
        if (alone) chain.begin(parent_bytes);
        chain.link(static_cast<uint8_t>(size), PyBytes_AS_STRING(item), size,
                   keys.data() + kKey * i);
    }
    return keys.object;
}

nb::bytes digest_of(nb::handle data, nb::object key) {
    const HeldMemory held(data, Access::kRead, "data");
    uint32_t words[8];
    uint32_t flag = 0;
    std::memcpy(words, blake3::kIv, sizeof(words));
    if (!key.is_none()) {
        const Fixed key_bytes(key, "key");
        std::memcpy(words, key_bytes.held.data(), kKey);
        flag = blake3::kKeyed;
    }
    NewBytes digest(kKey);
    {
        const Unlocked unlocked;
        blake3::hash(blake3::chosen_compress(), words, flag, held.data(), held.size(),
                     digest.data());
    }
    return digest.object;
}

}  // namespace
}  // namespace kvtier

void bind_names(nb::module_& m) {
    using namespace kvtier;
    using namespace nb::literals;
    m.def("blake3", &digest_of, "data"_a, "key"_a = nb::none());
    m.def("chain_keys", &chain_keys, "secret"_a, "parent"_a, "tokens"_a, "block_tokens"_a,
          "extras"_a = nb::bytes("", 0));
    m.def("chain_hashes", &chain_hashes, "secret"_a, "parent"_a, "hashes"_a,
          "extras"_a = nb::bytes("", 0), "alone"_a = false);
}
