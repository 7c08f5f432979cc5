// A warp of 32 threads decodes fix4 parts while "another warp" keeps changing their damage flags.
// Exits with 0 if all lanes end; otherwise an alarm ends it.
#define KVTIER_HOST_KERNELS "lane_threads.h"
#include <unistd.h>

#include <atomic>
#include <cstdio>

#include "host_codecs.h"

using namespace kvtier;

int main(int, char** arguments) {
    alarm(static_cast<unsigned>(std::atoi(arguments[1])));
    constexpr size_t elements = 1024;
    std::vector<uint16_t> raw(elements), back(elements);
    uint32_t state = 7;
    for (uint16_t& one : raw) {
        state = state * 1664525 + 1013904223;
        one = static_cast<uint16_t>(0x3F80 + (state >> 24) % 8);
    }
    const size_t nbytes = elements * sizeof(uint16_t);
    std::vector<uint8_t> text(2 * nbytes);
    cuda::HostPart encoder(codec::Codec::kFix4, codec::Element::kBf16, nbytes, nullptr);
    const size_t size =
        encoder.encode(reinterpret_cast<uint8_t*>(raw.data()), {}, false, 0, text.data());
    if (size == 0) return 2;
    auto* const to = reinterpret_cast<uint8_t*>(back.data());
    cuda::HostPart sound(codec::Codec::kFix4, codec::Element::kBf16, nbytes, nullptr);
    if (!sound.decode(text.data(), size, false, to) || back != raw) return 3;

    cuda::HostPart part(codec::Codec::kFix4, codec::Element::kBf16, nbytes, nullptr);
    std::atomic<bool> over = false;
    std::thread other([&] {
        volatile auto& bad = part.result().bad;
        while (!over) {
            bad = bad == 0;
            std::this_thread::yield();
        }
    });
    for (int round = 0; round < 60; round++) part.decode(text.data(), size, false, to);
    over = true;
    other.join();
    std::puts("every lane came back");
    return 0;
}
