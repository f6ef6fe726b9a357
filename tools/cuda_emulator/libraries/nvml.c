/* libnvidia-ml: devices, memory and utilization. EMU_NVML_ERR fails nvmlInit, EMU_NVML_UTIL the query of utilization.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NVML_ERROR_INVALID_ARGUMENT 2
#define NVML_ERROR_NOT_SUPPORTED 3
#define NVML_ERROR_NOT_FOUND 6

typedef unsigned long long bytes_t;
typedef void* device_t; /* device N has the handle N + 1 */

static const bytes_t CONTEXT = 500ull << 20;

static int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

static unsigned device_count(void) { return setting("EMU_GPUS", 1); }
static bytes_t total_memory(void) { return (bytes_t)setting("EMU_MEMORY_MB", 81920) << 20; }
static unsigned index_of(device_t device) { return (unsigned)((uintptr_t)device - 1); }

static int put_string(char* target, unsigned length, const char* value) {
  snprintf(target, length, "%s", value);
  return 0;
}

EXPORT int nvmlInit_v2(void) { return setting("EMU_NVML_ERR", 0); }
EXPORT int nvmlInit(void) { return nvmlInit_v2(); }
EXPORT int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT const char* nvmlErrorString(int error) { return "emulated"; }
EXPORT int nvmlSystemGetDriverVersion(char* version, unsigned length) { return put_string(version, length, "580.82"); }
EXPORT int nvmlSystemGetNVMLVersion(char* version, unsigned length) { return put_string(version, length, "13.580.82"); }

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = device_count();
  return 0;
}

EXPORT int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t* device) {
  if (index >= device_count()) return NVML_ERROR_INVALID_ARGUMENT;
  *device = (device_t)(uintptr_t)(index + 1);
  return 0;
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, device_t* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* id, device_t* device) {
  unsigned domain, bus;
  if (sscanf(id, "%x:%x", &domain, &bus) != 2 || bus < 3) return NVML_ERROR_NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(bus - 3, device);
}

EXPORT int nvmlDeviceGetUUID(device_t device, char* uuid, unsigned length) {
  snprintf(uuid, length, "GPU-%08x-0000-0000-0000-000000000000", index_of(device) + 1);
  return 0;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char* wanted, device_t* device) {
  for (unsigned index = 0; index < device_count(); index++) {
    char uuid[64];
    nvmlDeviceGetUUID((device_t)(uintptr_t)(index + 1), uuid, sizeof uuid);
    if (!strcmp(uuid, wanted)) return nvmlDeviceGetHandleByIndex_v2(index, device);
  }
  return NVML_ERROR_NOT_FOUND;
}

EXPORT int nvmlDeviceGetName(device_t device, char* name, unsigned length) {
  const char* value = getenv("EMU_NAME");
  return put_string(name, length, value ? value : "NVIDIA H200");
}

EXPORT int nvmlDeviceGetIndex(device_t device, unsigned* index) {
  *index = index_of(device);
  return 0;
}

struct memory {
  bytes_t total, free, used;
};

struct memory_v2 {
  unsigned version;
  bytes_t total, reserved, free, used;
};

EXPORT int nvmlDeviceGetMemoryInfo(device_t device, struct memory* memory) {
  memory->total = total_memory();
  memory->used = CONTEXT;
  memory->free = memory->total - memory->used;
  return 0;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2* memory) {
  memory->total = total_memory();
  memory->reserved = 0;
  memory->used = CONTEXT;
  memory->free = memory->total - memory->used;
  return 0;
}

struct utilization {
  unsigned gpu, memory;
};

EXPORT int nvmlDeviceGetUtilizationRates(device_t device, struct utilization* percent) {
  percent->gpu = 87;
  percent->memory = 40;
  return setting("EMU_NVML_UTIL", 0);
}

EXPORT int nvmlDeviceGetCudaComputeCapability(device_t device, int* major, int* minor) {
  int capability = setting("EMU_CC", 90);
  *major = capability / 10;
  *minor = capability % 10;
  return 0;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned* count, void* processes) {
  *count = 0;
  return 0;
}

EXPORT int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned* celsius) {
  *celsius = 50;
  return 0;
}

EXPORT int nvmlDeviceGetPowerUsage(device_t device, unsigned* milliwatts) {
  *milliwatts = 300000;
  return 0;
}

EXPORT int nvmlDeviceGetP2PStatus(device_t first, device_t second, int capability, int* status) {
  *status = 0;
  return 0;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses(void) { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void) { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_ERROR_NOT_SUPPORTED; }
