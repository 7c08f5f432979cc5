// The SIGBUS handler, and the list of mappings that it searches.
#include "guard.h"

#include <signal.h>
#include <sys/mman.h>

#include <cerrno>
#include <mutex>
#include <system_error>

namespace kvtier {
namespace {

std::atomic<Guard*> guards{nullptr};
std::mutex changing;
struct sigaction previous;
bool installed = false;

// Replaces the whole mapping at once: one mapping per page could exceed the kernel's limit.
bool replace(Guard& guard, uintptr_t end) {
    void* const at =
        mmap(reinterpret_cast<void*>(guard.begin), end - guard.begin, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return false;
    guard.lost.store(true, std::memory_order_release);
    return true;
}

void on_bus_error(int, siginfo_t* info, void*) {
    const int error = errno;
    const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
    for (Guard* one = guards.load(); info->si_code > 0 && one != nullptr; one = one->next) {
        const uintptr_t end = one->end.load();
        if (at < one->begin || at >= end) continue;
        // Another thread may have replaced it since: then the repeated access succeeds.
        if (one->lost.load(std::memory_order_acquire) || replace(*one, end)) {
            errno = error;
            return;
        }
    }
    // Not a guarded mapping. The repeated access meets the previous handler.
    sigaction(SIGBUS, &previous, nullptr);
    if (info->si_code <= 0) raise(SIGBUS);
    errno = error;
}

void install() {
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &previous) != 0) {
        throw std::system_error(errno, std::generic_category(), "SIGBUS");
    }
    installed = true;
}

}  // namespace

Guard* guard(void* at, uint64_t size) {
    const std::lock_guard lock(changing);
    if (!installed) install();
    const auto begin = reinterpret_cast<uintptr_t>(at);
    auto* const one = new Guard{begin, begin + size, false, guards.load()};
    guards.store(one);
    return one;
}

void unguard(Guard* guard) { guard->end.store(0); }

}  // namespace kvtier
