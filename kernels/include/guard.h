// Shared mappings whose pages another process may take away.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvtier {

// A mapping that stays readable and writable when its file has no page behind an address: the
// handler of SIGBUS then puts zeroed private memory in place of the whole mapping, and says so in
// `lost`. No thread that touches it may block SIGBUS.
struct Guard {
    const uintptr_t begin;
    std::atomic<uintptr_t> end;  // 0 once it guards nothing
    std::atomic<bool> lost{false};
    Guard* const next;
};

// Guards a range until `unguard`. Guards are never freed nor used again: a handler in another
// thread may look at them at any time.
Guard* guard(void* at, uint64_t size);
void unguard(Guard* guard);

}  // namespace kvtier
