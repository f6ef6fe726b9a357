// The macros that CUDA's headers take from a file of the compiler's package, which torch does not install.
#pragma once
#define CUDARTAPI
#define CUDART_CB
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __annotate__(a) __attribute__((a))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
