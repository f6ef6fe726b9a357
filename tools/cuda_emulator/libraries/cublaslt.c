/* libcublasLt: descriptors, and one algorithm without a workspace for every product. */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static uintptr_t next_handle = 0x6000;

static int new_handle(void** handle) {
  *handle = (void*)(next_handle += 16);
  return 0;
}

/* cublasLtMatmulHeuristicResult_t */
struct heuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

EXPORT int cublasLtCreate(void** handle) { return new_handle(handle); }
EXPORT int cublasLtMatmulDescCreate(void** descriptor, int compute_type, int scale_type) {
  return new_handle(descriptor);
}
EXPORT int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  return new_handle(layout);
}
EXPORT int cublasLtMatmulPreferenceCreate(void** preference) { return new_handle(preference); }

EXPORT int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d,
                                          void* preference, int requested, struct heuristic* results, int* returned) {
  memset(results, 0, sizeof *results * requested);
  *returned = requested > 0;
  return 0;
}

EXPORT size_t cublasLtGetVersion(void) { return 130000; }
EXPORT size_t cublasLtGetCudartVersion(void) { return 13000; }

EXPORT int cublasLtGetProperty(int type, int* value) {
  *value = type == 0 ? 13 : 0;
  return 0;
}
