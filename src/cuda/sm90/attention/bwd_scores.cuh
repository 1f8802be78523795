// GEMMs, softmax derivatives and epilogues of the backward's consumer warpgroups.
//
// In the dK and dV kernel scores are transposed, with keys as rows and queries as columns, so that
// P^T and dS^T are operand A of dV += P^T dO and dK += dS^T Q in registers. Only dS goes through
// shared memory, for dQ = dS K.
#pragma once
#include <cstdint>

#include "attention/mask.cuh"
#include "core/math.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/vectors.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/attention/hide_scores.cuh"
#include "sm90/attention/key_tile.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/gemm.cuh"

namespace flashvar::sm90::attention {

// Score accumulators of a thread (Registers: kMmaCols mma tiles of four), and their 16-bit form as
// operand A (Packed: kSteps fragments).
template <class Config>
struct Scores {
  static constexpr int kMmaCols = Config::kScoreColumns / 8;  // mma tiles of 8 columns
  static constexpr int kSteps = Config::kScoreColumns / 16;   // k-steps of 16
  using Registers = float[4 * kMmaCols];
  using Packed = uint32_t[kSteps][4];

  // Packs one 16 x 16 fragment: two adjacent mma tiles.
  static __device__ __forceinline__ void pack(const float* scores, uint32_t (&packed)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = Config::Dtype::pack(scores[2 * i], scores[2 * i + 1]);
    }
  }
  static __device__ __forceinline__ void pack(const Registers& scores, Packed& packed) {
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) pack(&scores[8 * kk], packed[kk]);
  }
  // Zeros element `e` (0 or 1) of row half `half` of mma tile n.
  static __device__ __forceinline__ void clear(Packed& packed, int n, int half, int e) {
    packed[n / 2][n % 2 * 2 + half] &= e == 0 ? 0xffff0000u : 0x0000ffffu;
  }
};

template <int kCount>
__device__ __forceinline__ void clear(float (&sums)[kCount]) {
#pragma unroll
  for (float& sum : sums) sum = 0.f;
}

// Issues S^T = K Q^T, or dP^T = V dO^T, of 64 keys.
template <class Config, int kDim>
__device__ __forceinline__ void gemm_scores_t(typename Scores<Config>::Registers& scores,
                                              uint32_t keys, uint32_t queries) {
  gemm_ss<typename Config::Dtype, Config::kBlockQ, kDim / 16>(
      scores, KMajor<Config::kColBlockBytesKV>(keys), KMajor<Config::kColBlockBytesQ>(queries));
}

// Issues dV += P^T dO, or dK += dS^T Q.
template <class Config, int kDim>
__device__ __forceinline__ void gemm_grad_kv(float (&grad)[kDim / 2],
                                             const typename Scores<Config>::Packed& p_or_ds,
                                             uint32_t rows) {
  gemm_rs<typename Config::Dtype, kDim>(grad, p_or_ds, MnMajor<Config::kColBlockBytesQ>(rows));
}

// Issues a warpgroup's half of dQ = dS K: half of its rows, or half of its columns.
template <class Config>
__device__ __forceinline__ void gemm_grad_q_part(float (&grad)[Config::kGradQCols / 2], uint32_t ds,
                                                 uint32_t keys, uint32_t warpgroup) {
  if constexpr (Config::kSplitsRows) {
    ds += warpgroup * 64 * 128;
  } else {
    keys += warpgroup * (Config::kGradQCols / kColBlockCols) * Config::kColBlockBytesKV;
  }
  gemm_ss<typename Config::Dtype, Config::kGradQCols, Config::kBlockKV / 16>(
      grad, KMajor<Config::kColBlockBytesQ>(ds), MnMajor<Config::kColBlockBytesKV>(keys));
}

// Calls clear(n, half, e) for the thread's hidden scores: element e of row half `half` of mma tile
// n. Rows are keys.
template <class Config, class Clear>
__device__ __forceinline__ void mask_transposed(const Mask& mask, int32_t first_key,
                                                int32_t first_query, Clear&& clear) {
  if (!mask.hides_any(first_query, first_query + Config::kBlockQ - 1, first_key, first_key + 64)) {
    return;
  }
  uint32_t const thread = ptx::thread_index();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t const key = first_key + thread / 32 % 4 * 16 + half * 8 + thread % 32 / 4;
    int32_t const start = first_query + static_cast<int32_t>(thread % 4 * 2);
    int32_t const begin = mask.query_begin(key) - start;
    int32_t const end = key < mask.seqlen_k ? mask.query_end(key) - start : INT32_MIN;
    hide_scores<Scores<Config>::kMmaCols>(half, begin, end, clear);
  }
}

// LSE or delta for a thread's scores where columns are queries: two values per mma tile, read from
// shared memory.
struct ColumnValues {
  uint32_t smem;

  __device__ __forceinline__ explicit ColumnValues(uint32_t first)
      : smem(first + ptx::thread_index() % 4 * 8) {}

  // Accumulator i of an mma tile uses .x where i / kRepeat is even, else .y.
  static constexpr int kRepeat = 1;
  __device__ __forceinline__ float2 of_tile(int n) const {
    return ptx::shared_load2(smem + n * 32);
  }
};

// ColumnValues of which load() reads the first kEarly mma tiles' ahead of their use.
template <int kEarly>
struct EarlyColumnValues {
  uint32_t first;  // as for ColumnValues
  float2 early[kEarly];
  static constexpr int kRepeat = ColumnValues::kRepeat;

  __device__ __forceinline__ void load(uint32_t address) {
    first = address;
#pragma unroll
    for (int n = 0; n < kEarly; ++n) early[n] = ColumnValues(first).of_tile(n);
  }
  __device__ __forceinline__ float2 of_tile(int n) const {
    return n < kEarly ? early[n] : ColumnValues(first).of_tile(n);
  }
};

// LSE or delta for a thread's scores where rows are queries: the values of its two rows.
struct RowValues {
  float2 values;

  static constexpr int kRepeat = 2;
  __device__ __forceinline__ float2 of_tile(int) const { return values; }
};

// Computes P = exp2(S scale - LSE) in place, with 0 for hidden keys; rows are keys. Values:
// ColumnValues or EarlyColumnValues.
template <class Config, class Values>
__device__ __forceinline__ void exponentiate(typename Scores<Config>::Registers& scores,
                                             float scale_log2, const Values& lse, const Mask& mask,
                                             int32_t first_key, int32_t first_query) {
#pragma unroll
  for (int n = 0; n < Scores<Config>::kMmaCols; ++n) {
    float2 const shift = lse.of_tile(n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const pair = &scores[4 * n + 2 * half];
      pair[0] = exp2_approx(pair[0] * scale_log2 - shift.x);
      pair[1] = exp2_approx(pair[1] * scale_log2 - shift.y);
    }
  }
  mask_transposed<Config>(mask, first_key, first_query,
                          [&](int n, int half, int e) { scores[4 * n + 2 * half + e] = 0.f; });
}

// Computes dS = P (dP - delta) in place of dP (`grads`), for one mma tile.
template <class Values>
__device__ __forceinline__ void differentiate_tile(const float* p, float* grads, float2 delta) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    grads[i] = p[i] * (grads[i] - (i / Values::kRepeat % 2 == 0 ? delta.x : delta.y));
  }
}

// Computes dS in place of dP (`grads`), for all mma tiles; rows are keys. Values: as above.
template <class Config, class Values>
__device__ __forceinline__ void differentiate_softmax(const typename Scores<Config>::Registers& p,
                                                      typename Scores<Config>::Registers& grads,
                                                      const Values& delta) {
#pragma unroll
  for (int n = 0; n < Scores<Config>::kMmaCols; ++n) {
    differentiate_tile<Values>(&p[4 * n], &grads[4 * n], delta.of_tile(n));
  }
}

// Stores a warpgroup's dS^T transposed, so that rows are queries. `to`: the column block of its 64
// keys.
template <class Config>
__device__ __forceinline__ void store_ds(uint32_t to,
                                         const typename Scores<Config>::Packed& packed) {
  uint32_t const thread = ptx::thread_index();
  uint32_t const lane = thread % 32, tile = lane / 8, row = lane % 8;
  uint32_t const unit = (thread / 32 % 4 * 2 + tile % 2) ^ row;  // eight keys of the row
  uint32_t const address = to + (tile / 2 * 8 + row) * 128 + unit * 16;
#pragma unroll
  for (int kk = 0; kk < Scores<Config>::kSteps; ++kk) {
    ptx::stmatrix_x4_trans(address + kk * 16 * 128, packed[kk]);
  }
}

// Converts a warpgroup's 64 rows of a gradient and stores them from row `first` of the sequence on.
// `rows`: those of the sequence in the tensor.
template <class Config, int kDim>
__device__ __forceinline__ void store_grad(const Tensor& tensor, uint32_t batch, uint32_t head,
                                           const Span& rows, const float (&grad)[kDim / 2],
                                           float scale, int32_t first, int32_t head_dim) {
  uint32_t const thread = ptx::thread_index() % 128;
  int const lane = thread % 32;
  uint16_t* const data = tensor.data + batch * tensor.batch_stride + head * tensor.head_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t const row = first + thread / 32 * 16 + half * 8 + lane / 4;
    uint16_t* const target = data + (rows.first + row) * tensor.seq_stride;
    store_row<typename Config::Dtype, kDim>(target, grad, half, scale, lane, row < rows.count,
                                            head_dim);
  }
}

}  // namespace flashvar::sm90::attention
