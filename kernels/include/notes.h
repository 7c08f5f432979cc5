// The last note about blocks that may no longer exist, by 64 bits of a key, in fixed memory.
#pragma once
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace kvtier {

// Sets of four notes. In a full set, a new note replaces the oldest. A set is one cache line, so a
// note costs one cache miss.
class Notes {
 public:
    explicit Notes(std::size_t nbytes);

    // Stores `code` for each key. If the last note of a key has one of the codes in `before`, keeps
    // that code and adds the bits `also` to it.
    void note(const char* keys, std::size_t count, std::uint8_t code, std::uint32_t now,
              std::span<const std::uint8_t> before, std::uint8_t also);
    // The last note of a key, as code and time; code 0 means that there is no note.
    std::pair<std::uint8_t, std::uint32_t> of(const char* key) const;
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const { return sets_.capacity() * sizeof(Set); }

 private:
    struct Note {
        std::uint64_t name;
        std::uint32_t at;
        std::uint8_t code;  // 0: no note
    };
    struct alignas(64) Set {
        Note notes[4];
    };
    static std::uint64_t name_of(const char* key) {
        std::uint64_t name;
        std::memcpy(&name, key, sizeof(name));
        return name;
    }
    std::size_t set_of(std::uint64_t name) const {
        return static_cast<std::size_t>((static_cast<unsigned __int128>(name) * sets_.size()) >>
                                        64);
    }

    std::vector<Set> sets_;
    std::size_t size_ = 0;
};

}  // namespace kvtier
