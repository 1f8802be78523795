// Warpgroup GEMMs with wgmma m64nNk16: operands in shared memory or, A only, in registers;
// accumulators in fp32. Each call issues one wgmma group and returns. Call ptx::wgmma_wait() before
// reading the accumulators.
#pragma once
#include <cstdint>

#include "ptx/wgmma.cuh"

namespace flashvar::sm90 {

// K-major operand in shared memory: its columns are k (Q and K for the scores). Column blocks are
// kColBlockBytes apart; step(kk) is the descriptor of k-step kk, 16 columns.
template <int kColBlockBytes>
struct KMajor {
  static constexpr bool kTransposed = false;
  uint64_t base;

  explicit __device__ __forceinline__ KMajor(uint32_t smem)
      : base(ptx::wgmma_descriptor(smem, 0)) {}
  __device__ __forceinline__ uint64_t step(int kk) const {
    return ptx::wgmma_advance(base, kk / 4 * kColBlockBytes + kk % 4 * 32);
  }
};

// MN-major operand in shared memory: its rows are k (V for the output). step(kk): 16 rows. As
// operand A, which has one column block, for the ss instructions only.
template <int kColBlockBytes>
struct MnMajor {
  static constexpr bool kTransposed = true;
  uint64_t base;

  explicit __device__ __forceinline__ MnMajor(uint32_t smem)
      : base(ptx::wgmma_descriptor(smem, kColBlockBytes)) {}
  __device__ __forceinline__ uint64_t step(int kk) const {
    return ptx::wgmma_advance(base, kk * 16 * 128);
  }
};

// d = A B or, with kAdd, d += A B over kSteps k-steps of 16, both operands in shared memory.
template <class Dtype, int kN, int kSteps, bool kAdd = false, class A, class B>
__device__ __forceinline__ void gemm_ss(float (&d)[kN / 2], const A& a, const B& b) {
  ptx::wgmma_fence_operand(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    ptx::Wgmma<Dtype, kN>::template ss<B::kTransposed>(d, a.step(kk), b.step(kk), kAdd || kk > 0);
  }
  ptx::wgmma_commit();
}

// d += A B with A in registers: the fragments of kSteps k-steps of 16. Not kAdd: d = A B.
template <class Dtype, int kN, int kSteps, class B, bool kAdd = true>
__device__ __forceinline__ void gemm_rs(float (&d)[kN / 2], const uint32_t (&a)[kSteps][4],
                                        const B& b) {
  ptx::wgmma_fence_operand(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    ptx::Wgmma<Dtype, kN>::template rs<B::kTransposed>(d, a[kk], b.step(kk), kAdd || kk > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace flashvar::sm90
