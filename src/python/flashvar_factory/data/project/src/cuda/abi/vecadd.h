/* The C ABI of a vecadd binary. */
#ifndef VECADD_H
#define VECADD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VECADD_ABI_VERSION 1u
#define VECADD_API __attribute__((visibility("default")))

typedef enum vecadd_status {
  VECADD_OK = 0,
  VECADD_NO_KERNEL = 1, /* this binary holds no kernel for the dtype */
  VECADD_CUDA_ERROR = 2 /* CUDA refused; the message has its words */
} vecadd_status;

typedef enum vecadd_dtype { VECADD_FP32 = 0, VECADD_FP16 = 1 } vecadd_dtype;

typedef struct vecadd_vector_add_params {
  const void* x; /* [length] on the current device */
  const void* y; /* [length] */
  void* out;     /* [length], written */
  int64_t length;
  void* stream; /* cudaStream_t */
  uint32_t dtype;
  uint32_t reserved; /* 0 */
} vecadd_vector_add_params;

/* Both are what the factory asks of any project: VECADD_ABI_VERSION, and kBuildInfo. */
VECADD_API uint32_t vecadd_abi_version(void);
VECADD_API const char* vecadd_build_info(void);

/* Message of the last failed call on this thread. */
VECADD_API const char* vecadd_last_error(void);

/* out = x + y. */
VECADD_API vecadd_status vecadd_vector_add(const vecadd_vector_add_params* params);

#ifdef __cplusplus
}
#endif

#endif /* VECADD_H */
