// A CUDA driver without a device, declared by the real cuda.h. Streams are threads that execute
// their operations later, an event is reached when its stream gets there, and device memory is host
// memory. It refuses or crashes where a real driver does: an address that is not on the device or
// registered, a call without a context, a wrong device. Tests pause streams, choose how many
// devices there are and how they fail, and ask which objects are left.
//
// This file: devices, contexts, copies, kernels. driver_streams.cpp: streams, events, graphs.
// driver_memory.cpp: memory. A process of its own is configured by its environment:
// KVTIER_CUDA_DEVICES, KVTIER_CUDA_BYTES (of each device), KVTIER_CUDA_VERSION.
#include "driver.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "host_kernels.h"

namespace fake {

namespace {

Device* const devices = new Device[kMostDevices];
std::atomic<int> device_count{1}, version{CUDA_VERSION};
std::atomic<bool> inited{false}, forked{false};
thread_local std::vector<Context*> contexts;  // the last one is current

std::mutex gate_mutex;
auto& gate_changed = *new std::condition_variable;
bool gate_closed = false;
std::atomic<int> batches, delay_us, held_copies;

std::mutex calls_mutex;
auto& all_calls = *new std::vector<Calls*>;

// What a process that tests start sets in its environment.
long configured(const char* name, long usual) {
    const char* const text = std::getenv(name);
    return text == nullptr ? usual : std::atol(text);
}

[[maybe_unused]] const bool configured_once = [] {
    for (int i = 0; i < kMostDevices; i++) {
        devices[i].primary.device = i;
        devices[i].primary.primary = true;
        devices[i].total = static_cast<size_t>(configured("KVTIER_CUDA_BYTES", long{16} << 30));
    }
    device_count = static_cast<int>(configured("KVTIER_CUDA_DEVICES", 1));
    version = static_cast<int>(configured("KVTIER_CUDA_VERSION", CUDA_VERSION));
    pthread_atfork(nullptr, nullptr, [] { forked = inited.load(); });
    return true;
}();

}  // namespace

Device& device_at(int number) { return devices[number]; }
int count_devices() { return device_count; }

Calls::Calls(const char* name) : name(name) {
    const std::lock_guard lock(calls_mutex);
    all_calls.push_back(this);
}

CUresult initialized() {
    // A child has none of its parent's threads and mappings of the device.
    return inited && !forked ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}
Context* current_context() { return contexts.empty() ? nullptr : contexts.back(); }
CUresult usable(const Context* context) {
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (context->users == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return static_cast<CUresult>(devices[context->device].error.load());
}

void before_copy(int device) {
    std::unique_lock lock(gate_mutex);
    held_copies++;
    gate_changed.wait(lock, [&] { return !gate_closed || devices[device].error != 0; });
    held_copies--;
    lock.unlock();
    if (const int most = delay_us) {
        static thread_local std::mt19937 random(
            std::hash<std::thread::id>()(std::this_thread::get_id()));
        usleep(random() % most);
    }
}

void set_error(int device, int error) {
    const std::lock_guard lock(gate_mutex);
    devices[device].error = error;
    gate_changed.notify_all();
}
void fault(int device) { set_error(device, CUDA_ERROR_ILLEGAL_ADDRESS); }

namespace {

// Copies when the stream gets there. The memory may have been freed since the call.
void copy_slowly(int device, uintptr_t to, uintptr_t from, size_t size) {
    if (devices[device].error != 0) return;
    if (!reachable(to, size, -1, true) || !reachable(from, size)) return fault(device);
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
}

CUresult batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
               CUmemcpyAttributes* attributes, size_t* first, size_t kinds, CUstream handle,
               Context* context) {
    const StreamPtr stream = stream_of(handle, context);
    if (handle == nullptr || count == 0 || kinds != 1 || first[0] != 0 ||
        attributes[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
        attributes[0].flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    struct Copy {
        uintptr_t to, from;
        size_t size;
    };
    std::vector<Copy> copies;
    for (size_t i = 0; i < count; i++) {
        if (sizes[i] == 0 || !reachable(to[i], sizes[i], -1, true) ||
            !reachable(from[i], sizes[i])) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        copies.push_back(
            {static_cast<uintptr_t>(to[i]), static_cast<uintptr_t>(from[i]), sizes[i]});
    }
    batches++;
    // In random order, because the order is undefined.
    std::shuffle(copies.begin(), copies.end(), std::mt19937(batches));
    const int device = stream->context->device;
    return enqueue(stream, [copies, device] {
        before_copy(device);
        for (const Copy& copy : copies) copy_slowly(device, copy.to, copy.from, copy.size);
    });
}

// A copy between any memory of devices and of the host. Memory of the host that is not registered
// is staged: the call reads a source before it returns, and returns when a target is written.
CUresult copy(uintptr_t to, uintptr_t from, size_t size, CUstream handle, Context* context) {
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (size == 0) return CUDA_SUCCESS;
    const bool from_known = reachable(from, size), to_known = reachable(to, size, -1, true);
    if ((!from_known && in_device_region(from)) || (!to_known && in_device_region(to))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const int device = stream->context->device;
    if (from_known && to_known) {
        return enqueue(stream, [=] {
            before_copy(device);
            copy_slowly(device, to, from, size);
        });
    }
    if (from_known) {
        const auto done = std::make_shared<Mark>();
        KVTIER_TRY(enqueue(stream, [=] {
            before_copy(device);
            if (devices[device].error == 0 && !reachable(from, size)) fault(device);
            if (devices[device].error == 0) {
                std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
            }
            done->set();
        }));
        done->wait();
        return usable(stream->context);
    }
    finish(stream);
    const auto staged = std::make_shared<std::vector<char>>(size);
    std::memcpy(staged->data(), reinterpret_cast<void*>(from), size);
    return enqueue(stream, [=] {
        before_copy(device);
        if (devices[device].error != 0) return;
        if (to_known && !reachable(to, size, -1, true)) return fault(device);
        std::memcpy(reinterpret_cast<void*>(to), staged->data(), size);
    });
}

// A copy that has ended when the call returns; it uses the legacy stream.
CUresult copy_now(uintptr_t to, uintptr_t from, size_t size, Context* context) {
    KVTIER_TRY(refuse_unsafe());
    KVTIER_TRY(copy(to, from, size, nullptr, context));
    finish(stream_of(nullptr, context));
    return usable(context);
}

// A module of a context, and its functions: handles of kernels, which are void* here.
struct Module {
    Context* context;
    unsigned generation;
    std::vector<std::unique_ptr<const void*>> functions;
};
std::mutex modules_mutex;
auto& modules = *new std::map<void*, std::unique_ptr<Module>>;

// The kernel of a function of this context, or null.
const void* kernel_of(CUfunction handle, const Context* context) {
    const std::lock_guard lock(modules_mutex);
    for (const auto& [_, module] : modules) {
        if (module->context != context || module->generation != context->generation) continue;
        for (const auto& function : module->functions) {
            if (reinterpret_cast<CUfunction>(function.get()) == handle) return *function;
        }
    }
    return nullptr;
}

// All addresses of a part must be device memory, and its units must be consistent.
bool good_part(const kvtier::cuda::Part& part, int device) {
    return reachable(part.raw, part.raw_bytes, device) &&
           reachable(part.text, part.text_bytes, device) &&
           (part.scratch == 0 || reachable(part.scratch, 1, device)) &&
           (part.known == 0 ||
            reachable(part.known, sizeof(kvtier::cuda::calibrated::ProfilePart), device)) &&
           part.units != 0;
}

CUresult launch_codec(const CodecKernel& kernel, unsigned grid, unsigned threads,
                      const StreamPtr& stream, void** arguments) {
    const auto* parts = *static_cast<const kvtier::cuda::Part**>(arguments[0]);
    const auto* owners = *static_cast<const u32**>(arguments[1]);
    const auto units = *static_cast<u32*>(arguments[2]);
    auto* measures = *static_cast<kvtier::cuda::Measure**>(arguments[3]);
    auto* results = *static_cast<kvtier::cuda::Result**>(arguments[4]);
    const int device = stream->context->device;
    return enqueue(stream, [=, &kernel] {
        before_copy(device);
        if (device_at(device).error != 0) return;
        const auto table = [device](const void* at, size_t size) {
            return reachable(reinterpret_cast<uintptr_t>(at), size, device);
        };
        bool good = table(owners, units * sizeof(u32));
        for (u32 i = 0; good && i < units; i++) {
            good =
                table(parts + owners[i], sizeof *parts) && good_part(parts[owners[i]], device) &&
                table(results + owners[i], sizeof *results) &&
                table(measures + parts[owners[i]].unit, parts[owners[i]].units * sizeof *measures);
        }
        if (!good) {
            fault(device);
            return;
        }
        run_on_host<32>(grid, threads, kernel.call, parts, owners, units, measures, results);
    });
}

CUresult launch_digest(unsigned grid, unsigned threads, const StreamPtr& stream, void** arguments) {
    const auto* ranges = *static_cast<const kvtier::cuda::digest::Range**>(arguments[0]);
    const auto count = *static_cast<u32*>(arguments[1]);
    auto* digests = *static_cast<uint8_t**>(arguments[2]);
    const int device = stream->context->device;
    return enqueue(stream, [=] {
        before_copy(device);
        if (device_at(device).error != 0) return;
        bool good =
            reachable(reinterpret_cast<uintptr_t>(ranges), count * sizeof *ranges, device) &&
            reachable(reinterpret_cast<uintptr_t>(digests), count * kvtier::kDigestBytes, device,
                      true);
        for (u32 i = 0; good && i < count; i++) {
            good = ranges[i].bytes == 0 || reachable(ranges[i].address, ranges[i].bytes, device);
        }
        if (!good) {
            fault(device);
            return;
        }
        run_on_host<32>(grid, threads, kvtier::cuda::digest::kvtier_digest, ranges, count, digests);
    });
}

}  // namespace

}  // namespace fake

using namespace fake;

extern "C" {

// --- for tests -------------------------------------------------------------------------------

int fake_live(int kind) { return live[kind]; }
int fake_held() { return held_copies; }
int fake_broken() {
    for (int i = 0; i < kMostDevices; i++) {
        if (devices[i].error != 0) return devices[i].error;
    }
    return 0;
}
void fake_delay(int microseconds) { delay_us = microseconds; }
void fake_break() { fault(0); }
// Every call for this device returns the error from now on; 0: the device works again.
void fake_lose(int device, int error) { set_error(device, error); }
void fake_mend() {
    for (int i = 0; i < kMostDevices; i++) set_error(i, 0);
}
void fake_hold(int closed) {
    const std::lock_guard lock(gate_mutex);
    gate_closed = closed != 0;
    gate_changed.notify_all();
}
void fake_devices(int count) {
    device_count = count;
    if (count == 0) inited = false;
}
void fake_bytes(int device, size_t total) { devices[device].total = total; }
void fake_taken(int device, int taken) { devices[device].taken = taken; }
void fake_version(int number) { version = number; }
// Counts the calls of a function, or of all functions if there is no name.
long fake_calls(const char* name) {
    const std::lock_guard lock(calls_mutex);
    long found = 0;
    for (const Calls* one : all_calls) {
        if (name == nullptr || std::strcmp(one->name, name) == 0) found += one->count;
    }
    return found;
}
// Adds a function to a stream without a call of the driver.
void fake_later(CUstream handle, CUhostFn work, void* data) {
    const StreamPtr stream = stream_of(handle, &devices[0].primary);
    if (stream != nullptr) enqueue(stream, [=] { work(data); });
}
void fake_kernel(const Piece* pieces, u32 piece_count, const u64* slots, const u32* ids,
                 u32 block_count, u32 inwards, u32 grid, u32 threads) {
    run_on_host(grid, threads, kvtier_copy_blocks, pieces, piece_count, slots, ids, block_count,
                inwards);
}

// --- the driver, its devices -------------------------------------------------------------------

CUresult cuInit(unsigned flags) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (device_count == 0) return CUDA_ERROR_NO_DEVICE;
    inited = true;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* number) {
    *number = version;
    return CUDA_SUCCESS;
}
struct Named {
    CUresult error;
    const char *name, *text;
};
static constexpr Named kErrors[] = {
#define KVTIER_ERROR(NAME, TEXT) {CUDA_ERROR_##NAME, "CUDA_ERROR_" #NAME, TEXT}
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    KVTIER_ERROR(INVALID_VALUE, "invalid argument"),
    KVTIER_ERROR(OUT_OF_MEMORY, "out of memory"),
    KVTIER_ERROR(NOT_INITIALIZED, "initialization error"),
    KVTIER_ERROR(DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    KVTIER_ERROR(NO_DEVICE, "no CUDA-capable device is detected"),
    KVTIER_ERROR(INVALID_DEVICE, "invalid device ordinal"),
    KVTIER_ERROR(INVALID_IMAGE, "device kernel image is invalid"),
    KVTIER_ERROR(INVALID_CONTEXT, "invalid device context"),
    KVTIER_ERROR(ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    KVTIER_ERROR(OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    KVTIER_ERROR(INVALID_HANDLE, "invalid resource handle"),
    KVTIER_ERROR(ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    KVTIER_ERROR(NOT_FOUND, "named symbol not found"),
    KVTIER_ERROR(NOT_READY, "device not ready"),
    KVTIER_ERROR(ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    KVTIER_ERROR(CONTEXT_IS_DESTROYED, "context is destroyed"),
    KVTIER_ERROR(HOST_MEMORY_ALREADY_REGISTERED, "part or all of the memory is already mapped"),
    KVTIER_ERROR(HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered region"),
    KVTIER_ERROR(LAUNCH_FAILED, "unspecified launch failure"),
    KVTIER_ERROR(STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    KVTIER_ERROR(STREAM_CAPTURE_INVALIDATED,
                 "operation failed due to a previous error during capture"),
    KVTIER_ERROR(STREAM_CAPTURE_MERGE, "operation would result in a merge of separate captures"),
    KVTIER_ERROR(STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    KVTIER_ERROR(STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    KVTIER_ERROR(STREAM_CAPTURE_ISOLATION,
                 "dependency created on uncaptured work in another stream"),
    KVTIER_ERROR(STREAM_CAPTURE_IMPLICIT,
                 "operation would make the legacy stream depend on a capturing blocking stream"),
    KVTIER_ERROR(CAPTURED_EVENT,
                 "operation not permitted on an event last recorded in a capturing stream"),
    KVTIER_ERROR(STREAM_CAPTURE_WRONG_THREAD,
                 "attempt to terminate a thread-local capture sequence from another thread"),
    KVTIER_ERROR(UNKNOWN, "unknown error"),
#undef KVTIER_ERROR
};
CUresult cuGetErrorName(CUresult error, const char** text) {
    *text = nullptr;
    for (const Named& one : kErrors) {
        if (one.error == error) *text = one.name;
    }
    return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = nullptr;
    for (const Named& one : kErrors) {
        if (one.error == error) *text = one.text;
    }
    return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
    KVTIER_CALL;
    *count = device_count;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int number) {
    KVTIER_CALL;
    if (number < 0 || number >= device_count) return CUDA_ERROR_INVALID_DEVICE;
    *device = number;
    return CUDA_SUCCESS;
}
// For functions that take a device.
#define KVTIER_DEVICE_CALL(DEVICE) \
    KVTIER_CALL;                   \
    if (DEVICE < 0 || DEVICE >= device_count) return CUDA_ERROR_INVALID_DEVICE
CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    std::strncpy(name, "no device", static_cast<size_t>(size));
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    for (int i = 0; i < 16; i++) uuid->bytes[i] = static_cast<char>(16 * (device + 1) + i);
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    *bytes = devices[device].total;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice) {
    KVTIER_DEVICE_CALL(device);
    *can = 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            *value = 9;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
            *value = 0;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
            *value = devices[device].taken != 0 ? CU_COMPUTEMODE_EXCLUSIVE_PROCESS
                                                : CU_COMPUTEMODE_DEFAULT;
            break;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
            *value = device + 1;
            break;
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
            *value = 0;
            break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
            *value = 1;
            break;
        default:
            *value = 0;
    }
    return CUDA_SUCCESS;
}

// --- contexts ----------------------------------------------------------------------------------

static CUresult enter(Context* context, int device) {
    if (devices[device].taken != 0) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (const int error = devices[device].error) return static_cast<CUresult>(error);
    context->users++;
    live[kContexts]++;
    return CUDA_SUCCESS;
}
static CUresult leave(Context* context) {
    if (context->users == 0) return CUDA_ERROR_INVALID_CONTEXT;
    live[kContexts]--;
    if (--context->users == 0) {
        context->generation++;
        forget_streams(context);
    }
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    KVTIER_TRY(enter(&devices[device].primary, device));
    *found = reinterpret_cast<CUcontext>(&devices[device].primary);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    return leave(&devices[device].primary);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    KVTIER_DEVICE_CALL(device);
    *flags = 0;
    *active = devices[device].primary.users != 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxCreate_v2(CUcontext* made, unsigned, CUdevice device) {
    KVTIER_DEVICE_CALL(device);
    auto context = std::make_unique<Context>();
    context->device = device;
    KVTIER_TRY(enter(context.get(), device));
    contexts.push_back(context.get());
    *made = reinterpret_cast<CUcontext>(context.release());
    return CUDA_SUCCESS;
}
#undef cuCtxCreate
CUresult cuCtxCreate_v4(CUcontext* made, CUctxCreateParams*, unsigned flags, CUdevice device) {
    return cuCtxCreate_v2(made, flags, device);
}
CUresult cuCtxDestroy(CUcontext handle) {
    KVTIER_CALL;
    auto* const context = reinterpret_cast<Context*>(handle);
    if (context == nullptr || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    if (current_context() == context) contexts.pop_back();
    return leave(context);
}
CUresult cuCtxGetCurrent(CUcontext* found) {
    KVTIER_CALL;
    *found = reinterpret_cast<CUcontext>(current_context());
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    KVTIER_CALL;
    if (!contexts.empty()) contexts.pop_back();
    if (context != nullptr) contexts.push_back(reinterpret_cast<Context*>(context));
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
    KVTIER_CALL;
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    contexts.push_back(reinterpret_cast<Context*>(context));
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* found) {
    KVTIER_CALL;
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (found != nullptr) *found = reinterpret_cast<CUcontext>(contexts.back());
    contexts.pop_back();
    return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
    KVTIER_CALL;
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = contexts.back()->device;
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
    KVTIER_CONTEXT_CALL;
    KVTIER_TRY(refuse_unsafe());
    finish_all(context);
    return usable(context);
}

// --- copies ------------------------------------------------------------------------------------

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    KVTIER_CONTEXT_CALL;
    return copy(to, from, size, stream, context);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
    KVTIER_CONTEXT_CALL;
    if (!in_device_region(to) && !reachable(to, size)) return CUDA_ERROR_INVALID_VALUE;
    return copy(to, reinterpret_cast<uintptr_t>(from), size, stream, context);
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream stream) {
    KVTIER_CONTEXT_CALL;
    if (!in_device_region(from) && !reachable(from, size)) return CUDA_ERROR_INVALID_VALUE;
    return copy(reinterpret_cast<uintptr_t>(to), from, size, stream, context);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    KVTIER_CONTEXT_CALL;
    if (!reachable(to, size) || !reachable(from, size)) return CUDA_ERROR_INVALID_VALUE;
    return copy(to, from, size, stream, context);
}
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    KVTIER_CONTEXT_CALL;
    return copy_now(to, from, size, context);
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
    KVTIER_CONTEXT_CALL;
    return copy_now(to, reinterpret_cast<uintptr_t>(from), size, context);
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
    KVTIER_CONTEXT_CALL;
    return copy_now(reinterpret_cast<uintptr_t>(to), from, size, context);
}
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
    KVTIER_CONTEXT_CALL;
    return copy_now(to, from, size, context);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream handle) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!reachable(to, size, -1, true)) return CUDA_ERROR_INVALID_VALUE;
    const int device = stream->context->device;
    return enqueue(stream, [=] {
        before_copy(device);
        if (devices[device].error != 0) return;
        if (!reachable(to, size, -1, true)) return fault(device);
        std::memset(reinterpret_cast<void*>(to), value, size);
    });
}
#undef cuMemcpyBatchAsync
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* first, size_t kinds,
                               CUstream stream) {
    KVTIER_CONTEXT_CALL;
    return batch(to, from, sizes, count, attributes, first, kinds, stream, context);
}
// As of CUDA 12.8: it also returns the index of a wrong copy.
CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* first, size_t kinds,
                            size_t* wrong, CUstream stream) {
    KVTIER_CONTEXT_CALL;
    const CUresult result =
        batch(to, from, sizes, count, attributes, first, kinds, stream, context);
    if (result != CUDA_SUCCESS && wrong != nullptr) *wrong = SIZE_MAX;
    return result;
}

// --- kernels -----------------------------------------------------------------------------------

CUresult cuModuleLoadData(CUmodule* made, const void* image) {
    KVTIER_CONTEXT_CALL;
    KVTIER_TRY(refuse_unsafe());
    if (std::memcmp(image, "\177ELF", 4) != 0 &&
        std::strcmp(static_cast<const char*>(image), "host") != 0) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    const std::lock_guard lock(modules_mutex);
    auto module = std::make_unique<Module>();
    module->context = context;
    module->generation = context->generation;
    *made = reinterpret_cast<CUmodule>(module.get());
    modules[module.get()] = std::move(module);
    live[kModules]++;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule handle) {
    KVTIER_CALL;
    const std::lock_guard lock(modules_mutex);
    const auto found = modules.find(handle);
    if (found == modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (found->second->generation != found->second->context->generation) {
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    modules.erase(found);
    live[kModules]--;
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* made, CUmodule handle, const char* name) {
    KVTIER_CONTEXT_CALL;
    const std::lock_guard lock(modules_mutex);
    const auto module = modules.find(handle);
    if (module == modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    const void* kernel = nullptr;
    if (std::strcmp(name, "kvtier_copy_blocks") == 0) {
        kernel = reinterpret_cast<const void*>(&kvtier_copy_blocks);
    }
    if (std::strcmp(name, "kvtier_digest") == 0) {
        kernel = reinterpret_cast<const void*>(&kvtier::cuda::digest::kvtier_digest);
    }
    for (const CodecKernel& one : kCodecKernels) {
        if (std::strcmp(name, one.name) == 0) kernel = &one;
    }
    if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
    module->second->functions.push_back(std::make_unique<const void*>(kernel));
    *made = reinterpret_cast<CUfunction>(module->second->functions.back().get());
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction of_function, unsigned grid, unsigned y, unsigned z,
                        unsigned threads, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream handle, void** arguments, void** extra) {
    KVTIER_CONTEXT_CALL;
    const StreamPtr stream = stream_of(handle, context);
    const void* const function = kernel_of(of_function, context);
    if (stream == nullptr || function == nullptr || stream->context != context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const int device = context->device;
    for (const CodecKernel& kernel : kCodecKernels) {
        if (function != &kernel) continue;
        const bool good = grid != 0 && threads == 32 * kvtier::cuda::kWarps && shared_bytes == 0 &&
                          y * z * block_y * block_z == 1 && extra == nullptr;
        return good ? launch_codec(kernel, grid, threads, stream, arguments)
                    : CUDA_ERROR_INVALID_VALUE;
    }
    if (function == reinterpret_cast<const void*>(&kvtier::cuda::digest::kvtier_digest)) {
        const bool good = grid != 0 && threads == 32 * kvtier::cuda::kWarps && shared_bytes == 0 &&
                          y * z * block_y * block_z == 1 && extra == nullptr;
        return good ? launch_digest(grid, threads, stream, arguments) : CUDA_ERROR_INVALID_VALUE;
    }
    if (function != reinterpret_cast<const void*>(&kvtier_copy_blocks) || grid == 0 ||
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
    return enqueue(stream, [=] {
        before_copy(device);
        if (device_at(device).error != 0) return;
        const auto table = [device](const void* at, size_t size) {
            return reachable(reinterpret_cast<uintptr_t>(at), size, device);
        };
        bool good = table(pieces, piece_count * sizeof(Piece)) &&
                    table(slots, block_count * sizeof(u64)) &&
                    table(ids, block_count * sizeof(u32));
        for (u32 i = 0; good && i < block_count; i++) {
            for (u32 j = 0; good && j < piece_count; j++) {
                good = reachable(pieces[j].base + ids[i] * pieces[j].stride, pieces[j].bytes,
                                 device, inwards == 0) &&
                       reachable(slots[i] + pieces[j].start, pieces[j].bytes, device, inwards != 0);
            }
        }
        if (!good) {
            fault(device);
            return;
        }
        run_on_host(grid, threads, kvtier_copy_blocks, pieces, piece_count, slots, ids, block_count,
                    inwards);
    });
}
}
