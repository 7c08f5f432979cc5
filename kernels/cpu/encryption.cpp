// Loads libcrypto, declares the few functions of it that are used, and calls them.
#include "encryption.h"

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace kvtier {
namespace {

// Part of the binary interface of OpenSSL 3 and 4.
constexpr int kGetTag = 0x10, kSetTag = 0x11;
constexpr const char* kLibraries[] = {"libcrypto.so.4", "libcrypto.so.3"};

// One call of libcrypto takes an int.
constexpr size_t kCipherMost = size_t{1} << 30;
static_assert(kCipherMost <= INT_MAX);

struct Library {
    void* (*fetch_cipher)(void*, const char*, const char*);
    const void* (*sha256)();
    uint8_t* (*hmac)(const void*, const void*, int, const uint8_t*, size_t, uint8_t*, unsigned*);
    void* (*new_context)();
    void (*free_context)(void*);
    int (*init)(void*, const void*, void*, const uint8_t*, const uint8_t*, int);
    int (*update)(void*, uint8_t*, int*, const uint8_t*, int);
    int (*final)(void*, uint8_t*, int*);
    int (*control)(void*, int, int, void*);
    void (*cleanse)(void*, size_t);
    void* aes_256_gcm = nullptr;

    Library() {
        void* handle = nullptr;
        for (const char* name : kLibraries) {
            if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        }
        if (handle == nullptr) throw std::runtime_error("libcrypto of OpenSSL 3 is not installed");
        find(handle, "EVP_CIPHER_fetch", fetch_cipher);
        find(handle, "EVP_sha256", sha256);
        find(handle, "HMAC", hmac);
        find(handle, "EVP_CIPHER_CTX_new", new_context);
        find(handle, "EVP_CIPHER_CTX_free", free_context);
        find(handle, "EVP_CipherInit_ex", init);
        find(handle, "EVP_CipherUpdate", update);
        find(handle, "EVP_CipherFinal_ex", final);
        find(handle, "EVP_CIPHER_CTX_ctrl", control);
        find(handle, "OPENSSL_cleanse", cleanse);
        aes_256_gcm = fetch_cipher(nullptr, "AES-256-GCM", nullptr);
        if (aes_256_gcm == nullptr) throw std::runtime_error("libcrypto offers no AES-256-GCM");
    }

 private:
    template <typename Function>
    static void find(void* handle, const char* name, Function& function) {
        void* const found = dlsym(handle, name);
        if (found == nullptr) throw std::runtime_error(std::string("libcrypto lacks ") + name);
        function = reinterpret_cast<Function>(found);
    }
};

// Loaded once, and never closed.
const Library& library() {
    static const Library loaded;
    return loaded;
}

// The calls fail only if memory is short.
void expect(bool worked) {
    if (!worked) throw std::bad_alloc();
}

}  // namespace

FrameKeys::FrameKeys(std::vector<Key> keys) : keys_(std::move(keys)) { library(); }

FrameKeys::~FrameKeys() { library().cleanse(keys_.data(), keys_.size() * sizeof(Key)); }

const FrameKeys::Key* FrameKeys::find(const uint8_t* id) const {
    const auto at = std::find_if(keys_.begin(), keys_.end(), [&](const Key& one) {
        return std::memcmp(one.id.data(), id, one.id.size()) == 0;
    });
    return at != keys_.end() ? &*at : nullptr;
}

Gcm::Gcm(bool encrypts, const FrameKeys::Secret& secret, std::span<const uint8_t> info,
         const uint8_t* nonce, std::span<const uint8_t> authenticated)
    : context_(library().new_context()) {
    const Library& crypto = library();
    expect(context_ != nullptr);
    // The first and only block of HKDF-Expand.
    std::vector<uint8_t> message(info.begin(), info.end());
    message.push_back(1);
    uint8_t key[kFrameKeyBytes];
    unsigned size = sizeof key;
    int count = 0;
    const bool works =
        crypto.hmac(crypto.sha256(), secret.data(), static_cast<int>(secret.size()), message.data(),
                    message.size(), key, &size) != nullptr &&
        crypto.init(context_, crypto.aes_256_gcm, nullptr, key, nonce, encrypts ? 1 : 0) == 1 &&
        crypto.update(context_, nullptr, &count, authenticated.data(),
                      static_cast<int>(authenticated.size())) == 1;
    crypto.cleanse(key, sizeof key);
    if (works) return;
    crypto.free_context(context_);
    throw std::bad_alloc();
}

Gcm::~Gcm() { library().free_context(context_); }

void Gcm::add(const uint8_t* from, uint8_t* to, size_t nbytes) {
    while (nbytes != 0) {
        const size_t some = std::min(nbytes, kCipherMost);
        int count = 0;
        expect(library().update(context_, to, &count, from, static_cast<int>(some)) == 1);
        from += some, to += some, nbytes -= some;
    }
}

void Gcm::finish(uint8_t* tag) {
    uint8_t none[kTagBytes];
    int count = 0;
    expect(library().final(context_, none, &count) == 1 &&
           library().control(context_, kGetTag, kTagBytes, tag) == 1);
}

bool Gcm::verify(const uint8_t* tag) {
    uint8_t expected[kTagBytes], none[kTagBytes];
    std::memcpy(expected, tag, kTagBytes);
    int count = 0;
    return library().control(context_, kSetTag, kTagBytes, expected) == 1 &&
           library().final(context_, none, &count) == 1;
}

}  // namespace kvtier
