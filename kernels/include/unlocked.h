// Python's lock, let go for as long as this lives.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace kvtier {

// As nanobind's gil_scoped_release, but for the end of the process: a thread that asks for the lock
// once the interpreter is going down is unwound by pthread_exit, which ends the whole process where
// it meets a noexcept frame. Here it sleeps instead; the end of the process is its end.
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
