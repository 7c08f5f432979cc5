// AES-256-GCM with keys that derive from others. The cryptography is that of OpenSSL's libcrypto,
// which is loaded when the first keys are created.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvtier {

inline constexpr size_t kFrameKeyBytes = 32, kKeyIdBytes = 8, kNonceBytes = 12, kTagBytes = 16;

// The keys of one tenant. Immutable, so that threads can share them.
class FrameKeys {
 public:
    using Id = std::array<uint8_t, kKeyIdBytes>;
    using Secret = std::array<uint8_t, kFrameKeyBytes>;
    struct Key {
        Id id;
        Secret secret;
    };

    // Throws std::runtime_error if there is no libcrypto.
    explicit FrameKeys(std::vector<Key> keys);
    FrameKeys(const FrameKeys&) = delete;
    FrameKeys& operator=(const FrameKeys&) = delete;
    ~FrameKeys();

    // The key that encrypts.
    const Key& first() const { return keys_.front(); }
    // The key with this id, or null.
    const Key* find(const uint8_t* id) const;

 private:
    std::vector<Key> keys_;
};

struct SharedKeys {
    std::shared_ptr<const FrameKeys> shared;
};

// Encrypts or decrypts one message. Not thread-safe.
class Gcm {
 public:
    // The key is HKDF-Expand (RFC 5869, SHA-256) of the secret with this `info`. `authenticated` is
    // covered by the tag, and not encrypted. Throws std::bad_alloc.
    Gcm(bool encrypts, const FrameKeys::Secret& secret, std::span<const uint8_t> info,
        const uint8_t* nonce, std::span<const uint8_t> authenticated);
    Gcm(const Gcm&) = delete;
    Gcm& operator=(const Gcm&) = delete;
    ~Gcm();

    // The next bytes of the message; `to` may equal `from`. What was decrypted must not be used
    // before `verify` returned true.
    void add(const uint8_t* from, uint8_t* to, size_t nbytes);
    // Writes the tag of the encrypted message.
    void finish(uint8_t* tag);
    // True if this is the tag of the decrypted message.
    bool verify(const uint8_t* tag);

 private:
    void* context_;
};

}  // namespace kvtier
