/* The C ABI of the kernels of causal-conv1d: its own parameters, and what selects an instance. */
#ifndef CAUSALCONV1D_H
#define CAUSALCONV1D_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CAUSALCONV1D_ABI_VERSION 1u
#define CAUSALCONV1D_API __attribute__((visibility("default")))

typedef enum causalconv1d_status {
  CAUSALCONV1D_OK = 0,
  CAUSALCONV1D_INVALID = 1,   /* a size, a width or a dtype that no instance has */
  CAUSALCONV1D_CUDA_ERROR = 2 /* CUDA refused; the message has its words */
} causalconv1d_status;

typedef enum causalconv1d_dtype {
  CAUSALCONV1D_FP32 = 0,
  CAUSALCONV1D_FP16 = 1,
  CAUSALCONV1D_BF16 = 2
} causalconv1d_dtype;

typedef struct causalconv1d_call {
  const void* params;   /* ConvParamsBase, for conv_bwd ConvParamsBwd, of causal_conv1d.h */
  uint64_t params_size; /* bytes */
  void* stream;         /* cudaStream_t of the current device */
  uint32_t dtype;
  uint32_t weight_dtype;
  uint32_t channel_last; /* 1: the channels lie beside each other; ignored by conv_update */
  uint32_t reserved;     /* 0 */
} causalconv1d_call;

CAUSALCONV1D_API uint32_t causalconv1d_abi_version(void);
CAUSALCONV1D_API const char* causalconv1d_build_info(void);

/* Message of the last failed call on this thread. */
CAUSALCONV1D_API const char* causalconv1d_last_error(void);

CAUSALCONV1D_API causalconv1d_status causalconv1d_conv_fwd(const causalconv1d_call* call);
CAUSALCONV1D_API causalconv1d_status causalconv1d_conv_bwd(const causalconv1d_call* call);
CAUSALCONV1D_API causalconv1d_status causalconv1d_conv_update(const causalconv1d_call* call);

#ifdef __cplusplus
}
#endif

#endif /* CAUSALCONV1D_H */
