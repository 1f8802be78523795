/* The C ABI of a flashvar binary: the types and functions of all ops. Each op has a header of its
 * own beside this one.
 *
 * A binary depends on neither Python nor torch. Callers fill one plain struct per function, name
 * the device and the stream explicitly, and get a status back; the message of the last failure is
 * kept per thread.
 *
 * Every parameter struct starts with a flashvar_call. Structs grow only at the end, by fields whose
 * 0 means "as before"; `struct_size` tells the library which fields the caller has. Layouts are
 * frozen by *layout_check.cc: any other change of one needs a new FLASHVAR_ABI_VERSION. Bits of
 * `flags` that the op's header does not define, and fields `reserved` that are not 0, are refused.
 *
 * A function of an op, such as <op>_fwd, is three C functions:
 *   flashvar_<function>(params)                      enqueues on the stream and returns
 *   flashvar_<function>_workspace(params, &bytes)    the device memory that it needs
 *   flashvar_<function>_explain(params, text, size)  which kernels it would launch, and why
 * The last two need no device and read no device memory. They check which addresses are NULL, and
 * those of some ops how addresses are aligned. Where a field is an array in host memory, its op's
 * header says so; all three functions may read it.
 */
#ifndef FLASHVAR_H
#define FLASHVAR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHVAR_ABI_VERSION 2u
#define FLASHVAR_API __attribute__((visibility("default")))

typedef enum flashvar_status {
  FLASHVAR_OK = 0,
  FLASHVAR_INVALID_ARGUMENT = 1, /* the parameters contradict each other or this header */
  FLASHVAR_NO_KERNEL = 2,        /* nothing compiled into this binary supports the request */
  FLASHVAR_CUDA_ERROR = 3        /* the driver or the runtime failed; the message names its error */
} flashvar_status;

typedef enum flashvar_dtype {
  FLASHVAR_BF16 = 0,
  FLASHVAR_FP16 = 1,
  FLASHVAR_FP32 = 2
} flashvar_dtype;

/* The first member of every function's parameters. */
typedef struct flashvar_call {
  uint32_t struct_size; /* sizeof the whole parameter struct, as the caller compiled it */
  uint32_t abi_version; /* FLASHVAR_ABI_VERSION, as the caller compiled it */
  int32_t device;       /* CUDA device ordinal that owns every pointer of the parameters */
  uint32_t reserved;    /* 0 */
  void* stream;         /* cudaStream_t of that device; NULL is the legacy default stream */
  void* workspace; /* device memory, 256-byte aligned, overwritten; may be NULL if not needed */
  uint64_t workspace_size; /* bytes; at least what flashvar_<function>_workspace says */
} flashvar_call;

/* A tensor [batch, sequence, heads, dim] in device memory, of the dtype that the function's
 * parameters name. Strides are in elements and may be 0; the stride of dim is 1. */
typedef struct flashvar_tensor {
  void* data;
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
} flashvar_tensor;

/* States [sequences, heads, K, V] in device memory, one for each head of a sequence; fp32 unless
 * the op's header says otherwise. Strides are in elements. */
typedef struct flashvar_state {
  void* data; /* may be NULL where the op's header says so */
  int64_t sequence_stride;
  int64_t head_stride;
  int64_t k_stride;
  int64_t v_stride;
} flashvar_state;

/* FLASHVAR_ABI_VERSION as the library was compiled. */
FLASHVAR_API uint32_t flashvar_abi_version(void);

/* JSON object of the binary: {"architecture": "sm_80", "version": "0.1.0", "source_hash": "..."}.
 */
FLASHVAR_API const char* flashvar_build_info(void);

/* Message of the last failed call on this thread; "" when none failed yet. Never NULL. */
FLASHVAR_API const char* flashvar_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* FLASHVAR_H */
