// The memory behind Python objects, held while it is used.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvtier {

namespace nb = nanobind;

enum class Access { kRead, kWrite, kWriteIfAllowed };
enum class Shape { kContiguous, kDense };  // dense: any order of the axes, without holes

// An object's memory, by the buffer protocol or by DLPack; released with the GIL held.
class Held {
 public:
    Held() = default;
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held();

    // Throws TypeError where the object offers no memory, ValueError where it isn't as wanted.
    // `what` names it in the message.
    void take(nb::handle object, Access access, Shape shape, const char* what, size_t index = 0);

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    bool writable() const { return writable_; }

 private:
    void take_tensor(nb::handle object, Access access, Shape shape, const std::string& name);

    Py_buffer buffer_{};
    nb::ndarray<> tensor_;
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
    bool held_ = false;
    bool writable_ = false;
};

// A list of integers, a buffer or a DLPack tensor of 32- or 64-bit integers, as unsigned 32-bit
// ones. `bytes` objects count as packed integers only with packed_bytes. Throws ValueError outside
// 0..2^32-1.
std::vector<uint32_t> read_u32(nb::handle object, const char* what, bool packed_bytes);

// A new bytes object whose content the caller writes before anyone else sees it.
struct NewBytes {
    explicit NewBytes(size_t size);
    uint8_t* data() { return reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(object.ptr())); }
    nb::bytes object;
};

}  // namespace kvtier
