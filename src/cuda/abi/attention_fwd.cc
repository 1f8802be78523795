// flashvar_attention_fwd: checks the caller's parameters, finds the kernel, launches it.
#include "abi/attention_problem.h"
#include "abi/device_guard.h"
#include "abi/error.h"
#include "abi/flashvar.h"
#include "abi/kernel_table.h"
#include "abi/params.h"

namespace flashvar {

#include "kernel_table.inc"  // kAttentionFwdKernels; its rows are other files' objects

namespace {

constexpr size_t kFirstSize = 208;  // of flashvar_attention_fwd_params when it was new

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_attention_fwd(const flashvar_attention_fwd_params* params) {
  using namespace flashvar;
  flashvar_attention_fwd_params p;
  flashvar_status status = read_params(params, kFirstSize, p);
  if (status == FLASHVAR_OK) status = check_attention(p);
  if (status != FLASHVAR_OK) return status;
  const auto* const table = kAttentionFwdKernels;
  const AttentionFwdKernel* const kernel = find_kernel(table, p.dtype, p.head_dim, head_dim_v(p));
  if (kernel == nullptr) {
    return fail_no_kernel("attention_fwd", table, p.dtype, p.head_dim, head_dim_v(p));
  }
  if (p.batch == 0 || query_rows(p) == 0) return FLASHVAR_OK;

  DeviceGuard const guard(p.device);
  if (guard.status() != FLASHVAR_OK) return guard.status();
  cudaError_t const error = kernel->launch({attention_problem(p, p.lse), p.counter}, p.device,
                                           static_cast<cudaStream_t>(p.stream));
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported here, not to the next caller of the runtime
    return fail(FLASHVAR_CUDA_ERROR, "attention_fwd did not launch on device %d: %s (%d)", p.device,
                cudaGetErrorString(error), error);
  }
  return FLASHVAR_OK;
}
