// The module: every other file here registers its own part.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) { m.doc() = "kvtier's native parts: copies, names, mappings and the catalog's store."; }
