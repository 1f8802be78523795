// wgmma on tiles whose bytes come as they are from outside: what a tile looks like is said there.
#include "probe.h"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace {

namespace ptx = flashvar::ptx;
using probe::smem_address;

struct Operands {
  const uint4* a;  // a tile, pages of 64 columns, 64 rows of 128 bytes each; or registers, [k /
                   // 16][128 threads][4]
  const uint4* b;  // pages of 64 columns; rows are those of k where b is transposed
  int k;
  int b_bytes, b_page_bytes;

  __host__ __device__ int a_bytes() const { return (k + 63) / 64 * 64 * 128; }
};

// out: the accumulators, [128 threads][kN / 2]. The first product overwrites them, the others add.
template <class Dtype, int kN, bool kTransB, bool kFragments>
__global__ void __launch_bounds__(128, 1) multiply(Operands operands, float* out) {
  extern __shared__ __align__(1024) uint4 shared[];
  int const a_bytes = operands.a_bytes();
  if (!kFragments) {
    for (int i = threadIdx.x; i < a_bytes / 16; i += 128) shared[i] = operands.a[i];
  }
  uint4* const tile_b = shared + a_bytes / 16;
  for (int i = threadIdx.x; i < operands.b_bytes / 16; i += 128) tile_b[i] = operands.b[i];
  ptx::fence_async_proxy();
  __syncthreads();

  uint32_t const a = smem_address(shared), b = smem_address(tile_b);
  float d[kN / 2];
#pragma unroll
  for (float& x : d) x = 1e30f;
#pragma unroll 1
  for (int kk = 0; kk < operands.k / 16; ++kk) {
    uint32_t const page = kk / 4, column = kk % 4 * 32;
    uint64_t const b_descriptor =
        kTransB ? ptx::wgmma_descriptor(b + kk * 16 * 128, operands.b_page_bytes)
                : ptx::wgmma_descriptor(b + page * operands.b_page_bytes + column, 0);
    if constexpr (kFragments) {
      uint4 const loaded = operands.a[kk * 128 + threadIdx.x];
      uint32_t const fragment[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      ptx::wgmma_fence_operand(d);
      ptx::wgmma_fence();
      ptx::Wgmma<Dtype, kN>::template rs<kTransB>(d, fragment, b_descriptor, kk > 0);
    } else {
      ptx::wgmma_fence_operand(d);
      ptx::wgmma_fence();
      ptx::Wgmma<Dtype, kN>::template ss<kTransB>(
          d, ptx::wgmma_descriptor(a + page * 64 * 128 + column, 0), b_descriptor, kk > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(d);
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) out[threadIdx.x * (kN / 2) + i] = d[i];
}

struct Case {
  int n;
  bool transposed, fragments;
};

template <class Dtype, int kN>
int run(const Operands& operands, const Case& wanted, float* out) {
  auto* const kernel = wanted.fragments    ? wanted.transposed ? multiply<Dtype, kN, true, true>
                                                               : multiply<Dtype, kN, false, true>
                       : wanted.transposed ? multiply<Dtype, kN, true, false>
                                           : multiply<Dtype, kN, false, false>;
  return probe::run(kernel, 1, 128, operands.a_bytes() + operands.b_bytes, operands, out);
}

template <class Dtype, int... kN>
int run_one_of(const Operands& operands, const Case& wanted, float* out) {
  int error = cudaErrorInvalidValue;
  ((kN == wanted.n ? void(error = run<Dtype, kN>(operands, wanted, out)) : void()), ...);
  return error;
}

}  // namespace

FLASHVAR_PROBE probe_wgmma(int bf16, int n, int transposed, int fragments, int k, const void* a,
                           const void* b, int b_bytes, int b_page_bytes, float* out) {
  Operands const operands{static_cast<const uint4*>(a), static_cast<const uint4*>(b), k, b_bytes,
                          b_page_bytes};
  Case const wanted{n, transposed != 0, fragments != 0};
  if (bf16 == 0) return run_one_of<flashvar::dtype::fp16, 64, 128>(operands, wanted, out);
  return run_one_of<flashvar::dtype::bf16, 32, 64, 80, 96, 112, 128, 160, 176, 192, 256>(
      operands, wanted, out);
}
