// flashvar_attention_bwd and what workspace it wants: checks the caller's parameters, finds the
// kernel, launches it.
#include "abi/attention_problem.h"
#include "abi/device_guard.h"
#include "abi/error.h"
#include "abi/flashvar.h"
#include "abi/kernel_table.h"
#include "abi/params.h"

namespace flashvar {

#include "kernel_table.inc"  // kAttentionBwdKernels; its rows are other files' objects

namespace {

constexpr size_t kFirstSize = 512;  // of flashvar_attention_bwd_params when it was new
constexpr uintptr_t kWorkspaceAlignment = 256;

using Params = flashvar_attention_bwd_params;

attention::BwdProblem bwd_problem(const Params& p) {
  bool const packed_q = p.features.cu_seqlens_q != nullptr;
  bool const packed_k = p.features.cu_seqlens_k != nullptr;
  return {attention_problem(p, const_cast<float*>(p.lse)),
          view(p.grad_out, packed_q),
          view(p.grad_q, packed_q),
          view(p.grad_k, packed_k),
          view(p.grad_v, packed_k),
          bias_view(p.grad_bias),
          p.grad_lse,
          static_cast<unsigned char*>(p.workspace),
          (p.flags & FLASHVAR_DETERMINISTIC) != 0};
}

// Reads and checks `params`; leaves the kernel that serves them.
flashvar_status prepare(const Params* params, Params& p, const AttentionBwdKernel*& kernel) {
  flashvar_status status = read_params(params, kFirstSize, p);
  if (status == FLASHVAR_OK) status = check_attention(p);
  if (status != FLASHVAR_OK) return status;
  if (p.grad_bias.data != nullptr && p.features.bias.data == nullptr) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "grad_bias is the gradient of a bias, found no bias");
  }
  const auto* const table = kAttentionBwdKernels;
  kernel = find_kernel(table, p.dtype, p.head_dim, head_dim_v(p));
  if (kernel == nullptr) {
    return fail_no_kernel("attention_bwd", table, p.dtype, p.head_dim, head_dim_v(p));
  }
  return FLASHVAR_OK;
}

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_attention_bwd_workspace(const flashvar_attention_bwd_params* params,
                                                 uint64_t* size) {
  using namespace flashvar;
  Params p;
  const AttentionBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  *size = p.batch == 0 ? 0 : kernel->workspace(bwd_problem(p));
  return FLASHVAR_OK;
}

flashvar_status flashvar_attention_bwd(const flashvar_attention_bwd_params* params) {
  using namespace flashvar;
  Params p;
  const AttentionBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  if (p.batch == 0) return FLASHVAR_OK;
  attention::BwdProblem const problem = bwd_problem(p);
  uint64_t const wanted = kernel->workspace(problem);
  if (p.workspace_size < wanted ||
      reinterpret_cast<uintptr_t>(p.workspace) % kWorkspaceAlignment != 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "workspace must have %llu bytes, aligned to %llu, found %llu bytes at %p; "
                "flashvar_attention_bwd_workspace says how many",
                static_cast<unsigned long long>(wanted),
                static_cast<unsigned long long>(kWorkspaceAlignment),
                static_cast<unsigned long long>(p.workspace_size), p.workspace);
  }

  DeviceGuard const guard(p.device);
  if (guard.status() != FLASHVAR_OK) return guard.status();
  cudaError_t const error = kernel->launch(problem, p.device, static_cast<cudaStream_t>(p.stream));
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported here, not to the next caller of the runtime
    return fail(FLASHVAR_CUDA_ERROR, "attention_bwd did not launch on device %d: %s (%d)", p.device,
                cudaGetErrorString(error), error);
  }
  return FLASHVAR_OK;
}
