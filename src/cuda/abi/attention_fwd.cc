// flashvar_attention_fwd: checks the caller's parameters, finds the kernel, launches it.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "abi/device_guard.h"
#include "abi/error.h"
#include "abi/flashvar.h"
#include "abi/kernel_table.h"
#include "abi/params.h"

namespace flashvar {

#include "kernel_table.inc"  // kAttentionFwdKernels; its rows are other files' objects

namespace {

constexpr double kLog2E = 1.44269504088896340736;
constexpr size_t kFirstSize = 208;  // of flashvar_attention_fwd_params when it was new
constexpr int64_t kMaxSeqlen = int64_t{1} << 30;  // block ends stay below 2^31

flashvar_status check(const flashvar_attention_fwd_params& p) {
  if (p.batch < 0 || p.batch > INT32_MAX || p.seqlen_q < 0 || p.seqlen_q > kMaxSeqlen ||
      p.seqlen_k < 0 || p.seqlen_k > kMaxSeqlen) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "batch must be 0 to 2^31 - 1 and sequence lengths 0 to 2^30, found batch %lld, "
                "seqlen_q %lld, seqlen_k %lld",
                static_cast<long long>(p.batch), static_cast<long long>(p.seqlen_q),
                static_cast<long long>(p.seqlen_k));
  }
  if (p.heads_q <= 0 || p.heads_kv <= 0 || p.heads_q % p.heads_kv != 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "heads_q must be a positive multiple of heads_kv, found %d and %d", p.heads_q,
                p.heads_kv);
  }
  if (p.head_dim <= 0 || p.head_dim % 8 != 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "head_dim must be a positive multiple of 8, found %d",
                p.head_dim);
  }
  if (!std::isfinite(p.scale)) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "scale must be finite, found %g", p.scale);
  }
  return FLASHVAR_OK;
}

// The smallest compiled head dim that holds the request.
const AttentionFwdKernel* find(unsigned dtype, int head_dim) {
  const AttentionFwdKernel* best = nullptr;
  for (const AttentionFwdKernel* const* row = kAttentionFwdKernels; *row != nullptr; ++row) {
    if ((*row)->dtype != dtype || (*row)->head_dim < head_dim) continue;
    if (best == nullptr || (*row)->head_dim < best->head_dim) best = *row;
  }
  return best;
}

flashvar_status fail_no_kernel(unsigned dtype, int head_dim) {
  char held[512] = "nothing";
  int length = 0;
  for (const AttentionFwdKernel* const* row = kAttentionFwdKernels; *row != nullptr; ++row) {
    if (length >= static_cast<int>(sizeof(held)) - 32) break;
    length += std::snprintf(held + length, sizeof(held) - length, "%s(dtype %u, head_dim %d)",
                            length == 0 ? "" : ", ", (*row)->dtype, (*row)->head_dim);
  }
  return fail(FLASHVAR_NO_KERNEL,
              "no attention_fwd kernel for dtype %u, head_dim %d; this binary holds %s", dtype,
              head_dim, held);
}

TensorView view(const flashvar_tensor& tensor) {
  return {static_cast<uint16_t*>(tensor.data), tensor.batch_stride, tensor.seq_stride,
          tensor.head_stride};
}

AttentionFwdProblem problem_of(const flashvar_attention_fwd_params& p) {
  float const sign = p.scale > 0.f ? 1.f : p.scale < 0.f ? -1.f : 0.f;
  double const magnitude = p.scale == 0.f ? 1. : std::fabs(p.scale);
  return {view(p.q),
          view(p.k),
          view(p.v),
          view(p.out),
          p.lse,
          p.batch,
          static_cast<int32_t>(p.seqlen_q),
          static_cast<int32_t>(p.seqlen_k),
          p.heads_q,
          p.heads_q / p.heads_kv,
          p.head_dim,
          (p.flags & FLASHVAR_CAUSAL) != 0,
          sign,
          static_cast<float>(std::fmin(magnitude * kLog2E, FLT_MAX))};
}

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_attention_fwd(const flashvar_attention_fwd_params* params) {
  using namespace flashvar;
  flashvar_attention_fwd_params p;
  flashvar_status status = read_params(params, kFirstSize, p);
  if (status == FLASHVAR_OK) status = check(p);
  if (status != FLASHVAR_OK) return status;
  const AttentionFwdKernel* const kernel = find(p.dtype, p.head_dim);
  if (kernel == nullptr) return fail_no_kernel(p.dtype, p.head_dim);
  if (p.batch == 0 || p.seqlen_q == 0) return FLASHVAR_OK;

  DeviceGuard const guard(p.device);
  if (guard.status() != FLASHVAR_OK) return guard.status();
  cudaError_t const error =
      kernel->launch(problem_of(p), p.device, static_cast<cudaStream_t>(p.stream));
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported here, not to the next caller of the runtime
    return fail(FLASHVAR_CUDA_ERROR, "attention_fwd did not launch on device %d: %s (%d)", p.device,
                cudaGetErrorString(error), error);
  }
  return FLASHVAR_OK;
}
