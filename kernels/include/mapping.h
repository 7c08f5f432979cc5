// Shared mappings, and the slots in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "guard.h"
#include "page.h"
#include "python_bytes.h"

namespace kvtier {

// A shared mapping of a whole file. It is unmapped with its last reference; a view counts as one.
class Mapping {
 public:
    Mapping(int fd, uint64_t size, bool writable);
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();

    uint8_t* data() const { return data_; }
    uint64_t size() const { return size_; }
    bool writable() const { return writable_; }

    // Faults all pages in, in steps; false where the kernel refuses.
    bool populate() const;

    // From now on a page that is missing ends no process: see guard.h.
    void guard();
    bool lost() const { return guard_ != nullptr && guard_->lost.load(std::memory_order_acquire); }

 private:
    uint8_t* data_;
    uint64_t size_;
    bool writable_;
    Guard* guard_ = nullptr;
};

// A packed list of slots, and the mappings that they point into.
struct Slot {
    uint32_t extent;
    uint32_t reserved;
    uint64_t offset;
    uint64_t generation;
};
static_assert(sizeof(Slot) == 24);

// A packed list of slots, and the mappings that they point into.
class Slots {
 public:
    Slots(nb::handle mappings, nb::handle slots);

    size_t count() const { return count_; }
    Slot at(size_t i) const;
    // The mapping of an extent. Throws IndexError if it does not exist.
    nb::handle object(size_t i, uint32_t extent);
    Mapping* mapping(size_t i, uint32_t extent);
    // The memory of slot i. Throws IndexError outside its extent, ValueError if it must be
    // writable and is not.
    uint8_t* place(size_t i, uint64_t bytes, bool writable);

 private:
    nb::object list_;
    HeldMemory packed_;
    size_t count_;
    std::vector<Mapping*> known_;  // looked up on first use
};

}  // namespace kvtier
