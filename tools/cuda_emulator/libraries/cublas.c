/* libcublas: handles and versions. Products are stubs that count (stubs.py); their values come from preload/values.py.
 */
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

static uintptr_t next_handle = 0x5000;

static int zero(int* value) {
  *value = 0;
  return 0;
}

EXPORT int cublasCreate_v2(void** handle) {
  *handle = (void*)(next_handle += 16);
  return 0;
}

EXPORT int cublasGetVersion_v2(void* handle, int* version) {
  *version = 130000;
  return 0;
}

EXPORT int cublasGetProperty(int type, int* value) {
  *value = type == 0 ? 13 : 0; /* the major version, else minor and patch */
  return 0;
}

EXPORT int cublasGetStream_v2(void* handle, void** stream) {
  *stream = 0;
  return 0;
}

EXPORT int cublasGetMathMode(void* handle, int* mode) { return zero(mode); }
EXPORT int cublasGetPointerMode_v2(void* handle, int* mode) { return zero(mode); }
EXPORT int cublasGetAtomicsMode(void* handle, int* mode) { return zero(mode); }
EXPORT int cublasGetSmCountTarget(void* handle, int* count) { return zero(count); }
EXPORT int cublasGetEmulationStrategy(void* handle, int* strategy) { return zero(strategy); }
EXPORT const char* cublasGetStatusString(int status) { return "emulated"; }
EXPORT const char* cublasGetStatusName(int status) { return "emulated"; }
