// Access to buffers, DLPack tensors and lists of integers as plain memory.
#include "python_bytes.h"

#include <cstring>
#include <limits>
#include <utility>

namespace kvtier {
namespace {

// Converts the current Python error into a ValueError that names the object.
[[noreturn]] void refuse(const std::string& name) {
    nb::python_error error;
    std::string reason = nb::str(error.value()).c_str();
    fail(nb::value_error, name, ": ", reason);
}

// A tensor or a buffer is dense if its axes, in some order, skip no byte.
bool covers(size_t elements, size_t axes, const auto& extent, const auto& stride) {
    size_t span = 1;
    for (size_t i = 0; i < axes; i++) {
        if (extent(i) == 0) return true;
        if (extent(i) == 1) continue;
        if (stride(i) <= 0) return false;
        span += static_cast<size_t>(extent(i) - 1) * static_cast<size_t>(stride(i));
    }
    return span == elements;
}

// Whether the memory is references to Python objects, as of numpy's dtype=object: they are saved as
// numbers without meaning, and a load into them would end the interpreter. Other formats are not
// examined: numpy cannot name that of bfloat16.
bool holds_references(nb::handle object, Py_ssize_t item_bytes) {
    if (item_bytes < static_cast<Py_ssize_t>(sizeof(PyObject*))) return false;
    const nb::object type = nb::getattr(object, "dtype", nb::none());
    if (!type.is_none()) return nb::cast<bool>(nb::getattr(type, "hasobject", nb::bool_(false)));
    const nb::object format = nb::getattr(object, "format", nb::none());  // of a memoryview
    return nb::isinstance<nb::str>(format) && std::strchr(nb::cast<const char*>(format), 'O');
}

template <typename T>
void widen(const uint8_t* data, size_t count, std::vector<uint32_t>& out, const char* what) {
    for (size_t i = 0; i < count; i++) {
        T value;
        std::memcpy(&value, data + i * sizeof(T), sizeof(T));
        if (!std::in_range<uint32_t>(value)) {
            fail(nb::value_error, what, ": number ", i, " is outside 0..2^32-1");
        }
        out[i] = static_cast<uint32_t>(value);
    }
}

void widen(const uint8_t* data, size_t count, size_t width, bool is_signed,
           std::vector<uint32_t>& out, const char* what) {
    out.resize(count);
    if (width == 4 && !is_signed) {
        if (count != 0) std::memcpy(out.data(), data, count * 4);
    } else if (width == 4) {
        widen<int32_t>(data, count, out, what);
    } else if (is_signed) {
        widen<int64_t>(data, count, out, what);
    } else {
        widen<uint64_t>(data, count, out, what);
    }
}

[[noreturn]] void not_integers(const char* what) {
    fail(nb::type_error, what, ": must be a list or a buffer of 32-bit or 64-bit integers");
}

uint32_t read_one(PyObject* item, const char* what, size_t i) {
    if (PyLong_CheckExact(item)) {
#if PY_VERSION_HEX >= 0x030C0000
        auto* number = reinterpret_cast<PyLongObject*>(item);
        if (PyUnstable_Long_IsCompact(number)) {
            const Py_ssize_t value = PyUnstable_Long_CompactValue(number);
            if (value >= 0) return static_cast<uint32_t>(value);
        }
#else
        // At most one digit of 30 bits: nearly every token.
        const Py_ssize_t digits = Py_SIZE(item);
        if (digits == 1) return reinterpret_cast<PyLongObject*>(item)->ob_digit[0];
        if (digits == 0) return 0;
#endif
    }
    const nb::object number = nb::steal(PyNumber_Index(item));
    if (!number.is_valid()) {
        PyErr_Clear();
        not_integers(what);
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0 || value < 0 || value > std::numeric_limits<uint32_t>::max()) {
        fail(nb::value_error, what, ": number ", i, " is outside 0..2^32-1");
    }
    return static_cast<uint32_t>(value);
}

}  // namespace

HeldMemory::~HeldMemory() {
    if (held_) PyBuffer_Release(&buffer_);
}

void HeldMemory::take(nb::handle object, Access access, const char* what, size_t index,
                      Shape shape) {
    const auto name = [&] { return std::string(what) + " " + std::to_string(index); };
    PyObject* const from = object.ptr();
    if (!PyObject_CheckBuffer(from)) return take_tensor(object, access, shape, name());
    const int layout = shape == Shape::kDense ? PyBUF_STRIDES : PyBUF_SIMPLE;
    const int first = access == Access::kRead ? layout : layout | PyBUF_WRITABLE;
    if (PyObject_GetBuffer(from, &buffer_, first) != 0) {
        if (access != Access::kWriteIfAllowed) refuse(name());
        PyErr_Clear();
        if (PyObject_GetBuffer(from, &buffer_, layout) != 0) refuse(name());
    }
    held_ = true;
    if (holds_references(object, buffer_.itemsize)) {
        fail(nb::type_error, name(), ": its elements are Python objects, not numbers");
    }
    data_ = static_cast<uint8_t*>(buffer_.buf);
    size_ = static_cast<size_t>(buffer_.len);
    writable_ = !buffer_.readonly;
    if (shape == Shape::kDense && buffer_.strides != nullptr && buffer_.itemsize > 0) {
        const auto item = static_cast<size_t>(buffer_.itemsize);
        const auto stride = [&](size_t i) {
            // A stride that is not a multiple of the item size leaves gaps.
            const Py_ssize_t s = buffer_.strides[i];
            return s % buffer_.itemsize == 0 ? s / buffer_.itemsize : 0;
        };
        if (!covers(
                size_ / item, static_cast<size_t>(buffer_.ndim),
                [&](size_t i) { return buffer_.shape[i]; }, stride)) {
            fail(nb::value_error, name(), ": its memory has gaps");
        }
    }
}

void HeldMemory::take_tensor(nb::handle object, Access access, Shape shape,
                             const std::string& name) {
    if (!nb::hasattr(object, "__dlpack__")) {
        fail(nb::type_error, name, ": offers neither the buffer protocol nor DLPack");
    }
    nb::ndarray<nb::ro> frozen;
    if (access != Access::kRead && nb::try_cast(object, tensor_, false)) {
        writable_ = true;
    } else if (access != Access::kWrite && nb::try_cast(object, frozen, false)) {
        tensor_ = nb::ndarray<>(frozen);
    } else {
        fail(nb::value_error, name, ": the tensor cannot be ",
             (access == Access::kWrite ? "written" : "read"));
    }
    const int device = tensor_.device_type();
    if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
        fail(nb::value_error, name, ": the tensor is not in the host's memory");
    }
    int64_t inner = 1;
    bool contiguous = true;
    for (size_t i = tensor_.ndim(); i-- > 0;) {
        if (tensor_.shape(i) != 1 && tensor_.stride(i) != inner) contiguous = false;
        inner *= static_cast<int64_t>(tensor_.shape(i));
    }
    if (!contiguous && inner != 0) {
        const auto extent = [&](size_t i) { return static_cast<int64_t>(tensor_.shape(i)); };
        const auto stride = [&](size_t i) { return tensor_.stride(i); };
        if (shape == Shape::kContiguous ||
            !covers(tensor_.size(), tensor_.ndim(), extent, stride)) {
            fail(nb::value_error, name, ": the tensor is not contiguous");
        }
    }
    data_ = static_cast<uint8_t*>(tensor_.data());
    size_ = tensor_.nbytes();
}

std::vector<uint32_t> read_u32(nb::handle object, const char* what, bool packed_bytes) {
    std::vector<uint32_t> numbers;
    PyObject* const from = object.ptr();
    if (PyList_CheckExact(from) || PyTuple_CheckExact(from)) {
        const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(from));
        numbers.resize(count);
        for (size_t i = 0; i < count; i++) {
            // Checked each time: an item's __index__ may run Python code that shrinks the list.
            if (static_cast<size_t>(PySequence_Fast_GET_SIZE(from)) != count) not_integers(what);
            numbers[i] =
                read_one(PySequence_Fast_GET_ITEM(from, static_cast<Py_ssize_t>(i)), what, i);
        }
        return numbers;
    }
    if (PyObject_CheckBuffer(from)) {
        struct View {
            Py_buffer b{};
            bool held = false;
            ~View() {
                if (held) PyBuffer_Release(&b);
            }
        } view;
        if (PyObject_GetBuffer(from, &view.b, PyBUF_FORMAT | PyBUF_ND) != 0) refuse(what);
        view.held = true;
        const auto* data = static_cast<const uint8_t*>(view.b.buf);
        const auto bytes = static_cast<size_t>(view.b.len);
        if (packed_bytes && PyBytes_CheckExact(from)) {
            if (bytes % 4 != 0) {
                fail(nb::value_error, what, ": packed integers have 4 bytes each");
            }
            widen(data, bytes / 4, 4, false, numbers, what);
            return numbers;
        }
        const char* format = view.b.format == nullptr ? "B" : view.b.format;
        if (*format == '<' || *format == '=' || *format == '@') format++;
        const bool is_integer = std::strchr("iIlLqQ", *format) != nullptr;
        if (!is_integer || *format == 0 || format[1] != 0 ||
            (view.b.itemsize != 4 && view.b.itemsize != 8)) {
            not_integers(what);
        }
        const auto width = static_cast<size_t>(view.b.itemsize);
        widen(data, bytes / width, width, *format >= 'a', numbers, what);
        return numbers;
    }
    if (nb::hasattr(object, "__dlpack__")) {
        nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> tensor;
        if (!nb::try_cast(object, tensor, false)) not_integers(what);
        const auto type = tensor.dtype();
        const bool is_signed = type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
        if ((!is_signed && type.code != static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)) ||
            type.lanes != 1 || (type.bits != 32 && type.bits != 64)) {
            not_integers(what);
        }
        widen(static_cast<const uint8_t*>(tensor.data()), tensor.size(), type.bits / 8u, is_signed,
              numbers, what);
        return numbers;
    }
    not_integers(what);
}

NewBytes::NewBytes(size_t size)
    : object(
          nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)))) {
    if (!object.is_valid()) nb::raise_python_error();
}

}  // namespace kvtier
