// Access to the memory of Python objects, which is held while it is used.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace kvtier {

namespace nb = nanobind;

// Raises a Python exception; its text consists of these parts.
template <typename... Parts>
[[noreturn]] void fail(nb::builtin_exception (*error)(const char*), const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw error(text.str().c_str());
}

enum class Access { kRead, kWrite, kWriteIfAllowed };
enum class Shape { kContiguous, kDense };  // dense: the axes in any order, without gaps

// The memory of an object, by the buffer protocol or DLPack. Release it with the GIL held.
class HeldMemory {
 public:
    HeldMemory() = default;
    // Delegates, so that memory which is refused after it was taken is released.
    HeldMemory(nb::handle object, Access access, const char* what) : HeldMemory() {
        take(object, access, what);
    }
    HeldMemory(const HeldMemory&) = delete;
    HeldMemory& operator=(const HeldMemory&) = delete;
    ~HeldMemory();

    // Throws TypeError if the object has no accessible memory, ValueError if the memory does not
    // have the requested form. `what` names the object in the message.
    void take(nb::handle object, Access access, const char* what, size_t index = 0,
              Shape shape = Shape::kContiguous);

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

// Reads a list of integers, a buffer, or a DLPack tensor of 32-bit or 64-bit integers, as unsigned
// 32-bit integers. Accepts `bytes` as packed integers only with packed_bytes. Throws ValueError for
// values outside 0..2^32-1.
std::vector<uint32_t> read_u32(nb::handle object, const char* what, bool packed_bytes);

// A new bytes object. The caller fills it before it passes it on.
struct NewBytes {
    explicit NewBytes(size_t size);
    uint8_t* data() { return reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(object.ptr())); }
    nb::bytes object;
};

}  // namespace kvtier
