// The last note about blocks that may no longer exist, by 64 bits of a key, in fixed memory.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "chunks.h"

namespace kvtier {
namespace {

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kAhead = 8;

// Sets of four notes. In a full set, a new note replaces the oldest. A set is one cache line, so a
// note costs one cache miss.
class Notes {
 public:
    explicit Notes(std::size_t nbytes) : sets_(std::max<std::size_t>(1, nbytes / sizeof(Set))) {}

    // Stores `code` for each key. If the last note of a key has one of the codes in `before`, keeps
    // that code and adds the bits `also` to it.
    void note(const char* keys, std::size_t count, std::uint8_t code, std::uint32_t now,
              std::span<const std::uint8_t> before, std::uint8_t also) {
        for (std::size_t i = 0; i < count; ++i) {
            if (i + kAhead < count)
                __builtin_prefetch(&sets_[set_of(name_of(keys + (i + kAhead) * kKeyBytes))], 1);
            const std::uint64_t name = name_of(keys + i * kKeyBytes);
            Set& set = sets_[set_of(name)];
            Note* place = &set.notes[0];
            for (Note& note : set.notes) {
                if (note.code != 0 && note.name == name) {
                    place = &note;
                    break;
                }
                // A free place, otherwise the oldest.
                if (place->code != 0 && (note.code == 0 || note.at < place->at)) place = &note;
            }
            const bool known = place->code != 0 && place->name == name;
            size_ += place->code == 0;
            const bool marked = known && std::ranges::find(before, place->code) != before.end();
            const auto all = static_cast<std::uint8_t>(marked ? place->code | also : code);
            *place = {name, now, all};
        }
    }
    // The last note of a key, as code and time; code 0 means that there is no note.
    std::pair<std::uint8_t, std::uint32_t> of(const char* key) const {
        const std::uint64_t name = name_of(key);
        for (const Note& note : sets_[set_of(name)].notes)
            if (note.code != 0 && note.name == name) return {note.code, note.at};
        return {0, 0};
    }
    std::size_t size() const { return size_; }
    std::size_t memory_bytes() const { return sets_.size() * sizeof(Set); }

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

    ZeroPages<Set> sets_;  // a page becomes resident with its first note
    std::size_t size_ = 0;
};

}  // namespace

}  // namespace kvtier

void bind_notes(nanobind::module_& m) {
    namespace nb = nanobind;
    using kvtier::kKeyBytes;
    using kvtier::Notes;
    const auto checked = [](const nb::bytes& keys) {
        if (keys.size() % kKeyBytes)
            throw nb::value_error(
                (std::to_string(keys.size()) + " bytes of keys: must be 32 each").c_str());
        return keys.size() / kKeyBytes;
    };
    nb::class_<Notes>(m, "Notes", "The last note about blocks, in memory of fixed size.")
        .def(nb::init<std::size_t>(), nb::arg("nbytes"))
        .def(
            "note",
            [checked](Notes& notes, nb::bytes keys, std::uint8_t code, std::uint32_t now,
                      nb::bytes before, std::uint8_t also) {
                const std::size_t count = checked(keys);
                if (code == 0) throw nb::value_error("code: must be 1 to 255");
                const auto* first = reinterpret_cast<const std::uint8_t*>(before.c_str());
                notes.note(keys.c_str(), count, code, now, {first, before.size()}, also);
            },
            nb::arg("keys"), nb::arg("code"), nb::arg("now"), nb::arg("before") = nb::bytes("", 0),
            nb::arg("also") = 0)
        .def(
            "codes",
            [checked](const Notes& notes, nb::bytes keys) {
                const std::size_t count = checked(keys);
                std::string codes(count, '\0');
                for (std::size_t i = 0; i < count; ++i)
                    codes[i] = static_cast<char>(notes.of(keys.c_str() + i * kKeyBytes).first);
                return nb::bytes(codes.data(), codes.size());
            },
            nb::arg("keys"))
        .def(
            "of",
            [checked](const Notes& notes, nb::bytes key) {
                if (checked(key) != 1) throw nb::value_error("key: must be one key");
                const auto [code, at] = notes.of(key.c_str());
                return nb::make_tuple(code, at);
            },
            nb::arg("key"))
        .def("__len__", &Notes::size)
        .def("memory_bytes", &Notes::memory_bytes);
}
