// What the emulated libraries share. The runtime (runtime.cpp) owns the state; the others call these functions.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Indices into emu_counts. tools/cuda_emulator/counts.py has the same names in the same order.
enum Counter {
  LAUNCH,            // kernels started by the runtime or the driver
  COPY_FROM_PINNED,  // host to device, from page-locked memory
  COPY_FROM_PAGED,   // host to device, from any other memory: the host waits for these
  COPY_TO_HOST,
  COPY_ON_DEVICE,
  MEMSET,
  STREAM_SYNC,
  EVENT_SYNC,
  DEVICE_SYNC,
  EVENT_RECORD,
  STREAM_WAIT,
  ALLOCATE,
  FREE,
  PRODUCT,  // matrix products by cuBLAS and cublasLt
  COLLECTIVE,
  BYTES_TO_DEVICE,
  BYTES_TO_HOST,
  EVENT_QUERY,
  ALLOCATE_PINNED,
};

enum MemoryKind { PINNED = 1, DEVICE = 2 };

extern "C" {
extern std::atomic<unsigned long long> emu_counts[32];

long emu_setting(const char* name, long otherwise);
const char* emu_device_name();

int emu_device_count();               // those that CUDA_VISIBLE_DEVICES leaves
int emu_physical_device(int device);  // the index that NVML has
int emu_current_device();
void emu_set_current_device(int device);
int emu_capability();  // 90 is compute capability 9.0
int emu_attribute(int attribute, int device);

size_t emu_total_memory();
size_t emu_free_memory(int device);
int emu_take_memory(int device, long bytes);  // 1 where the card has too little; bytes < 0 gives back
void emu_remember(void* address, size_t bytes, int device, int kind);
void emu_forget(void* address);
void emu_copy(void* target, const void* source, size_t bytes);

int emu_launched(const void* kernel);  // counts; returns the sticky error once it is due, else 0
int emu_sticky_error();
}
