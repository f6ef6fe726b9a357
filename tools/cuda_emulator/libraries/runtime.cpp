// libcudart for CUDA 13: device memory is host memory, kernels do nothing, copies copy.
// What libcudart exports and this file leaves out is a stub that returns 0 (stubs.py).
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "emulator.h"

EXPORT std::atomic<unsigned long long> emu_counts[32] = {};

namespace {

constexpr size_t MIB = 1 << 20;
constexpr size_t PAGE = 4096;
constexpr size_t CONTEXT = 500 * MIB;  // what a CUDA context takes of a card
constexpr int MAX_DEVICES = 16;

struct Block {
  size_t bytes;
  int device;
  int kind;
};

std::mutex mutex;
size_t used[MAX_DEVICES];
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// Never destroyed: torch frees memory while the process exits.
std::map<uintptr_t, Block>& blocks() {
  static auto* all = new std::map<uintptr_t, Block>;
  return *all;
}

size_t copy_limit() {
  static size_t limit = emu_setting("EMU_COPY_LIMIT", 64 * MIB);
  return limit;
}

size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t sticky() { return static_cast<cudaError_t>(emu_sticky_error()); }

// The device that an entry of CUDA_VISIBLE_DEVICES names; -1 if there is none. A UUID may be shortened, as CUDA allows.
int find_device(const std::string& entry, int count) {
  if (entry.rfind("MIG-", 0) == 0) return 0;
  if (entry.rfind("GPU-", 0) == 0) {
    for (int device = 0; device < count; device++) {
      char uuid[64];
      snprintf(uuid, sizeof uuid, "GPU-%08x-0000-0000-0000-000000000000", device + 1);
      if (std::string(uuid).rfind(entry, 0) == 0) return device;
    }
    return -1;
  }
  char* end;
  long device = strtol(entry.c_str(), &end, 10);
  if (end == entry.c_str() || device < 0 || device >= count) return -1;
  return static_cast<int>(device);
}

// CUDA reads the variable once, stops at the first entry that is no device, and sees none where one is named twice.
std::vector<int> read_visible_devices() {
  int count = static_cast<int>(emu_setting("EMU_GPUS", 1));
  std::vector<int> visible;
  const char* value = getenv("CUDA_VISIBLE_DEVICES");
  if (!value) {
    for (int device = 0; device < count; device++) visible.push_back(device);
    return visible;
  }
  std::string rest = value;
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    int device = find_device(rest.substr(0, comma), count);
    if (device < 0) break;
    for (int earlier : visible)
      if (earlier == device) return {};
    visible.push_back(device);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return visible;
}

const std::vector<int>& visible_devices() {
  static auto* visible = new std::vector<int>(read_visible_devices());
  return *visible;
}

// Untouched pages cost the host nothing.
void* reserve(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

// The caller holds the mutex.
const Block* find_block(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = blocks().upper_bound(address);
  if (next == blocks().begin()) return nullptr;
  auto block = std::prev(next);
  if (address >= block->first + block->second.bytes) return nullptr;
  return &block->second;
}

bool is_kind(const void* pointer, MemoryKind kind) {
  std::lock_guard<std::mutex> guard(mutex);
  const Block* block = find_block(pointer);
  return block && block->kind == kind;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  Block block;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto place = blocks().find(reinterpret_cast<uintptr_t>(pointer));
    if (place == blocks().end()) return answer(cudaErrorInvalidValue);
    block = place->second;
    if (block.kind == DEVICE) used[block.device] -= block.bytes;
    blocks().erase(place);
  }
  munmap(pointer, block.bytes);
  return cudaSuccess;
}

template <class Handle>
Handle new_handle() {
  static std::atomic<uintptr_t> next{0x1000};
  return reinterpret_cast<Handle>(next += 16);
}

double milliseconds() {
  auto since_boot = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since_boot).count();
}

}  // namespace

// ---- for the other libraries

EXPORT long emu_setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

EXPORT const char* emu_device_name() {
  const char* name = getenv("EMU_NAME");
  return name ? name : "NVIDIA H200";
}

EXPORT int emu_device_count() { return static_cast<int>(visible_devices().size()); }
EXPORT int emu_physical_device(int device) { return visible_devices()[device]; }
EXPORT int emu_current_device() { return current_device; }
EXPORT void emu_set_current_device(int device) { current_device = device; }

EXPORT int emu_capability() {
  static int capability = static_cast<int>(emu_setting("EMU_CC", 90));
  return capability;
}

// The capability that torch's kernels were compiled for: the highest that the card can run. 0: it can run none.
static int code_capability() {
  static const int compiled[] = {120, 100, 90, 86, 80, 75};
  for (int capability : compiled)
    if (capability <= emu_capability()) return capability;
  return 0;
}

EXPORT size_t emu_total_memory() {
  static size_t total = static_cast<size_t>(emu_setting("EMU_MEMORY_MB", 81920)) * MIB;
  return total;
}

EXPORT size_t emu_free_memory(int device) {
  size_t taken = used[device] + CONTEXT;
  return taken > emu_total_memory() ? 0 : emu_total_memory() - taken;
}

EXPORT int emu_take_memory(int device, long bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  if (bytes > 0 && static_cast<size_t>(bytes) > emu_free_memory(device)) return 1;
  used[device] += bytes;
  return 0;
}

EXPORT void emu_remember(void* address, size_t bytes, int device, int kind) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks()[reinterpret_cast<uintptr_t>(address)] = {bytes, device, kind};
}

EXPORT void emu_forget(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks().erase(reinterpret_cast<uintptr_t>(address));
}

EXPORT void emu_copy(void* target, const void* source, size_t bytes) {
  bool to_device = is_kind(target, DEVICE);
  bool from_device = is_kind(source, DEVICE);
  if (to_device && from_device) {
    emu_counts[COPY_ON_DEVICE]++;
  } else if (to_device) {
    emu_counts[is_kind(source, PINNED) ? COPY_FROM_PINNED : COPY_FROM_PAGED]++;
    emu_counts[BYTES_TO_DEVICE] += bytes;
  } else if (from_device) {
    emu_counts[COPY_TO_HOST]++;
    emu_counts[BYTES_TO_HOST] += bytes;
  }
  if (bytes <= copy_limit()) memmove(target, source, bytes);
}

// EMU_FAIL_AT: from that launch on every call fails, as after an uncorrectable memory error of a card.
EXPORT int emu_sticky_error() {
  static long first = emu_setting("EMU_FAIL_AT", 0);
  static int code = static_cast<int>(emu_setting("EMU_FAIL_CODE", cudaErrorECCUncorrectable));
  static const char* only_rank = getenv("EMU_FAIL_RANK");
  if (!first || static_cast<long>(emu_counts[LAUNCH].load()) < first) return 0;
  const char* rank = getenv("RANK");
  if (only_rank && rank && strcmp(only_rank, rank)) return 0;
  last_error = static_cast<cudaError_t>(code);
  return code;
}

EXPORT int emu_launched(const void*) {
  emu_counts[LAUNCH]++;
  if (!code_capability()) return answer(cudaErrorNoKernelImageForDevice);
  return emu_sticky_error();
}

EXPORT int emu_attribute(int attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
    case cudaDevAttrMaxPitch:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrTotalConstantMemory:
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrL2CacheSize:
      return 50 * MIB;
    case cudaDevAttrTextureAlignment:
      return 512;
    case cudaDevAttrAsyncEngineCount:
      return 3;
    case cudaDevAttrPciBusId:
      return 3 + emu_physical_device(device);
    case cudaDevAttrComputeCapabilityMajor:
      return emu_capability() / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return emu_capability() % 10;
    case cudaDevAttrGpuOverlap:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch:
    case 102:  // virtual memory management, which expandable segments need
    case cudaDevAttrMemoryPoolsSupported:
    case 120:  // clusters of thread blocks
      return 1;
    default:
      return 0;
  }
}

// ---- devices

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = emu_device_count();
  return *count ? cudaSuccess : answer(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emu_device_count()) return answer(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= emu_device_count()) return answer(cudaErrorInvalidDevice);
  auto attribute = [device](cudaDeviceAttr name) { return emu_attribute(name, device); };
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", emu_device_name());
  properties->uuid.bytes[3] = static_cast<char>(emu_physical_device(device) + 1);  // as NVML names it
  properties->totalGlobalMem = emu_total_memory();
  properties->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  properties->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->warpSize = attribute(cudaDevAttrWarpSize);
  properties->memPitch = attribute(cudaDevAttrMaxPitch);
  properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->maxThreadsDim[0] = attribute(cudaDevAttrMaxBlockDimX);
  properties->maxThreadsDim[1] = attribute(cudaDevAttrMaxBlockDimY);
  properties->maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ);
  properties->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  properties->maxGridSize[1] = attribute(cudaDevAttrMaxGridDimY);
  properties->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimZ);
  properties->totalConstMem = attribute(cudaDevAttrTotalConstantMemory);
  properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  properties->textureAlignment = attribute(cudaDevAttrTextureAlignment);
  properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  properties->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  properties->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  properties->pciBusID = attribute(cudaDevAttrPciBusId);
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->managedMemory = 1;
  properties->cooperativeLaunch = 1;
  properties->streamPrioritiesSupported = 1;
  properties->canMapHostMemory = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = emu_attribute(attribute, device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  emu_counts[DEVICE_SYNC]++;
  return sticky();
}

EXPORT cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1024;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* value, int device, int peer) {
  *value = device != peer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", 3 + emu_physical_device(device));
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = new_handle<cudaMemPool_t>();
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

// ---- memory

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  emu_counts[ALLOCATE]++;
  *pointer = nullptr;
  if (cudaError_t error = sticky()) return error;
  if (!bytes) return cudaSuccess;
  bytes = whole_pages(bytes);
  if (emu_take_memory(current_device, static_cast<long>(bytes))) return answer(cudaErrorMemoryAllocation);
  *pointer = reserve(bytes);
  if (!*pointer) return answer(cudaErrorMemoryAllocation);
  emu_remember(*pointer, bytes, current_device, DEVICE);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
EXPORT cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }

EXPORT cudaError_t cudaFree(void* pointer) {
  emu_counts[FREE]++;
  return release(pointer);
}

EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  emu_counts[ALLOCATE_PINNED]++;
  bytes = whole_pages(bytes ? bytes : 1);
  *pointer = reserve(bytes);
  if (!*pointer) return answer(cudaErrorMemoryAllocation);
  emu_remember(*pointer, bytes, 0, PINNED);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  emu_remember(pointer, bytes, 0, PINNED);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  emu_forget(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void** on_device, void* pointer, unsigned) {
  *on_device = pointer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetFlags(unsigned* flags, void*) {
  *flags = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = emu_free_memory(current_device);
  *total = emu_total_memory();
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  memset(attributes, 0, sizeof *attributes);
  const Block* block = find_block(pointer);
  if (!block) {
    attributes->device = cudaInvalidDeviceId;
    attributes->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
  }
  attributes->device = block->device;
  attributes->type = block->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->devicePointer = const_cast<void*>(pointer);
  if (block->kind == PINNED) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  emu_copy(target, source, bytes);
  emu_counts[STREAM_SYNC]++;
  return sticky();
}

EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  emu_copy(target, source, bytes);
  return sticky();
}

EXPORT cudaError_t cudaMemcpyPeer(void* target, int, const void* source, int, size_t bytes) {
  emu_copy(target, source, bytes);
  return sticky();
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t) {
  emu_copy(target, source, bytes);
  return sticky();
}

EXPORT cudaError_t cudaMemcpy2D(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                size_t width, size_t height, cudaMemcpyKind) {
  for (size_t row = 0; row < height; row++) {
    auto* to = static_cast<char*>(target) + row * target_pitch;
    auto* from = static_cast<const char*>(source) + row * source_pitch;
    memmove(to, from, width);
  }
  return sticky();
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                     size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy2D(target, target_pitch, source, source_pitch, width, height, kind);
}

EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  static std::map<const void*, void*> addresses;
  std::lock_guard<std::mutex> guard(mutex);
  void*& address = addresses[symbol];
  if (!address) {
    address = reserve(65536);
    blocks()[reinterpret_cast<uintptr_t>(address)] = {65536, 0, DEVICE};
  }
  *pointer = address;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolSize(size_t* bytes, const void*) {
  *bytes = 65536;
  return cudaSuccess;
}

// A large block that is set to zero is given back to the host, which hands out zeros.
EXPORT cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  emu_counts[MEMSET]++;
  if (bytes <= copy_limit() / 8) {
    memset(pointer, value, bytes);
  } else if (!value) {
    uintptr_t begin = whole_pages(reinterpret_cast<uintptr_t>(pointer));
    uintptr_t end = (reinterpret_cast<uintptr_t>(pointer) + bytes) & ~(PAGE - 1);
    memset(pointer, 0, begin - reinterpret_cast<uintptr_t>(pointer));
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    memset(reinterpret_cast<void*>(end), 0, reinterpret_cast<uintptr_t>(pointer) + bytes - end);
  }
  return sticky();
}

EXPORT cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}

// ---- streams and events

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new_handle<cudaStream_t>();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
  emu_counts[STREAM_SYNC]++;
  return sticky();
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  emu_counts[STREAM_WAIT]++;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t, int* device) { return cudaGetDevice(device); }

EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* flags) {
  *flags = cudaStreamNonBlocking;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// An event is the time of its last record.
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new double(milliseconds()));
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  emu_counts[EVENT_RECORD]++;
  *reinterpret_cast<double*>(event) = milliseconds();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t) {
  emu_counts[EVENT_QUERY]++;
  return sticky();
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
  emu_counts[EVENT_SYNC]++;
  return sticky();
}

EXPORT cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t start, cudaEvent_t end) {
  double difference = *reinterpret_cast<double*>(end) - *reinterpret_cast<double*>(start);
  *elapsed = difference > 0 ? static_cast<float>(difference) : 0.001f;
  return cudaSuccess;
}

// ---- errors

EXPORT cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorECCUncorrectable:
      return "uncorrectable ECC error encountered";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorAssert:
      return "device-side assert triggered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    default:
      return "emulated CUDA error";
  }
}

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  if (error == cudaSuccess) return "cudaSuccess";
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorEmulated";
}

// ---- kernels

EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return static_cast<cudaError_t>(emu_launched(kernel));
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return static_cast<cudaError_t>(emu_launched(kernel));
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return static_cast<cudaError_t>(emu_launched(kernel));
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return static_cast<cudaError_t>(emu_launched(kernel));
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->binaryVersion = attributes->ptxVersion = code_capability();
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetName(const char** name, const void*) {
  *name = "emulated kernel";
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 2;
  return cudaSuccess;
}

// The driver's functions by name. torch asks for those of virtual memory this way.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** pointer, unsigned version,
                                                    unsigned long long, cudaDriverEntryPointQueryResult* result) {
  using GetProcAddress = int (*)(const char*, void**, int, unsigned long long, int*);
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  static auto get = driver ? reinterpret_cast<GetProcAddress>(dlsym(driver, "cuGetProcAddress_v2")) : nullptr;
  *pointer = nullptr;
  if (get) get(symbol, pointer, static_cast<int>(version), 0, nullptr);
  if (result) *result = *pointer ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** pointer, unsigned long long flags,
                                           cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(symbol, pointer, 13000, flags, result);
}

// ---- what nvcc puts around a kernel<<<...>>> call

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_memory;
  cudaStream_t stream;
};

static thread_local std::vector<LaunchConfiguration> configurations;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_memory, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_memory, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_memory, void* stream) {
  LaunchConfiguration configuration = configurations.back();
  configurations.pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_memory = configuration.shared_memory;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* binary[2];
  return binary;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}

EXPORT char __cudaInitModule(void**) { return 1; }
