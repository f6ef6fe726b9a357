// libcuda over the emulated runtime: virtual memory (expandable segments), modules and launches that do nothing.
// It declares its functions itself: cuda.h renames many of them by macros.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "emulator.h"

namespace {

constexpr int SUCCESS = 0;
constexpr int OUT_OF_MEMORY = 2;
constexpr int NO_DEVICE = 100;
constexpr int NOT_SUPPORTED = 801;
constexpr uintptr_t CONTEXT = 0x100;  // the context of device N is 0x100 + N

struct Location {
  int type;
  int id;
};

// CUmemAllocationProp, as far as it is read here.
struct AllocationProperties {
  int type;
  int requested_handle_types;
  Location location;
};

struct Allocation {
  size_t bytes;
  int device;
};

template <class Handle>
int new_handle(Handle* handle) {
  static std::atomic<uintptr_t> next{0x2000};
  *handle = reinterpret_cast<Handle>(next += 16);
  return SUCCESS;
}

int unsupported() { return NOT_SUPPORTED; }

}  // namespace

// ---- devices and contexts

EXPORT int cuInit(unsigned) { return emu_device_count() ? SUCCESS : NO_DEVICE; }

EXPORT int cuDriverGetVersion(int* version) {
  *version = 13000;
  return SUCCESS;
}

EXPORT int cuDeviceGetCount(int* count) {
  *count = emu_device_count();
  return SUCCESS;
}

EXPORT int cuDeviceGet(int* device, int index) {
  *device = index;
  return SUCCESS;
}

EXPORT int cuDeviceGetName(char* name, int length, int) {
  snprintf(name, length, "%s", emu_device_name());
  return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = emu_total_memory();
  return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = emu_attribute(attribute, device);
  return SUCCESS;
}

EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) {
  memset(uuid, 0, 16);
  uuid[3] = static_cast<char>(emu_physical_device(device) + 1);
  return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(CONTEXT + device);
  return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void** context) { return cuDevicePrimaryCtxRetain(context, emu_current_device()); }

EXPORT int cuCtxSetCurrent(void* context) {
  if (context) emu_set_current_device(static_cast<int>(reinterpret_cast<uintptr_t>(context) - CONTEXT));
  return SUCCESS;
}

EXPORT int cuCtxPushCurrent_v2(void*) { return SUCCESS; }
EXPORT int cuCtxPopCurrent_v2(void** context) { return cuCtxGetCurrent(context); }

EXPORT int cuCtxGetDevice(int* device) {
  *device = emu_current_device();
  return SUCCESS;
}

EXPORT int cuCtxSynchronize() {
  emu_counts[DEVICE_SYNC]++;
  return emu_sticky_error();
}

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}

EXPORT int cuCtxGetLimit(size_t* value, int) {
  *value = 1024;
  return SUCCESS;
}

EXPORT int cuCtxSetLimit(int, size_t) { return SUCCESS; }

EXPORT int cuGetErrorString(int error, const char** message) {
  *message = error == OUT_OF_MEMORY ? "out of memory" : "emulated driver error";
  return SUCCESS;
}

EXPORT int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_EMULATED";
  return SUCCESS;
}

// ---- memory

EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = emu_free_memory(emu_current_device());
  *total = emu_total_memory();
  return SUCCESS;
}

EXPORT int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = 2 << 20;
  return SUCCESS;
}

EXPORT int cuMemAddressReserve(uintptr_t* address, size_t bytes, size_t, uintptr_t, unsigned long long) {
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return OUT_OF_MEMORY;
  emu_remember(block, bytes, emu_current_device(), DEVICE);
  *address = reinterpret_cast<uintptr_t>(block);
  return SUCCESS;
}

EXPORT int cuMemAddressFree(uintptr_t address, size_t bytes) {
  emu_forget(reinterpret_cast<void*>(address));
  munmap(reinterpret_cast<void*>(address), bytes);
  return SUCCESS;
}

EXPORT int cuMemCreate(Allocation** handle, size_t bytes, const AllocationProperties* properties, unsigned long long) {
  emu_counts[ALLOCATE]++;
  int device = properties->location.id;
  if (emu_take_memory(device, static_cast<long>(bytes))) return OUT_OF_MEMORY;
  *handle = new Allocation{bytes, device};
  return SUCCESS;
}

EXPORT int cuMemRelease(Allocation* handle) {
  emu_counts[FREE]++;
  emu_take_memory(handle->device, -static_cast<long>(handle->bytes));
  delete handle;
  return SUCCESS;
}

EXPORT int cuMemMap(uintptr_t, size_t, size_t, Allocation*, unsigned long long) { return SUCCESS; }

EXPORT int cuMemUnmap(uintptr_t address, size_t bytes) {
  madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
  return SUCCESS;
}

EXPORT int cuMemSetAccess(uintptr_t, size_t, const void*, size_t) { return SUCCESS; }
EXPORT int cuMemRetainAllocationHandle(Allocation**, void*) { return NOT_SUPPORTED; }

EXPORT int cuPointerGetAttribute(void* value, int attribute, uintptr_t pointer) {
  constexpr int MEMORY_TYPE = 2, DEVICE_POINTER = 3, ON_DEVICE = 2;
  if (attribute == DEVICE_POINTER)
    *static_cast<uintptr_t*>(value) = pointer;
  else
    *static_cast<int*>(value) = attribute == MEMORY_TYPE ? ON_DEVICE : 0;
  return SUCCESS;
}

EXPORT int cuMemAlloc_v2(uintptr_t* pointer, size_t bytes) {
  *pointer = reinterpret_cast<uintptr_t>(calloc(1, bytes));
  return SUCCESS;
}

EXPORT int cuMemFree_v2(uintptr_t pointer) {
  free(reinterpret_cast<void*>(pointer));
  return SUCCESS;
}

EXPORT int cuMemcpyHtoD_v2(uintptr_t target, const void* source, size_t bytes) {
  emu_copy(reinterpret_cast<void*>(target), source, bytes);
  return SUCCESS;
}

EXPORT int cuMemcpyDtoH_v2(void* target, uintptr_t source, size_t bytes) {
  emu_copy(target, reinterpret_cast<void*>(source), bytes);
  return SUCCESS;
}

EXPORT int cuMemsetD32Async(uintptr_t, unsigned, size_t, void*) { return SUCCESS; }

EXPORT int cuMemGetAddressRange_v2(uintptr_t* base, size_t* bytes, uintptr_t pointer) {
  if (base) *base = pointer;
  if (bytes) *bytes = 0;
  return SUCCESS;
}

// ---- modules and launches

EXPORT int cuModuleLoad(void** module, const char*) { return new_handle(module); }
EXPORT int cuModuleLoadData(void** module, const void*) { return new_handle(module); }
EXPORT int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void**) { return new_handle(module); }
EXPORT int cuModuleUnload(void*) { return SUCCESS; }
EXPORT int cuModuleGetFunction(void** function, void*, const char*) { return new_handle(function); }

EXPORT int cuModuleGetGlobal_v2(uintptr_t* pointer, size_t* bytes, void*, const char*) {
  *pointer = reinterpret_cast<uintptr_t>(calloc(1, 65536));
  if (bytes) *bytes = 0;
  return SUCCESS;
}

EXPORT int cuLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
  return new_handle(library);
}

EXPORT int cuLibraryGetKernel(void** kernel, void*, const char*) { return new_handle(kernel); }
EXPORT int cuLibraryUnload(void*) { return SUCCESS; }

EXPORT int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return SUCCESS;
}

EXPORT int cuFuncGetAttribute(int* value, int attribute, void*) {
  constexpr int MAX_THREADS_PER_BLOCK = 0, REGISTERS = 4;
  *value = attribute == MAX_THREADS_PER_BLOCK ? 1024 : attribute == REGISTERS ? 64 : 0;
  return SUCCESS;
}

EXPORT int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
EXPORT int cuFuncSetCacheConfig(void*, int) { return SUCCESS; }

EXPORT int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                          void**, void**) {
  return emu_launched(function);
}

EXPORT int cuLaunchKernelEx(const void*, void* function, void**, void**) { return emu_launched(function); }

EXPORT int cuLaunchCooperativeKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, void*, void**) {
  return emu_launched(function);
}

EXPORT int cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) {
  *clusters = 2;
  return SUCCESS;
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  *blocks = 2;
  return SUCCESS;
}

EXPORT int cuStreamSynchronize(void*) {
  emu_counts[STREAM_SYNC]++;
  return emu_sticky_error();
}

EXPORT int cuStreamGetCaptureInfo_v2(void*, int* status, void*, void*, void*, void*) {
  *status = 0;
  return SUCCESS;
}

EXPORT int cuStreamWriteValue32_v2(void*, uintptr_t, uint32_t, unsigned) { return SUCCESS; }
EXPORT int cuTensorMapEncodeTiled() { return SUCCESS; }
EXPORT int cuLinkCreate_v2() { return NOT_SUPPORTED; }
EXPORT int cuLinkAddData_v2() { return NOT_SUPPORTED; }
EXPORT int cuLinkComplete() { return NOT_SUPPORTED; }
EXPORT int cuGetExportTable() { return NOT_SUPPORTED; }

// Every function exists: what this file leaves out answers CUDA_ERROR_NOT_SUPPORTED.
EXPORT int cuGetProcAddress_v2(const char* symbol, void** pointer, int, uint64_t, int* result) {
  void* self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  *pointer = nullptr;
  for (const char* suffix : {"_v2", ""}) {
    char name[256];
    snprintf(name, sizeof name, "%s%s", symbol, suffix);
    if (self) *pointer = dlsym(self, name);
    if (*pointer) break;
  }
  if (!*pointer) *pointer = reinterpret_cast<void*>(unsupported);
  if (result) *result = 0;
  return SUCCESS;
}

EXPORT int cuGetProcAddress(const char* symbol, void** pointer, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, pointer, version, flags, nullptr);
}
