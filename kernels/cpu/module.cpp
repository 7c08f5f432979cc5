// The module: each other file registers its own part.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_cpu(nb::module_& m);
void bind_mapping(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_names(nb::module_& m);
void bind_prefault(nb::module_& m);
void bind_disk(nb::module_& m);
void bind_frame(nb::module_& m);
void bind_codec(nb::module_& m);
void bind_device(nb::module_& m);
void bind_policy(nb::module_& m);
void bind_store(nb::module_& m);
void bind_notes(nb::module_& m);
void bind_replay(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "kvtier's native parts: copies, names, mappings, disks and the catalog's store.";
    // A process that ends with an open client, even after a signal, is no leak: no warnings.
    nb::set_leak_warnings(false);
    bind_cpu(m);
    bind_mapping(m);
    bind_blocks(m);
    bind_names(m);
    bind_prefault(m);
    bind_disk(m);
    bind_frame(m);
    bind_codec(m);
    bind_device(m);
    bind_policy(m);
    bind_store(m);
    bind_notes(m);
    bind_replay(m);
}
