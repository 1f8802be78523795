/* The C ABI of the kernels of mamba-ssm: its own parameters, and what selects an instance. */
#ifndef MAMBASSM_H
#define MAMBASSM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MAMBASSM_ABI_VERSION 1u
#define MAMBASSM_API __attribute__((visibility("default")))

typedef enum mambassm_status {
  MAMBASSM_OK = 0,
  MAMBASSM_INVALID = 1,   /* a size or a dtype that no instance has */
  MAMBASSM_CUDA_ERROR = 2 /* CUDA refused; the message has its words */
} mambassm_status;

typedef enum mambassm_dtype {
  MAMBASSM_FP32 = 0,
  MAMBASSM_FP16 = 1,
  MAMBASSM_BF16 = 2,
  MAMBASSM_COMPLEX64 = 3 /* of weights */
} mambassm_dtype;

typedef struct mambassm_call {
  const void* params;   /* SSMParamsBase, for scan_bwd SSMParamsBwd, of selective_scan.h */
  uint64_t params_size; /* bytes */
  void* stream;         /* cudaStream_t of the current device */
  uint32_t dtype;
  uint32_t weight_dtype;
  uint64_t reserved; /* 0 */
} mambassm_call;

MAMBASSM_API uint32_t mambassm_abi_version(void);
MAMBASSM_API const char* mambassm_build_info(void);

/* Message of the last failed call on this thread. */
MAMBASSM_API const char* mambassm_last_error(void);

MAMBASSM_API mambassm_status mambassm_scan_fwd(const mambassm_call* call);
MAMBASSM_API mambassm_status mambassm_scan_bwd(const mambassm_call* call);

#ifdef __cplusplus
}
#endif

#endif /* MAMBASSM_H */
