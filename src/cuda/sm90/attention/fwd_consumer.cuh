// FwdConsumer: registers and steps of a consumer warpgroup of the forward.
//
// Accumulators of m64nN: warp w holds rows 16 w to 16 w + 15. A thread holds rows lane / 4 and lane
// / 4 + 8 of these, and columns 2 (lane % 4) and 2 (lane % 4) + 1 of every eight.
#pragma once
#include <cstdint>
#include <type_traits>

#include "attention/dropout.cuh"
#include "attention/online_softmax.cuh"
#include "attention/score_modifiers.cuh"
#include "attention/sinks.cuh"
#include "core/math.cuh"
#include "core/quad.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/attention/bias_stage.cuh"
#include "sm90/attention/hide_scores.cuh"
#include "sm90/attention/lazy_softmax.cuh"
#include "sm90/attention/query_tile.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/gemm.cuh"

namespace flashvar::sm90::attention {

template <class Config>
struct FwdConsumer {
  using Dtype = typename Config::Dtype;
  // mma tiles of 8 columns in a row of scores, and of the output.
  static constexpr int kMmaCols = Config::kBlockKV / 8;
  static constexpr int kMmaColsV = Config::kHeadDimV / 8;
  float rS[4 * kMmaCols];        // S, then P
  uint32_t rP[kMmaCols / 2][4];  // P in 16 bits, operand A of P V
  float rO[4 * kMmaColsV];
  std::conditional_t<Config::kLazy, LazySoftmax<2>, OnlineSoftmax<2>> softmax;
  float factor[2];         // per row, by which rO is still to be rescaled
  BiasStage<Config> bias;  // kModifiers: the warp's

  explicit __device__ __forceinline__ FwdConsumer(BiasStage<Config> bias) : bias(bias) {
#pragma unroll
    for (float& x : rO) x = 0.f;
  }

  // Issues rS = Q K^T.
  __device__ __forceinline__ void gemm_qk(uint32_t sQ, uint32_t sK) {
    gemm_ss<Dtype, Config::kBlockKV, Config::kHeadDim / 16>(rS, KMajor<Config::kColBlockBytesQ>(sQ),
                                                            KMajor<Config::kColBlockBytesKV>(sK));
  }

  // Issues rO += P V.
  __device__ __forceinline__ void gemm_pv(uint32_t sV) {
    gemm_rs<Dtype, Config::kHeadDimV>(rO, rP, MnMajor<Config::kColBlockBytesKV>(sV));
  }

  // Starts to load the bias, if any, of the warpgroup's rows and the key block from first_key on.
  __device__ __forceinline__ void load_bias(const FwdProblem& problem,
                                            const QueryTile<Config>& tile, int32_t first_row,
                                            int32_t first_key) const {
    if (problem.modifiers.bias.data == nullptr) return;
    bias.load(problem, tile.batch, tile.head, first_row + threadIdx.x / 32 % 4 * 16, first_key);
  }

  // Computes P of key block n from S in rS, relative to the updated running maximum.
  template <bool kFirst>
  __device__ __forceinline__ void softmax_step(const FwdProblem& problem,
                                               const QueryTile<Config>& tile, uint32_t warpgroup,
                                               int32_t n) {
    finalize_scores(problem, tile, warpgroup, n);
    float const scale_log2 = scale_log2_of(problem);
    // Separate maxima and sums of even and odd columns: two dependency chains instead of one. ptxas
    // does not reassociate.
    float highest[4];
    column_maxima(highest);
    float shift[2], sum[4] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const block_max = fmaxf(highest[2 * r], highest[2 * r + 1]);
      factor[r] = softmax.advance(r, block_max, scale_log2, shift[r]);
    }
    exponentiate(scale_log2, shift, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) softmax.row_sum[r] += sum[2 * r] + sum[2 * r + 1];
    if constexpr (Config::kModifiers) {
      if (problem.modifiers.rng != nullptr) {
        apply_dropout(problem, tile, tile.first_query + warpgroup * 64, n * Config::kBlockKV);
      }
    }
    if constexpr (Config::kEarlyWait) pack();
    if constexpr (Config::kEarlyWait && !kFirst) rescale();
  }

  // Computes P relative to the running maximum of the previous blocks, where that suffices;
  // otherwise as softmax_step(). `sQ` and `sK`: the operands, from which the scores are recomputed
  // if P overflows.
  __device__ __forceinline__ void lazy_softmax_step(const FwdProblem& problem,
                                                    const QueryTile<Config>& tile,
                                                    uint32_t warpgroup, int32_t n, uint32_t sQ,
                                                    uint32_t sK) {
    if (__all_sync(0xffffffffu, softmax.has_running_max())) {
      finalize_scores(problem, tile, warpgroup, n);
      float sum[4] = {};
      exponentiate(problem.scale_log2, softmax.running_max, sum);
      if constexpr (Config::kEarlyWait) pack();
      float block_sum[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        block_sum[r] = sum[2 * r] + sum[2 * r + 1];
        factor[r] = 1.f;
      }
      bool const fits = block_sum[0] <= kMaxRowSum && block_sum[1] <= kMaxRowSum;
      if (__all_sync(0xffffffffu, fits)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) softmax.row_sum[r] += block_sum[r];
        return;
      }
      if (raise_running_max(block_sum)) return;
      recompute_scores(sQ, sK);
    }
    softmax_step<false>(problem, tile, warpgroup, n);
  }

  // Always 0: a false dependency on all of P, to be added to an mbarrier address. ptxas hoists the
  // wait for P V to the start of its basic block, before the softmax that should overlap with P V;
  // but it does not reorder shared-memory accesses, so an mbarrier address that depends on P keeps
  // the wait after the softmax. Not up to head dim 64, which is 1 % faster without: its GEMMs are
  // short, and packing P fills the latency of the exponentials.
  __device__ __forceinline__ uint32_t zero_after_softmax() const {
    if constexpr (Config::kHeadDim <= 64) return 0;
    return softmax.row_sum[0] + softmax.row_sum[1] < 0.f ? 1 : 0;
  }

  // Packs P into rP. Precondition: the wgmma that reads the previous P is complete.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int kk = 0; kk < kMmaCols / 2; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rP[kk][i] = Dtype::pack(rS[8 * kk + 2 * i], rS[8 * kk + 2 * i + 1]);
      }
    }
  }

  // Rescales rO to the current running maximum; skipped when every factor in the warp is 1 (the
  // common case).
  __device__ __forceinline__ void rescale() {
    if (!__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < 4 * kMmaColsV; ++i) rO[i] *= factor[i / 2 % 2];
  }

  // Stores the warpgroup's rows of the results of the call, or of a split. `shift_v`: V's
  // LineShift.
  __device__ __forceinline__ void store_results(const FwdProblem& problem,
                                                const QueryTile<Config>& tile, uint32_t warpgroup,
                                                int32_t shift_v) {
    if (Config::kSplits && (!Config::kStoresWhole || problem.splits.out != nullptr)) {
      store_split(problem, tile, warpgroup);
    } else {
      store_output(problem, tile, warpgroup, shift_v);
    }
  }

 private:
  // Normalizes the warpgroup's rows of the output and stores them and their LSE.
  __device__ __forceinline__ void store_output(const FwdProblem& problem,
                                               const QueryTile<Config>& tile, uint32_t warpgroup,
                                               int32_t shift_v) {
    // Special registers are read again here: hoisted addresses would take registers of the main
    // loop.
    int const thread = ptx::thread_index() % 128;
    int const lane = thread % 32;
    int64_t const gLSE = problem.lse_row(tile.batch, tile.head, tile.row_q);
    uint16_t* const gO = problem.out.data + tile.batch * problem.out.batch_stride +
                         tile.head * problem.out.head_stride + tile.row_q * problem.out.seq_stride;
    float const sink = sink_of(problem.sinks, tile.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const row =
          tile.first_query + warpgroup * 64 + thread / 32 * 16 + half * 8 + lane / 4;
      bool const exists = row < tile.mask.seqlen_q;
      float lse;
      float inverse = softmax.finish(half, scale_log2_of(problem), lse);
      add_sink(sink, lse, inverse);
      if constexpr (Config::kModifiers) inverse *= problem.modifiers.dropout_scale;
      if (problem.lse != nullptr && lane % 4 == 0 && exists) problem.lse[gLSE + row] = lse;
      uint16_t* const target = gO + row * problem.out.seq_stride;
      if constexpr (Config::kShiftsV) {
        if (exists) store_moved_row(target, half, inverse, problem.head_dim_v, shift_v);
      } else {
        store_row<Dtype, Config::kHeadDimV>(target, rO, half, inverse, lane, exists,
                                            problem.head_dim_v);
      }
    }
  }

  // Stores the thread's part of a row whose first column is column `shift` of rO.
  __device__ __forceinline__ void store_moved_row(uint16_t* row, int half, float scale,
                                                  int32_t columns, int32_t shift) const {
#pragma unroll
    for (int n = 0; n < kMmaColsV; ++n) {
      int32_t const column = n * 8 - shift;
      if (column < 0 || column >= columns) continue;
      *reinterpret_cast<uint32_t*>(row + column + ptx::thread_index() % 4 * 2) =
          Dtype::pack(rO[4 * n + 2 * half] * scale, rO[4 * n + 2 * half + 1] * scale);
    }
  }

  // As store_output(), for a split, whose results go to the workspace in fp32.
  __device__ __forceinline__ void store_split(const FwdProblem& problem,
                                              const QueryTile<Config>& tile, uint32_t warpgroup) {
    int const thread = ptx::thread_index() % 128;
    const KeySplits& splits = problem.splits;
    bool const varlen = problem.queries.offsets != nullptr;
    int64_t const head = varlen ? tile.head : int64_t{tile.batch} * problem.heads_q + tile.head;
    int64_t const rows = varlen ? problem.queries.total : problem.queries.seqlen;
    int64_t const first = (head * splits.count + tile.split) * rows + tile.row_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t const row =
          tile.first_query + warpgroup * 64 + thread / 32 * 16 + half * 8 + thread % 32 / 4;
      float lse;
      float const inverse = softmax.finish(half, problem.scale_log2, lse);
      if (tile.query(row) >= tile.mask.seqlen_q) continue;
      if (thread % 4 == 0) splits.lse[first + row] = lse;
      float* const to = splits.out + (first + row) * problem.head_dim_v + thread % 4 * 2;
#pragma unroll
      for (int n = 0; n < kMmaColsV; ++n) {
        if (n * 8 >= problem.head_dim_v) break;
        *reinterpret_cast<float2*>(to + n * 8) = {rO[4 * n + 2 * half] * inverse,
                                                  rO[4 * n + 2 * half + 1] * inverse};
      }
    }
  }

  // The factor of scores in exponents. Modified scores are already scaled, in natural-log units.
  static __device__ __forceinline__ float scale_log2_of(const FwdProblem& problem) {
    return Config::kModifiers && problem.modifiers.modifies_scores() ? kLog2E : problem.scale_log2;
  }

  // Applies modifiers, sign of the scale and mask to S.
  __device__ __forceinline__ void finalize_scores(const FwdProblem& problem,
                                                  const QueryTile<Config>& tile, uint32_t warpgroup,
                                                  int32_t n) {
    int32_t const first_row = tile.first_query + warpgroup * 64;
    int32_t const first_key = n * Config::kBlockKV;
    if (Config::kModifiers && problem.modifiers.modifies_scores()) {
      modify_scores(problem, tile, first_row, first_key);
    } else if (problem.score_sign != 1.f) {
#pragma unroll
      for (float& score : rS) score *= problem.score_sign;
    }
    if constexpr (Config::kSplits) {
      if (tile.mask.hides_any(tile.query(first_row), tile.query(first_row + 63), first_key,
                              first_key + Config::kBlockKV)) {
        apply_mask(tile, first_row, first_key);
      }
    } else if (tile.mask.hides_any(first_row, first_row + 63, first_key,
                                   first_key + Config::kBlockKV)) {
      apply_mask(tile, first_row, first_key);
    }
  }

  // Maxima of the thread's scores: [2 * row + column % 2].
  __device__ __forceinline__ void column_maxima(float (&highest)[4]) const {
#pragma unroll
    for (float& x : highest) x = -infinity();
#pragma unroll
    for (int i = 0; i < 4 * kMmaCols; ++i) highest[i % 4] = fmaxf(highest[i % 4], rS[i]);
  }

  // Computes P = exp2(S scale_log2 - shift) in rS, and adds it to `sum`: [2 * row + column % 2].
  __device__ __forceinline__ void exponentiate(float scale_log2, const float (&shift)[2],
                                               float (&sum)[4]) {
#pragma unroll
    for (int i = 0; i < 4 * kMmaCols; ++i) {
      rS[i] = exp2_approx(rS[i] * scale_log2 - shift[i / 2 % 2]);
      sum[i % 4] += rS[i];
    }
  }

  // Raises the running maximum of rows whose sum of P exceeds kMaxRowSum, and rescales P; other
  // rows stay bitwise unchanged. Returns false, with nothing changed, where P overflowed.
  __device__ __forceinline__ bool raise_running_max(const float (&block_sum)[2]) {
    float highest[4], top[2];
    column_maxima(highest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bool const moves = quad_max(block_sum[r]) > kMaxRowSum;
      top[r] = quad_max(fmaxf(highest[2 * r], highest[2 * r + 1]));
      if (!moves) top[r] = 1.f;
    }
    if (__any_sync(0xffffffffu, fmaxf(top[0], top[1]) > kOverflow)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = softmax.raise(r, top[r]);
      softmax.row_sum[r] += block_sum[r] * factor[r];
    }
#pragma unroll
    for (int i = 0; i < 4 * kMmaCols; ++i) rS[i] *= factor[i / 2 % 2];
    if constexpr (Config::kEarlyWait) {
      pack();
      rescale();
    }
    return true;
  }

  // Computes rS = Q K^T again, each warp by itself with mma.sync: wgmma needs all four warps.
  __device__ __forceinline__ void recompute_scores(uint32_t sQ, uint32_t sK) {
    int const lane = ptx::thread_index() % 32;
    uint32_t const q = sQ + (ptx::thread_index() / 32 % 4 * 16 + lane % 16) * 128;
    uint32_t const k = sK + (lane % 8 + lane / 16 * 8) * 128;
#pragma unroll
    for (float& score : rS) score = 0.f;
#pragma unroll 1
    for (int kk = 0; kk < Config::kHeadDim / 16; ++kk) {
      // Swizzled offsets of 16-byte units in a row.
      uint32_t const offset_q = ((kk % 4 * 2 + lane / 16) ^ (lane % 8)) * 16;
      uint32_t const offset_k = ((kk % 4 * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
      uint32_t a[4];
      ptx::ldmatrix_x4(a, q + kk / 4 * Config::kColBlockBytesQ + offset_q);
#pragma unroll
      for (int c = 0; c < kMmaCols; c += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k + kk / 4 * Config::kColBlockBytesKV + c * 8 * 128 + offset_k);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float (&tile)[4] = *reinterpret_cast<float (*)[4]>(&rS[4 * (c + i)]);
          ptx::mma_m16n8k16<Dtype>(tile, a, b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }

  // The thread's first row within the warpgroup's 64.
  static __device__ __forceinline__ int row_in_warpgroup() {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  // Sets scores of hidden keys to -inf.
  __device__ __forceinline__ void apply_mask(const QueryTile<Config>& tile, int32_t first_row,
                                             int32_t first_key) {
    if (tile.mask.left == kUnbounded) {
      apply_mask<false>(tile, first_row, first_key);
    } else {
      apply_mask<true>(tile, first_row, first_key);
    }
  }

  template <bool kLeft>
  __device__ __forceinline__ void apply_mask(const QueryTile<Config>& tile, int32_t first_row,
                                             int32_t first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t query = first_row + row_in_warpgroup() + half * 8;
      if constexpr (Config::kSplits) query = tile.query(query);
      int32_t const first_column = first_key + threadIdx.x % 4 * 2;
      int32_t const begin = kLeft ? tile.mask.key_begin(query) - first_column : INT32_MIN;
      hide_scores<kMmaCols>(
          half, begin, tile.mask.key_end(query) - first_column,
          [&](int n, int half, int e) { rS[4 * n + 2 * half + e] = -infinity(); });
    }
  }

  // Applies scale, softcap, ALiBi and bias: from q . k to scores in natural-log units. Starts to
  // load the bias of the next key block, the one before.
  __device__ __forceinline__ void modify_scores(const FwdProblem& problem,
                                                const QueryTile<Config>& tile, int32_t first_row,
                                                int32_t first_key) {
    const ScoreModifiers& modifiers = problem.modifiers;
    int32_t const row = first_row + row_in_warpgroup();
    int32_t const key = first_key + threadIdx.x % 4 * 2;
    float scale = modifiers.scale;  // factor that the scores still lack; 1 once it is applied
    if (modifiers.softcap != 0.f) {
      Softcap const softcap(modifiers, scale);
#pragma unroll
      for (float& score : rS) score = softcap(score);
      scale = 1.f;
    }
    if (modifiers.alibi_slopes != nullptr) {
      Alibi const alibi(problem, tile.batch, tile.head, tile.mask.seqlen_q, tile.mask.seqlen_k);
      float const distance = alibi.distance(row, key);
#pragma unroll
      for (int i = 0; i < 4 * kMmaCols; ++i) {
        float const bias = alibi(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2));
        rS[i] = rS[i] * scale + bias;
      }
      scale = 1.f;
    }
    if (modifiers.bias.data != nullptr) {
      bias.wait();
      if (modifiers.bias_is_fp32) {
        add_bias<true>(scale);
      } else {
        add_bias<false>(scale);
      }
      if (first_key > tile.begin * Config::kBlockKV) {
        load_bias(problem, tile, first_row, first_key - Config::kBlockKV);
      }
    }
  }

  template <bool kIsFp32>
  __device__ __forceinline__ void add_bias(float scale) {
#pragma unroll
    for (int kk = 0; kk < kMmaCols / 2; ++kk) {
      float added[8];
      bias.template read<false>(kk, threadIdx.x % 32, kIsFp32, added);
#pragma unroll
      for (int i = 0; i < 8; ++i) rS[8 * kk + i] = rS[8 * kk + i] * scale + added[i];
    }
  }

  // Zeros the dropped elements of P, after the row sums were taken: dropout applies to the
  // normalized P. store_output() applies dropout_scale.
  __device__ __forceinline__ void apply_dropout(const FwdProblem& problem,
                                                const QueryTile<Config>& tile, int32_t first_row,
                                                int32_t first_key) {
    DropoutRng const rng(problem.modifiers.rng, tile.batch * problem.heads_q + tile.head);
    int32_t const row = first_row + row_in_warpgroup();
    int32_t const key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int c = 0; c < kMmaCols; c += 2) {
      DropoutBits const bits = rng.draw(row, key + 8 * c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bool const kept = bits.keeps(i / 2 % 2, i % 2, i / 4, problem.modifiers.dropout_threshold);
        if (!kept) rS[4 * c + i] = 0.f;
      }
    }
  }
};

}  // namespace flashvar::sm90::attention
