// States of head dims above 128. Their packed copy would take too many registers beside the state,
// which has up to 128, so each use packs 16 columns at a time.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "core/smem_layout.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "sm80/gemm.cuh"

namespace flashvar::sm80::gated_delta_rule {

// Packs accumulator columns 16 step to 16 step + 15 into operand A.
template <class Dtype, int kElements>
__device__ __forceinline__ void pack_step(uint32_t (&a)[4], const float (&d)[kElements], int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Dtype::pack(d[8 * step + 2 * i], d[8 * step + 2 * i + 1]);
}

// d = S^T B^T, for a tile B of 64 tokens whose columns are k.
template <class Dtype, class Layout, int kElements>
__device__ __forceinline__ void multiply_state(float (&d)[32], const float (&state)[kElements],
                                               uint32_t tile) {
#pragma unroll
  for (float& value : d) value = 0.f;
  uint32_t const fragments = tile + fragment_offset_b<Layout>();
#pragma unroll
  for (int kk = 0; kk < kElements / 8; ++kk) {
    uint32_t a[4];
    pack_step<Dtype>(a, state, kk);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, Layout::advance(fragments, 2 * kk) + n * 8 * Layout::kRowBytes);
      ptx::mma_m16n8k16<Dtype>(reinterpret_cast<float (&)[4]>(d[4 * n]), a, b[0], b[1]);
      ptx::mma_m16n8k16<Dtype>(reinterpret_cast<float (&)[4]>(d[4 * n + 4]), a, b[2], b[3]);
    }
  }
}

// As store_image(), of accumulators.
template <class Dtype, int kElements>
__device__ __forceinline__ void store_state_image(unsigned char* image,
                                                  const float (&state)[kElements]) {
  using Layout = SmemLayout<64, 2 * kElements>;
  Lane const lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = 16 * lane.warp + lane.g + 8 * half;
#pragma unroll
    for (int first = 0; first < kElements / 4; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = state + 4 * (first + i) + 2 * half;
        words[i] = Dtype::pack(pair[0], pair[1]);
      }
      *reinterpret_cast<uint4*>(image + first / 8 * Layout::kColBlockBytes +
                                Layout::unit_offset(row, first % 8 + lane.t)) =
          transpose_quad(words);
    }
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
