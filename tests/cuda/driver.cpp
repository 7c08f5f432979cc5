// A CUDA driver without a device, declared by the real cuda.h. Streams are threads that execute
// their operations later, an event is reached when its stream gets there, and device memory is host
// memory. It refuses or crashes where a real driver does: an address that is not on the device or
// registered, a call without a context. Tests pause streams, and ask which objects are left.
#include <cuda.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "host_kernels.h"

namespace {

enum Kind { kStreams, kEvents, kDeviceMemory, kPinned, kRegistered, kModules, kContexts, kKinds };
std::atomic<int> live[kKinds];
std::atomic<int> batches, delay_us, refuse_registration, held_copies, broken;

std::mutex ranges_mutex;
std::map<uintptr_t, std::pair<size_t, Kind>> ranges;  // start: size and kind

void add_range(uintptr_t start, size_t size, Kind kind) {
    const std::lock_guard lock(ranges_mutex);
    ranges[start] = {size, kind};
    live[kind]++;
}

bool drop_range(uintptr_t start, Kind kind) {
    const std::lock_guard lock(ranges_mutex);
    const auto found = ranges.find(start);
    if (found == ranges.end() || found->second.second != kind) return false;
    ranges.erase(found);
    live[kind]--;
    return true;
}

// Inside of one piece of memory that the device can access.
bool reachable(uintptr_t at, size_t size) {
    const std::lock_guard lock(ranges_mutex);
    auto after = ranges.upper_bound(at);
    if (after == ranges.begin()) return false;
    const auto& [start, range] = *--after;
    return at + size <= start + range.first;
}

struct Mark {
    std::mutex mutex;
    std::condition_variable changed;
    bool come = false;

    void set() {
        const std::lock_guard lock(mutex);
        come = true;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return come; });
    }
};

struct Event {
    std::mutex mutex;
    std::shared_ptr<Mark> mark;  // null before the first record

    std::shared_ptr<Mark> get() {
        const std::lock_guard lock(mutex);
        return mark;
    }
};

std::mutex gate_mutex;
std::condition_variable gate_changed;
bool gate_closed = false;

void before_copy() {
    std::unique_lock lock(gate_mutex);
    held_copies++;
    gate_changed.wait(lock, [] { return !gate_closed; });
    held_copies--;
    lock.unlock();
    if (const int most = delay_us) {
        static thread_local std::mt19937 random(
            std::hash<std::thread::id>()(std::this_thread::get_id()));
        usleep(random() % most);
    }
}

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> todo;
    bool ending = false;
    std::thread thread{[this] { run(); }};

    void add(std::function<void()> work) {
        const std::lock_guard lock(mutex);
        todo.push_back(std::move(work));
        changed.notify_all();
    }
    void wait() {
        const auto mark = std::make_shared<Mark>();
        add([mark] { mark->set(); });
        mark->wait();
    }
    void run() {
        for (;;) {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return ending || !todo.empty(); });
            if (todo.empty()) return;
            const auto work = std::move(todo.front());
            todo.pop_front();
            lock.unlock();
            work();
        }
    }
    ~Stream() {
        {
            const std::lock_guard lock(mutex);
            ending = true;
            changed.notify_all();
        }
        thread.join();
    }
};

Stream* of(CUstream handle) {
    static Stream* const unnamed = new Stream;
    return handle == nullptr ? unnamed : reinterpret_cast<Stream*>(handle);
}
Event* of(CUevent handle) { return reinterpret_cast<Event*>(handle); }

thread_local bool in_context = false;

CUresult state() {
    if (!in_context) return CUDA_ERROR_INVALID_CONTEXT;
    return broken ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

void copy_slowly(uintptr_t to, uintptr_t from, size_t size) {
    if (!reachable(to, size) || !reachable(from, size)) {
        broken = 1;  // freed since the check
        return;
    }
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
}

CUresult batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
               CUmemcpyAttributes* attributes, size_t* first, size_t kinds, CUstream stream) {
    if (const CUresult result = state()) return result;
    if (stream == nullptr || count == 0 || kinds != 1 || first[0] != 0 ||
        attributes[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
        attributes[0].flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct Copy {
        uintptr_t to, from;
        size_t size;
    };
    std::vector<Copy> copies;
    for (size_t i = 0; i < count; i++) {
        if (sizes[i] == 0 || !reachable(to[i], sizes[i]) || !reachable(from[i], sizes[i])) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        copies.push_back(
            {static_cast<uintptr_t>(to[i]), static_cast<uintptr_t>(from[i]), sizes[i]});
    }
    batches++;
    // In random order, because the order is undefined.
    std::shuffle(copies.begin(), copies.end(), std::mt19937(batches));
    of(stream)->add([copies] {
        before_copy();
        for (const Copy& copy : copies) copy_slowly(copy.to, copy.from, copy.size);
    });
    return CUDA_SUCCESS;
}

// All addresses of a part must be device memory, and its units must be consistent.
bool good_part(const kvtier::cuda::Part& part) {
    return reachable(part.raw, part.raw_bytes) && reachable(part.text, part.text_bytes) &&
           (part.scratch == 0 || reachable(part.scratch, 1)) &&
           (part.known == 0 ||
            reachable(part.known, sizeof(kvtier::cuda::calibrated::ProfilePart))) &&
           part.units != 0;
}

CUresult launch_codec(const CodecKernel& kernel, unsigned grid, unsigned threads, CUstream stream,
                      void** arguments) {
    const auto* parts = *static_cast<const kvtier::cuda::Part**>(arguments[0]);
    const auto* owners = *static_cast<const u32**>(arguments[1]);
    const auto units = *static_cast<u32*>(arguments[2]);
    auto* measures = *static_cast<kvtier::cuda::Measure**>(arguments[3]);
    auto* results = *static_cast<kvtier::cuda::Result**>(arguments[4]);
    of(stream)->add([=, &kernel] {
        before_copy();
        const auto table = [](const void* at, size_t size) {
            return reachable(reinterpret_cast<uintptr_t>(at), size);
        };
        bool good = table(owners, units * sizeof(u32));
        for (u32 i = 0; good && i < units; i++) {
            good =
                table(parts + owners[i], sizeof *parts) && good_part(parts[owners[i]]) &&
                table(results + owners[i], sizeof *results) &&
                table(measures + parts[owners[i]].unit, parts[owners[i]].units * sizeof *measures);
        }
        if (!good) {
            broken = 1;
            return;
        }
        run_on_host<32>(grid, threads, kernel.call, parts, owners, units, measures, results);
    });
    return CUDA_SUCCESS;
}

CUresult launch_digest(unsigned grid, unsigned threads, CUstream stream, void** arguments) {
    const auto* ranges = *static_cast<const kvtier::cuda::digest::Range**>(arguments[0]);
    const auto count = *static_cast<u32*>(arguments[1]);
    auto* digests = *static_cast<uint8_t**>(arguments[2]);
    of(stream)->add([=] {
        before_copy();
        bool good = reachable(reinterpret_cast<uintptr_t>(ranges), count * sizeof *ranges) &&
                    reachable(reinterpret_cast<uintptr_t>(digests), count * kvtier::kDigestBytes);
        for (u32 i = 0; good && i < count; i++) {
            good = ranges[i].bytes == 0 || reachable(ranges[i].address, ranges[i].bytes);
        }
        if (!good) {
            broken = 1;
            return;
        }
        run_on_host<32>(grid, threads, kvtier::cuda::digest::kvtier_digest, ranges, count, digests);
    });
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// --- for tests -------------------------------------------------------------------------------

void fake_device_memory(void* at, size_t size) {
    add_range(reinterpret_cast<uintptr_t>(at), size, kDeviceMemory);
}
void fake_forget_memory(void* at) { drop_range(reinterpret_cast<uintptr_t>(at), kDeviceMemory); }
int fake_live(int kind) { return live[kind]; }
int fake_held() { return held_copies; }
int fake_broken() { return broken; }
void fake_delay(int microseconds) { delay_us = microseconds; }
void fake_refuse_registration(int count) { refuse_registration = count; }
void fake_break() { broken = 1; }
void fake_mend() { broken = 0; }
void fake_hold(int closed) {
    const std::lock_guard lock(gate_mutex);
    gate_closed = closed != 0;
    gate_changed.notify_all();
}
void fake_kernel(const Piece* pieces, u32 piece_count, const u64* slots, const u32* ids,
                 u32 block_count, u32 inwards, u32 grid, u32 threads) {
    run_on_host(grid, threads, kvtier_copy_blocks, pieces, piece_count, slots, ids, block_count,
                inwards);
}

// --- the driver ------------------------------------------------------------------------------

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_INVALID_VALUE      ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_INVALID_CONTEXT  ? "CUDA_ERROR_INVALID_CONTEXT"
            : error == CUDA_ERROR_ILLEGAL_ADDRESS  ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : error == CUDA_ERROR_OPERATING_SYSTEM ? "CUDA_ERROR_OPERATING_SYSTEM"
                                                   : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int number) {
    if (number != 0) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
    std::strncpy(name, "no device", static_cast<size_t>(size));
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
    *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR                  ? 9
             : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR                ? 0
             : which == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING                      ? 1
             : which == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM ? 1
                                                                                    : -1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = reinterpret_cast<CUcontext>(&live);
    live[kContexts]++;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    live[kContexts]--;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    in_context = context != nullptr;
    return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    *mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
    if (const CUresult result = state()) return result;
    if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *stream = reinterpret_cast<CUstream>(new Stream);
    live[kStreams]++;
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
    delete of(stream);
    live[kStreams]--;
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
    if (!in_context) return CUDA_ERROR_INVALID_CONTEXT;
    of(stream)->wait();
    return state();
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    if (const CUresult result = state()) return result;
    if (const auto mark = of(event)->get()) of(stream)->add([mark] { mark->wait(); });
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* event, unsigned) {
    if (const CUresult result = state()) return result;
    *event = reinterpret_cast<CUevent>(new Event);
    live[kEvents]++;
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
    delete of(event);
    live[kEvents]--;
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    if (const CUresult result = state()) return result;
    const auto mark = std::make_shared<Mark>();
    {
        const std::lock_guard lock(of(event)->mutex);
        of(event)->mark = mark;
    }
    of(stream)->add([mark] { mark->set(); });
    return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) {
    if (!in_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (const auto mark = of(event)->get()) mark->wait();
    return state();
}
CUresult cuMemAlloc(CUdeviceptr* at, size_t size) {
    if (const CUresult result = state()) return result;
    void* const memory = std::aligned_alloc(512, (size + 511) / 512 * 512);
    std::memset(memory, 0xA5, size);
    *at = reinterpret_cast<CUdeviceptr>(memory);
    add_range(*at, size, kDeviceMemory);
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr at) {
    if (!drop_range(at, kDeviceMemory)) return CUDA_ERROR_INVALID_VALUE;
    std::free(reinterpret_cast<void*>(at));
    return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** at, size_t size, unsigned flags) {
    if (const CUresult result = state()) return result;
    if ((flags & CU_MEMHOSTALLOC_DEVICEMAP) == 0) return CUDA_ERROR_INVALID_VALUE;
    *at = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    add_range(reinterpret_cast<uintptr_t>(*at), size, kPinned);
    return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* at) {
    if (!drop_range(reinterpret_cast<uintptr_t>(at), kPinned)) return CUDA_ERROR_INVALID_VALUE;
    std::free(at);
    return CUDA_SUCCESS;
}
CUresult cuMemHostRegister(void* at, size_t size, unsigned flags) {
    if (const CUresult result = state()) return result;
    if ((flags & CU_MEMHOSTREGISTER_DEVICEMAP) == 0) return CUDA_ERROR_INVALID_VALUE;
    if (refuse_registration > 0) {
        refuse_registration--;
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (reachable(reinterpret_cast<uintptr_t>(at), size))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add_range(reinterpret_cast<uintptr_t>(at), size, kRegistered);
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void* at) {
    return drop_range(reinterpret_cast<uintptr_t>(at), kRegistered)
               ? CUDA_SUCCESS
               : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    if (const CUresult result = state()) return result;
    if (!reachable(to, size)) return CUDA_ERROR_INVALID_VALUE;
    if (reachable(from, size)) {
        of(stream)->add([=] {
            before_copy();
            copy_slowly(to, from, size);
        });
        return CUDA_SUCCESS;
    }
    // The call copies memory that the device cannot access before it returns.
    of(stream)->wait();
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
    return CUDA_SUCCESS;
}
#undef cuMemcpyBatchAsync
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* first, size_t kinds,
                               CUstream stream) {
    return batch(to, from, sizes, count, attributes, first, kinds, stream);
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    if (const CUresult result = state()) return result;
    if (std::memcmp(image, "\177ELF", 4) != 0 &&
        std::strcmp(static_cast<const char*>(image), "host") != 0) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = reinterpret_cast<CUmodule>(&batches);
    live[kModules]++;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) {
    live[kModules]--;
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    if (std::strcmp(name, "kvtier_copy_blocks") == 0) {
        *function = reinterpret_cast<CUfunction>(&kvtier_copy_blocks);
        return CUDA_SUCCESS;
    }
    if (std::strcmp(name, "kvtier_digest") == 0) {
        *function = reinterpret_cast<CUfunction>(&kvtier::cuda::digest::kvtier_digest);
        return CUDA_SUCCESS;
    }
    for (const CodecKernel& kernel : kCodecKernels) {
        if (std::strcmp(name, kernel.name) != 0) continue;
        *function = reinterpret_cast<CUfunction>(const_cast<CodecKernel*>(&kernel));
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn work, void* data) {
    if (const CUresult result = state()) return result;
    of(stream)->add([=] { work(data); });
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid, unsigned y, unsigned z,
                        unsigned threads, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void** arguments, void** extra) {
    if (const CUresult result = state()) return result;
    for (const CodecKernel& kernel : kCodecKernels) {
        if (function != reinterpret_cast<CUfunction>(const_cast<CodecKernel*>(&kernel))) continue;
        const bool good = grid != 0 && threads == 32 * kvtier::cuda::kWarps && shared_bytes == 0 &&
                          y * z * block_y * block_z == 1 && extra == nullptr;
        return good ? launch_codec(kernel, grid, threads, stream, arguments)
                    : CUDA_ERROR_INVALID_VALUE;
    }
    if (function == reinterpret_cast<CUfunction>(&kvtier::cuda::digest::kvtier_digest)) {
        const bool good = grid != 0 && threads == 32 * kvtier::cuda::kWarps && shared_bytes == 0 &&
                          y * z * block_y * block_z == 1 && extra == nullptr;
        return good ? launch_digest(grid, threads, stream, arguments) : CUDA_ERROR_INVALID_VALUE;
    }
    if (function != reinterpret_cast<CUfunction>(&kvtier_copy_blocks) || grid == 0 ||
        threads == 0 || threads > 256 || y * z * block_y * block_z != 1 || shared_bytes != 0 ||
        extra != nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto* pieces = *static_cast<const Piece**>(arguments[0]);
    const auto piece_count = *static_cast<u32*>(arguments[1]);
    const auto* slots = *static_cast<const u64**>(arguments[2]);
    const auto* ids = *static_cast<const u32**>(arguments[3]);
    const auto block_count = *static_cast<u32*>(arguments[4]);
    const auto inwards = *static_cast<u32*>(arguments[5]);
    of(stream)->add([=] {
        before_copy();
        const auto table = [](const void* at, size_t size) {
            return reachable(reinterpret_cast<uintptr_t>(at), size);
        };
        bool good = table(pieces, piece_count * sizeof(Piece)) &&
                    table(slots, block_count * sizeof(u64)) &&
                    table(ids, block_count * sizeof(u32));
        for (u32 i = 0; good && i < block_count; i++) {
            for (u32 j = 0; good && j < piece_count; j++) {
                good = reachable(pieces[j].base + ids[i] * pieces[j].stride, pieces[j].bytes) &&
                       reachable(slots[i] + pieces[j].start, pieces[j].bytes);
            }
        }
        if (!good) {
            broken = 1;
            return;
        }
        run_on_host(grid, threads, kvtier_copy_blocks, pieces, piece_count, slots, ids, block_count,
                    inwards);
    });
    return CUDA_SUCCESS;
}
}
