// Mappings, memoryviews of slots, and the check that generations have not changed.
#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "map_file.h"
#include "unlocked.h"

// Kernel numbers, for C libraries older than Linux 5.14.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace nb = nanobind;

namespace kvtier {
namespace {

constexpr uint64_t kPopulateStep = uint64_t{64} << 20;

[[noreturn]] void raise_errno(int number) {
    errno = number;
    PyErr_SetFromErrno(PyExc_OSError);
    nb::raise_python_error();
}

PyTypeObject* mapping_type = nullptr;

// The range that the next memoryview of a mapping exposes. The mapping itself exports the view,
// which costs one call and keeps it alive. Python offers no way to pass the range.
struct Window {
    uint8_t* data;
    Py_ssize_t size;
    bool writable;
};
thread_local const Window* window = nullptr;

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const auto* m = nb::inst_ptr<Mapping>(nb::handle(self));
    if (const Window* shown = window) {
        return PyBuffer_FillInfo(view, self, shown->data, shown->size, !shown->writable, flags);
    }
    return PyBuffer_FillInfo(view, self, m->data(), static_cast<Py_ssize_t>(m->size()),
                             !m->writable(), flags);
}

PyType_Slot mapping_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                               {0, nullptr}};

std::string slot_name(size_t i) { return "slot " + std::to_string(i); }

nb::list views(nb::handle mappings, nb::handle packed, uint64_t bytes, bool writable) {
    Slots slots(mappings, packed);
    nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(slots.count())));
    const Window** exposed = &window;  // finding a thread's own variable is a call
    for (size_t i = 0; i < slots.count(); i++) {
        const Window shown = {slots.place(i, bytes, writable), static_cast<Py_ssize_t>(bytes),
                              writable};
        const nb::handle mapping = slots.object(i, slots.at(i).extent);
        *exposed = &shown;
        PyObject* view = PyMemoryView_FromObject(mapping.ptr());
        *exposed = nullptr;
        if (view == nullptr) nb::raise_python_error();
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), view);
    }
    return list;
}

// True if another object uses the memory of this view. Slices of it and NumPy arrays over it hold
// the underlying buffer, not the view: `release` alone would not invalidate them.
bool shared(PyObject* object) {
    const auto* view = reinterpret_cast<PyMemoryViewObject*>(object);
    const bool released = (view->flags & _Py_MEMORYVIEW_RELEASED) != 0;
    return view->exports > 0 || view->mbuf->exports > (released ? 0 : 1);
}

size_t release_views(nb::list list) {
    static PyObject* const release =
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyMemoryView_Type), "release");
    size_t left = 0;
    const nb::object items = nb::steal(PySequence_Tuple(list.ptr()));
    if (!items.is_valid()) nb::raise_python_error();
    for (nb::handle view : nb::borrow<nb::tuple>(items)) {
        if (!PyMemoryView_Check(view.ptr())) throw nb::type_error("views: must all be memoryviews");
        if (shared(view.ptr())) {
            left++;
        } else {
            PyObject* done = PyObject_CallOneArg(release, view.ptr());
            if (done == nullptr) nb::raise_python_error();
            Py_DECREF(done);
        }
    }
    return left;
}

size_t fresh(nb::handle tables, nb::handle packed) {
    Slots slots(tables, packed);
    // The caller's earlier reads of the bytes must happen before the generations are read.
    std::atomic_thread_fence(std::memory_order_acquire);
    for (size_t i = 0; i < slots.count(); i++) {
        const Slot slot = slots.at(i);
        const Mapping* table = slots.mapping(i, slot.extent);
        const uint64_t entry = slot.offset / kPage;
        if (entry >= table->size() / sizeof(uint64_t)) {
            fail(nb::index_error, slot_name(i), ": its offset has no generation");
        }
        const auto* generations = reinterpret_cast<const uint64_t*>(table->data());
        if (__atomic_load_n(generations + entry, __ATOMIC_ACQUIRE) != slot.generation) return i;
    }
    return slots.count();
}

}  // namespace

Mapping::Mapping(int fd, uint64_t size, bool writable) : size_(size), writable_(writable) {
    if (size == 0 || size > static_cast<uint64_t>(PY_SSIZE_T_MAX)) {
        throw nb::value_error("size: must be 1 to 2^63-1 bytes");
    }
    struct stat status;
    if (fstat(fd, &status) != 0) raise_errno(errno);
    // An access beyond the end of the file would kill the process.
    if (static_cast<uint64_t>(status.st_size) < size) {
        fail(nb::value_error, "the file has ", status.st_size, " bytes, fewer than the ", size,
             " to map");
    }
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* at = map_file(fd, size, protection);
    if (at == MAP_FAILED) raise_errno(errno);
    data_ = static_cast<uint8_t*>(at);
}

Mapping::~Mapping() {
    if (guard_ != nullptr) unguard(guard_);
    // Takes a tenth of a second per GiB.
    const Unlocked unlocked;
    munmap(data_, size_);
}

void Mapping::guard() {
    if (guard_ == nullptr) guard_ = kvtier::guard(data_, size_);
}

bool Mapping::populate() const {
    const int advice = writable_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    for (uint64_t done = 0; done < size_;) {
        const uint64_t step = std::min(kPopulateStep, size_ - done);
        if (madvise(data_ + done, step, advice) == 0) {
            done += step;
        } else if (errno != EINTR && errno != EAGAIN) {
            return false;
        }
    }
    return true;
}

Slots::Slots(nb::handle mappings, nb::handle slots) {
    if (!PyList_Check(mappings.ptr()) && !PyTuple_Check(mappings.ptr())) {
        throw nb::type_error("mappings: must be a list of Mapping or None");
    }
    list_ = nb::borrow(mappings);
    packed_.take(slots, Access::kRead, "slots");
    if (packed_.size() % sizeof(Slot) != 0) {
        throw nb::value_error("slots: packed slots have 24 bytes each");
    }
    count_ = packed_.size() / sizeof(Slot);
    known_.resize(static_cast<size_t>(PySequence_Fast_GET_SIZE(mappings.ptr())));
}

Slot Slots::at(size_t i) const {
    Slot slot;
    std::memcpy(&slot, packed_.data() + sizeof(Slot) * i, sizeof(Slot));
    return slot;
}

nb::handle Slots::object(size_t i, uint32_t extent) {
    mapping(i, extent);
    return PySequence_Fast_GET_ITEM(list_.ptr(), static_cast<Py_ssize_t>(extent));
}

Mapping* Slots::mapping(size_t i, uint32_t extent) {
    if (extent >= known_.size()) {
        fail(nb::index_error, slot_name(i), ": extent ", extent, " of ", known_.size());
    }
    Mapping*& known = known_[extent];
    if (known == nullptr) {
        PyObject* item = PySequence_Fast_GET_ITEM(list_.ptr(), static_cast<Py_ssize_t>(extent));
        if (item == Py_None) {
            fail(nb::index_error, slot_name(i), ": extent ", extent, " is not mapped");
        }
        if (Py_TYPE(item) != mapping_type) {
            throw nb::type_error("mappings: must be a list of Mapping or None");
        }
        known = nb::inst_ptr<Mapping>(nb::handle(item));
    }
    return known;
}

uint8_t* Slots::place(size_t i, uint64_t bytes, bool writable) {
    const Slot slot = at(i);
    if (slot.reserved != 0) {
        fail(nb::value_error, slot_name(i), ": its reserved field is not zero");
    }
    const Mapping* m = mapping(i, slot.extent);
    if (slot.offset > m->size() || bytes > m->size() - slot.offset) {
        fail(nb::index_error, slot_name(i), ": ", bytes, " bytes at ", slot.offset,
             " of an extent of ", m->size());
    }
    if (writable && !m->writable()) {
        fail(nb::value_error, slot_name(i), ": its extent is mapped read-only");
    }
    return m->data() + slot.offset;
}

}  // namespace kvtier

void bind_mapping(nb::module_& m) {
    using namespace kvtier;
    const auto type = nb::class_<Mapping>(m, "Mapping", nb::type_slots(mapping_slots),
                                          nb::is_final(), nb::is_weak_referenceable())
                          .def(nb::init<int, uint64_t, bool>(), nb::arg("fd"), nb::arg("size"),
                               nb::arg("writable"))
                          .def_prop_ro("size", &Mapping::size)
                          .def_prop_ro("writable", &Mapping::writable)
                          .def_prop_ro("address",
                                       [](const Mapping& self) {
                                           return reinterpret_cast<uintptr_t>(self.data());
                                       })
                          .def("guard", &Mapping::guard)
                          .def_prop_ro("lost", &Mapping::lost)
                          .def("populate", &Mapping::populate, nb::call_guard<kvtier::Unlocked>());
    mapping_type = reinterpret_cast<PyTypeObject*>(type.ptr());
    m.def("views", &views, nb::arg("mappings"), nb::arg("slots"), nb::arg("nbytes"),
          nb::arg("writable"));
    m.def("release_views", &release_views, nb::arg("views"));
    m.def("fresh", &fresh, nb::arg("tables"), nb::arg("slots"));
}
