// Protects shared mappings against another process that truncates their file.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvtier {

// A mapping that stays readable and writable if its file loses pages. The SIGBUS handler then
// replaces the whole mapping with zeroed private memory, and sets `lost`. A thread that uses the
// mapping must not block SIGBUS.
struct Guard {
    const uintptr_t begin;
    std::atomic<uintptr_t> end;  // 0 after unguard
    std::atomic<bool> lost{false};
    Guard* const next;
};

// Guards a range until `unguard`. Guards are never freed or reused: a handler in another thread may
// read them at any time.
Guard* guard(void* at, uint64_t size);
void unguard(Guard* guard);

}  // namespace kvtier
