// Memory of the driver without a device: allocations, reservations and mappings, registered memory
// of the host, and what a pointer is.
//
// Device memory lies in one region of addresses. Freed and unmapped addresses in it stay unusable,
// so code that uses them crashes. Physical allocations are memfds: exported, they outlive their
// process.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "driver.h"

namespace fake {

namespace {

constexpr size_t kRegionBytes = size_t{1} << 40, kPage = 4096, kGranularity = size_t{2} << 20;
constexpr char kName[] = "cuda-device-";  // of a memfd, followed by the number of its device

// Physical memory of a device.
struct Allocation {
    int fd = -1, device = 0;
    size_t size = 0;
    bool shareable = false, counted = false;

    ~Allocation() {
        close(fd);
        if (counted) device_at(device).used -= size;
        live[kAllocations]--;
    }
};
using AllocationPtr = std::shared_ptr<Allocation>;

struct Range {
    size_t size = 0;
    Kind kind = kDeviceMemory;
    int device = 0;
    unsigned long long number = 0;           // unique in the process
    CUmemAccess_flags access[kMostDevices];  // of each device
    AllocationPtr mapped;                    // of kMapped
    size_t offset = 0;
    bool given = false;  // memory of a test
};

std::mutex mutex;
auto& ranges = *new std::map<uintptr_t, Range>;
auto& reservations = *new std::map<uintptr_t, size_t>;
auto& handles = *new std::map<CUmemGenericAllocationHandle, AllocationPtr>;
CUmemGenericAllocationHandle next_handle = 0x1000;
unsigned long long next_number = 1;
std::atomic<int> refuse_registration;
uintptr_t region = 0, region_next = 0;  // protected by the mutex
std::atomic<uintptr_t> region_start{0};

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Addresses that were never used before; 0 if there are none left.
uintptr_t new_addresses(size_t size, size_t alignment) {
    if (region == 0) {
        void* const found = mmap(nullptr, kRegionBytes, PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return 0;
        region = region_next = reinterpret_cast<uintptr_t>(found);
        region_start = region;
    }
    const uintptr_t start = rounded(region_next, alignment);
    const uintptr_t next = start + rounded(size, kPage) + kPage;  // a page that nothing may use
    if (size > kRegionBytes || next > region + kRegionBytes) return 0;
    region_next = next;
    return start;
}

void make_unusable(uintptr_t start, size_t size) {
    mmap(reinterpret_cast<void*>(start), rounded(size, kPage), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void add(uintptr_t start, Range range) {
    range.number = next_number++;
    live[range.kind]++;
    ranges[start] = std::move(range);
}

Range plain(size_t size, Kind kind, int device) {
    Range range{.size = size, .kind = kind, .device = device};
    for (int i = 0; i < kMostDevices; i++) {
        const bool can = kind == kPinned || kind == kRegistered || i == device;
        range.access[i] = can ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    return range;
}

// The range of an address, or the end.
auto at(uintptr_t address) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return ranges.end();
    --after;
    return address < after->first + after->second.size ? after : ranges.end();
}

bool overlaps(uintptr_t start, size_t size) {
    const auto after = ranges.lower_bound(start + size);
    return after != ranges.begin() &&
           std::prev(after)->first + std::prev(after)->second.size > start;
}

bool drop(uintptr_t start, Kind kind) {
    const auto found = ranges.find(start);
    if (found == ranges.end() || found->second.kind != kind) return false;
    live[kind]--;
    ranges.erase(found);
    return true;
}

bool take(int device, size_t size) {
    Device& taken = device_at(device);
    if (taken.used + size > taken.total) return false;
    taken.used += size;
    return true;
}

// What the host may do with memory, as /proc/self/maps says it: 'w' anywhere in it.
bool writable_by_host(uintptr_t start, size_t size) {
    FILE* const maps = std::fopen("/proc/self/maps", "re");
    if (maps == nullptr) return true;
    char line[512], rights[8];
    unsigned long from, to;
    bool found = true;
    while (std::fgets(line, sizeof line, maps) != nullptr) {
        if (std::sscanf(line, "%lx-%lx %7s", &from, &to, rights) != 3) continue;
        if (from < start + size && start < to && rights[1] != 'w') found = false;
    }
    std::fclose(maps);
    return found;
}

bool is_host(const Range& range) { return range.kind == kPinned || range.kind == kRegistered; }

// One attribute of an address; `range` is null for an address that no context knows.
CUresult attribute(void* data, CUpointer_attribute which, CUdeviceptr address,
                   const std::pair<const uintptr_t, Range>* found) {
    const auto set = [data](auto value) {
        std::memcpy(data, &value, sizeof value);
        return CUDA_SUCCESS;
    };
    const Range none{};
    const Range& range = found == nullptr ? none : found->second;
    const bool known = found != nullptr, host = known && is_host(range);
    const uintptr_t start = known ? found->first : 0;
    switch (which) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:  // mapped memory belongs to none
            return set(known && range.kind != kMapped ? &device_at(range.device).primary
                                                      : static_cast<Context*>(nullptr));
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            return set(!known ? 0u
                       : host ? static_cast<unsigned>(CU_MEMORYTYPE_HOST)
                              : static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            return set(known ? address : CUdeviceptr{0});
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            if (known && !host) return CUDA_ERROR_INVALID_VALUE;
            return set(host ? address : CUdeviceptr{0});
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
            return set(0u);
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            return set(range.number);
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            return set(0u);
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return set(known ? range.device : -2);
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            return set(known && range.kind == kDeviceMemory ? 1u : 0u);
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            return set(start);
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            return set(range.size);
        case CU_POINTER_ATTRIBUTE_MAPPED:
            return set(known ? 1u : 0u);
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
            return set(
                range.mapped != nullptr && range.mapped->shareable
                    ? static_cast<unsigned long long>(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                    : 0ull);
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
}

AllocationPtr of_handle(CUmemGenericAllocationHandle handle) {
    const auto found = handles.find(handle);
    return found == handles.end() ? nullptr : found->second;
}

CUmemGenericAllocationHandle add_handle(AllocationPtr allocation) {
    handles[next_handle] = std::move(allocation);
    return next_handle++;
}

CUresult check_properties(const CUmemAllocationProp* wanted) {
    if (wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        (wanted->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 ||
        wanted->win32HandleMetaData != nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (wanted->location.id < 0 || wanted->location.id >= count_devices()) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    return static_cast<CUresult>(device_at(wanted->location.id).error.load());
}

}  // namespace

bool in_device_region(uintptr_t address) {
    const uintptr_t start = region_start;
    return start != 0 && address >= start && address < start + kRegionBytes;
}

bool reachable(uintptr_t start, size_t size, int device, bool write) {
    const std::lock_guard lock(mutex);
    uintptr_t next = start;
    for (;;) {
        const auto found = at(next);
        if (found == ranges.end()) return false;
        const Range& range = found->second;
        bool can = false;
        for (int i = 0; i < kMostDevices; i++) {
            if (device != -1 && device != i) continue;
            can |= (range.access[i] & CU_MEM_ACCESS_FLAGS_PROT_READ) != 0 &&
                   (!write || range.access[i] == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        }
        if (!can) return false;
        next = found->first + range.size;
        if (start + size <= next) return true;
        if (range.kind != kMapped) return false;  // mappings side by side are one piece of memory
    }
}

}  // namespace fake

using namespace fake;

extern "C" {

// --- for tests ---------------------------------------------------------------------------------

void fake_device_memory(void* address, size_t size) {
    const std::lock_guard lock(mutex);
    Range range = plain(size, kDeviceMemory, 0);
    range.given = true;
    add(reinterpret_cast<uintptr_t>(address), range);
}
void fake_forget_memory(void* address) {
    const std::lock_guard lock(mutex);
    drop(reinterpret_cast<uintptr_t>(address), kDeviceMemory);
}
void fake_refuse_registration(int count) { refuse_registration = count; }

// --- memory of a device ------------------------------------------------------------------------

CUresult cuMemGetInfo(size_t* unused, size_t* total) {
    KVTIER_CONTEXT_CALL;
    const Device& device = device_at(context->device);
    *total = device.total;
    *unused = device.total - std::min<size_t>(device.total, device.used);
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
    KVTIER_CONTEXT_CALL;
    KVTIER_TRY(refuse_unsafe());
    if (size == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(mutex);
    if (!take(context->device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    const uintptr_t start = new_addresses(size, kPage);
    if (start == 0 || mprotect(reinterpret_cast<void*>(start), rounded(size, kPage),
                               PROT_READ | PROT_WRITE) != 0) {
        device_at(context->device).used -= size;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    std::memset(reinterpret_cast<void*>(start), 0xA5, size);
    add(start, plain(size, kDeviceMemory, context->device));
    *address = start;
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
    KVTIER_CALL;
    Context* const context = current_context();
    if (const CUresult result = usable(context);
        result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
        return result;
    }
    KVTIER_TRY(refuse_unsafe());
    finish_all(context);  // the call waits for the device
    const std::lock_guard lock(mutex);
    const auto found = ranges.find(address);
    if (found == ranges.end() || found->second.given) return CUDA_ERROR_INVALID_VALUE;
    const size_t size = found->second.size;
    const int device = found->second.device;
    if (!drop(address, kDeviceMemory)) return CUDA_ERROR_INVALID_VALUE;
    make_unusable(address, size);
    device_at(device).used -= size;
    return usable(context);
}

// --- memory of the host ------------------------------------------------------------------------

CUresult cuMemHostAlloc(void** address, size_t size, unsigned flags) {
    KVTIER_CONTEXT_CALL;
    KVTIER_TRY(refuse_unsafe());
    if (size == 0 || (flags & ~7u) != 0) return CUDA_ERROR_INVALID_VALUE;
    *address = std::aligned_alloc(kPage, rounded(size, kPage));
    if (*address == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::lock_guard lock(mutex);
    add(reinterpret_cast<uintptr_t>(*address), plain(size, kPinned, context->device));
    return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* address) {
    KVTIER_CALL;
    Context* const context = current_context();
    if (const CUresult result = usable(context);
        result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
        return result;
    }
    KVTIER_TRY(refuse_unsafe());
    finish_all(context);
    const std::lock_guard lock(mutex);
    if (!drop(reinterpret_cast<uintptr_t>(address), kPinned)) return CUDA_ERROR_INVALID_VALUE;
    std::free(address);
    return usable(context);
}
CUresult cuMemHostRegister(void* address, size_t size, unsigned flags) {
    KVTIER_CONTEXT_CALL;
    KVTIER_TRY(refuse_unsafe());
    const auto start = reinterpret_cast<uintptr_t>(address);
    if (size == 0 || (flags & ~15u) != 0 || in_device_region(start)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (refuse_registration > 0) {
        refuse_registration--;
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0 && !writable_by_host(start, size)) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    const std::lock_guard lock(mutex);
    if (overlaps(start, size)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    Range range = plain(size, kRegistered, context->device);
    if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0) {
        for (auto& access : range.access) access = CU_MEM_ACCESS_FLAGS_PROT_READ;
    }
    add(start, range);
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void* address) {
    KVTIER_CALL;
    Context* const context = current_context();
    if (const CUresult result = usable(context);
        result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
        return result;
    }
    KVTIER_TRY(refuse_unsafe());
    const std::lock_guard lock(mutex);
    if (!drop(reinterpret_cast<uintptr_t>(address), kRegistered)) {
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    return usable(context);
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr* found, void* address, unsigned) {
    KVTIER_CONTEXT_CALL;
    const std::lock_guard lock(mutex);
    const auto range = at(reinterpret_cast<uintptr_t>(address));
    if (range == ranges.end() || !is_host(range->second)) return CUDA_ERROR_INVALID_VALUE;
    *found = reinterpret_cast<CUdeviceptr>(address);
    return CUDA_SUCCESS;
}

// --- what a pointer is -------------------------------------------------------------------------

CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* size, CUdeviceptr address) {
    KVTIER_CONTEXT_CALL;
    const std::lock_guard lock(mutex);
    const auto found = at(address);
    if (found == ranges.end()) return CUDA_ERROR_NOT_FOUND;
    if (start != nullptr) *start = found->first;
    if (size != nullptr) *size = found->second.size;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute which, CUdeviceptr address) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    const auto found = at(address);
    if (found == ranges.end()) return CUDA_ERROR_INVALID_VALUE;
    return attribute(data, which, address, &*found);
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* which, void** data,
                                CUdeviceptr address) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    const auto found = at(address);
    for (unsigned i = 0; i < count; i++) {
        const CUresult result =
            attribute(data[i], which[i], address, found == ranges.end() ? nullptr : &*found);
        // A host pointer of device memory is null here, and an error above.
        if (result != CUDA_SUCCESS && which[i] != CU_POINTER_ATTRIBUTE_HOST_POINTER) return result;
        if (result != CUDA_SUCCESS) std::memset(data[i], 0, sizeof(void*));
    }
    return CUDA_SUCCESS;
}

// --- physical allocations, reserved addresses, mappings ----------------------------------------

CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp* wanted,
                                       CUmemAllocationGranularity_flags) {
    KVTIER_CALL;
    KVTIER_TRY(check_properties(wanted));
    *size = kGranularity;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* wanted, unsigned long long flags) {
    KVTIER_CALL;
    KVTIER_TRY(check_properties(wanted));
    KVTIER_TRY(refuse_unsafe());
    if (size == 0 || size % kGranularity != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(mutex);
    const int device = wanted->location.id;
    if (!take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    const auto made = std::make_shared<Allocation>();
    live[kAllocations]++;
    made->device = device;
    made->size = size;
    made->counted = true;
    made->shareable = wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    made->fd =
        memfd_create((kName + std::to_string(device)).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made->fd < 0 || ftruncate(made->fd, static_cast<off_t>(size)) != 0 ||
        fcntl(made->fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = add_handle(made);
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    return handles.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    const auto found = at(reinterpret_cast<uintptr_t>(address));
    if (found == ranges.end() || found->second.kind != kMapped) return CUDA_ERROR_INVALID_VALUE;
    *handle = add_handle(found->second.mapped);
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* found,
                                                CUmemGenericAllocationHandle handle) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    const AllocationPtr allocation = of_handle(handle);
    if (allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *found = {};
    found->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    found->location = {CU_MEM_LOCATION_TYPE_DEVICE, allocation->device};
    found->requestedHandleTypes =
        allocation->shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
    return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void* found, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    const AllocationPtr allocation = of_handle(handle);
    if (allocation == nullptr || !allocation->shareable || flags != 0 ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    KVTIER_TRY(static_cast<CUresult>(device_at(allocation->device).error.load()));
    const int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    std::memcpy(found, &fd, sizeof fd);
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                        CUmemAllocationHandleType type) {
    KVTIER_CALL;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    const int given = static_cast<int>(reinterpret_cast<intptr_t>(shared));
    char link[64], name[128] = {};
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", given);
    int device = -1;
    struct stat status;
    if (readlink(link, name, sizeof name - 1) < 0 || fstat(given, &status) != 0 ||
        std::sscanf(name, "/memfd:cuda-device-%d", &device) != 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (device < 0 || device >= count_devices()) return CUDA_ERROR_INVALID_DEVICE;
    KVTIER_TRY(static_cast<CUresult>(device_at(device).error.load()));
    const auto made = std::make_shared<Allocation>();
    live[kAllocations]++;
    made->device = device;
    made->size = static_cast<size_t>(status.st_size);
    made->shareable = true;
    made->fd = fcntl(given, F_DUPFD_CLOEXEC, 3);
    if (made->fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    const std::lock_guard lock(mutex);
    *handle = add_handle(made);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
    KVTIER_CALL;
    if (size == 0 || size % kGranularity != 0 || (alignment & (alignment - 1)) != 0 || flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const std::lock_guard lock(mutex);
    const uintptr_t start = new_addresses(size, std::max(alignment, kGranularity));
    if (start == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    reservations[start] = size;
    live[kReservations]++;
    *address = start;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    const auto found = reservations.find(address);
    if (found == reservations.end() || found->second != size || overlaps(address, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    reservations.erase(found);
    live[kReservations]--;
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    KVTIER_CALL;
    KVTIER_TRY(refuse_unsafe());
    const std::lock_guard lock(mutex);
    const AllocationPtr allocation = of_handle(handle);
    const auto after = reservations.upper_bound(address);
    if (allocation == nullptr || after == reservations.begin() || size == 0 || offset != 0 ||
        flags != 0 || address % kGranularity != 0 || size % kGranularity != 0 ||
        size > allocation->size) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto& [start, reserved] = *std::prev(after);
    if (address + size > start + reserved || overlaps(address, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    void* const mapped = mmap(reinterpret_cast<void*>(address), size, PROT_NONE,
                              MAP_SHARED | MAP_FIXED, allocation->fd, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    Range range{.size = size, .kind = kMapped, .device = allocation->device};
    for (auto& access : range.access) access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    range.mapped = allocation;
    add(address, range);
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    KVTIER_CALL;
    KVTIER_TRY(refuse_unsafe());
    const std::lock_guard lock(mutex);
    std::vector<uintptr_t> parts;
    uintptr_t next = address;
    while (next < address + size) {
        const auto found = ranges.find(next);
        if (found == ranges.end() || found->second.kind != kMapped) return CUDA_ERROR_INVALID_VALUE;
        parts.push_back(next);
        next += found->second.size;
    }
    if (size == 0 || next != address + size) return CUDA_ERROR_INVALID_VALUE;
    make_unusable(address, size);
    for (const uintptr_t part : parts) drop(part, kMapped);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* wanted,
                        size_t count) {
    KVTIER_CALL;
    KVTIER_TRY(refuse_unsafe());
    const std::lock_guard lock(mutex);
    std::vector<std::pair<const uintptr_t, Range>*> parts;
    uintptr_t next = address;
    while (next < address + size) {
        const auto found = ranges.find(next);
        if (found == ranges.end() || found->second.kind != kMapped) return CUDA_ERROR_INVALID_VALUE;
        parts.push_back(&*found);
        next += found->second.size;
    }
    if (size == 0 || next != address + size) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (wanted[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        const int device = wanted[i].location.id;
        if (device < 0 || device >= count_devices()) return CUDA_ERROR_INVALID_DEVICE;
        KVTIER_TRY(static_cast<CUresult>(device_at(device).error.load()));
        for (auto* part : parts) {
            // No device of this driver can access the memory of another.
            if (part->second.device != device) return CUDA_ERROR_INVALID_DEVICE;
        }
    }
    for (auto* part : parts) {
        for (size_t i = 0; i < count; i++) {
            part->second.access[wanted[i].location.id] = wanted[i].flags;
        }
        int rights = PROT_NONE;
        for (const auto access : part->second.access) {
            if (access & CU_MEM_ACCESS_FLAGS_PROT_READ) rights |= PROT_READ;
            if (access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) rights |= PROT_WRITE;
        }
        mprotect(reinterpret_cast<void*>(part->first), part->second.size, rights);
    }
    return CUDA_SUCCESS;
}
CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr address) {
    KVTIER_CALL;
    const std::lock_guard lock(mutex);
    const auto found = at(address);
    if (found == ranges.end() || found->second.kind != kMapped ||
        location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (location->id < 0 || location->id >= count_devices()) return CUDA_ERROR_INVALID_DEVICE;
    *flags = found->second.access[location->id];
    return CUDA_SUCCESS;
}
}
