// Releases the GIL during its lifetime.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace kvtier {

// Like nanobind's gil_scoped_release, except at the end of the process: a thread that requests the
// GIL during finalization is unwound by pthread_exit, which would end the whole process at a
// noexcept frame. Here it sleeps until the process ends.
class Unlocked {
 public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    ~Unlocked() {
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            for (;;) pause();
        }
    }

 private:
    PyThreadState* state_;
};

}  // namespace kvtier
