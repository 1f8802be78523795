// The third kernel of the backward, rows_kernel, with wgmma and TMA: dQ and dK of all chunks in
// parallel. Persistent blocks: an item is a chunk of one head of q and k, summed over the heads of
// v that share the head, in their order. Loads of the next item overlap with the computation of
// one.
//
// For each head of v first come the products with what the chains wrote, in slots of 64 columns of
// V: E = dV R^T, F = dOut R^T, and those with S and dS. From E and F follow dQK and dKK, the
// gradients of Q K^T and K K^T:
//   dQ = c o (dOut S^T) + dQK K
//   dK = -a o (dV S^T) + beta b o (R dS^T) + dQK^T Q + (dKK + dKK^T) K
// Two warps load, two compute the sum of S o dS, two warpgroups do the rest.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "core/vec.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp_uniform.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/gated_delta_rule/grad_products.cuh"
#include "sm90/gated_delta_rule/grad_rows_loads.cuh"
#include "sm90/gemm.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::gated_delta_rule {

// Named barriers: of the two warpgroups that compute dQ and dK, and of the two warps in
// sum_states().
inline constexpr uint32_t kRowsBarrier = 1, kStatesBarrier = 2;

// Computes the sum of the elements of S o dS, for each head. Two warps, each with half of the
// elements.
template <class Config>
__device__ __forceinline__ void sum_states(const RowsArgs& args, const RowsSmem<Config>& smem,
                                           uint32_t half) {
  constexpr int kHalf = Config::Tile::kBytes / 2;
  const BwdProblem& problem = args.problem;
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  float (&other)[2] = smem.sums().states;
  uint32_t heads = 0;
  SlotState<Config> slot;
  ItemQueue<Config> items{smem, {}};
  for (RowsItem item; items.next(item);) {
    for (int32_t i = 0; i < problem.group; ++i, ++heads) {
      float sum = 0.f;
      for (int32_t tile = 0; tile < args.workspace.tiles; ++tile, slot.advance()) {
        BarrierPair const barrier = smem.slot_barriers(slot.stage());
        ptx::mbarrier_wait(barrier.full, slot.phase());  // the slot is loaded
        const unsigned char* const mine = smem.start + Config::kSlots +
                                          slot.stage() * Config::kSlotBytes + half * kHalf +
                                          lane_id * 16;
#pragma unroll 2
        for (int at = 0; at < kHalf; at += 32 * 16) {
          sum = add_products_of<typename Config::Dtype>(
              *reinterpret_cast<const uint4*>(mine + Config::kState + at),
              *reinterpret_cast<const uint4*>(mine + Config::kGradState + at), sum);
        }
        warp_arrive(barrier.empty());
      }
      sum = warp_sum(sum);
      if (half == 1 && lane_id == 0) other[heads % 2] = sum;
      // The second half's sum is written. It is not overwritten before the head after the next.
      ptx::named_barrier_sync(kStatesBarrier, 64);
      if (half == 0 && lane_id == 0) {
        args.workspace.sums[item.record(problem, i)].states = sum + other[heads % 2];
      }
    }
  }
}

// The accumulators of a warpgroup for an item, its half of the columns of dQ and dK, and the steps
// that add to them.
template <class Config>
struct RowGradients {
  const RowsArgs& args;
  const RowsSmem<Config>& smem;
  uint32_t warpgroup;
  float dq[Config::kColumns / 2], dk[Config::kColumns / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Config::kColumns / 2; ++i) dq[i] = dk[i] = 0.f;
  }

  __device__ __forceinline__ uint32_t tile_q() const { return smem.base; }
  __device__ __forceinline__ uint32_t tile_k() const { return smem.base + Config::kK; }

  // Barrier of both warpgroups.
  static __device__ __forceinline__ void sync_warpgroups() {
    ptx::named_barrier_sync(kRowsBarrier, 256);
  }

  // Computes the products of a head with its slots.
  __device__ __forceinline__ void multiply_slots(SlotProducts<Config>& products,
                                                 SlotState<Config>& slot) const {
    BarrierPair last = smem.slot_barriers(slot.stage());
    ptx::mbarrier_wait(last.full, slot.phase());  // the slot is loaded
    products.template start<false>(smem.slot(slot.stage()), warpgroup);
    slot.advance();
    for (int32_t tile = 1; tile < args.workspace.tiles; ++tile, slot.advance()) {
      BarrierPair const barrier = smem.slot_barriers(slot.stage());
      ptx::mbarrier_wait(barrier.full, slot.phase());  // the slot is loaded
      products.template start<true>(smem.slot(slot.stage()), warpgroup);
      ptx::wgmma_wait<1>();
      warp_arrive(last.empty());
      last = barrier;
    }
    ptx::wgmma_wait<0>();
    products.fence();
    warp_arrive(last.empty());
  }

  // Adds the contribution of a head of v.
  __device__ __forceinline__ void add_head(const RecordVectors& vectors, uint32_t vectors_full,
                                           uint32_t vectors_phase, uint32_t tiles_phase,
                                           SlotState<Config>& slot, GateSums& to) {
    using Dtype = typename Config::Dtype;
    Lane const lane;
    int const row = 16 * lane.warp + lane.g;
    SlotProducts<Config> products;
    multiply_slots(products, slot);
    ptx::mbarrier_wait(smem.tiles_barriers().full, tiles_phase);  // Q and K are loaded
    ptx::mbarrier_wait(vectors_full, vectors_phase);              // the vectors are loaded
    float const factors_q[2] = {vectors.c[row], vectors.c[row + 8]};
    float const factors_k[2] = {-vectors.a[row], -vectors.a[row + 8]};
    float const factors_later[2] = {vectors.b[row] * vectors.beta[row],
                                    vectors.b[row + 8] * vectors.beta[row + 8]};
    // Of a row each: q . (S dout) and k . (S dv), the gradients of c and of -a.
    float2 const dot_q = row_products<Config>(products.q, tile_q(), warpgroup);
    add_scaled(dq, products.q, factors_q);
    float2 const dot_k = row_products<Config>(products.k, tile_k(), warpgroup);
    add_scaled(dk, products.k, factors_k);
    // These are complete before the next product overwrites the registers of products.q.
    ptx::wgmma_fence_operand(dq);
    ptx::wgmma_fence_operand(dk);
    float (&product)[32] = products.after_q();
    ptx::wgmma_fence_operand(product);
    ptx::wgmma_fence();
    multiply<Dtype, kChunk, false, Config::kDim / 16>(
        product, ColumnsAsK(tile_q() + warpgroup * Config::kK), ColumnsAsK(tile_k()));
    ptx::wgmma_commit();
    float2 const later = row_products<Config>(products.later, tile_k(), warpgroup);
    add_scaled(dk, products.later, factors_later);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(product);

    float gates[2] = {}, columns[16];
    finish_square(products.square, product, warpgroup, args.problem.scale, vectors, gates, columns);
    gates[0] = quad_sum(gates[0]) + factors_q[0] * dot_q.x + factors_k[0] * dot_k.x;
    gates[1] = quad_sum(gates[1]) + factors_q[1] * dot_q.y + factors_k[1] * dot_k.y;
    float2 const column_sums = add_columns(columns);
    sync_warpgroups();  // both warpgroups have read the last head's squares and sums
    put_square<Dtype>(smem.base + Config::kSquares + warpgroup * kTile64Bytes, products.square);
    GateSumsByWarp& sums = smem.sums();
    if (lane.t == 0) {
      sums.gates[warpgroup][row] = gates[0];
      sums.gates[warpgroup][row + 8] = gates[1];
      sums.later[warpgroup][row] = later.x;
      sums.later[warpgroup][row + 8] = later.y;
    }
    *reinterpret_cast<float2*>(sums.columns[4 * warpgroup + lane.warp] + 8 * lane.g + 2 * lane.t) =
        column_sums;
    sync_warpgroups();  // both have written squares and sums
    add_square_products<Config>(dq, dk, smem.base, smem.base + Config::kSquares, warpgroup);
    if (warpgroup == 0) write_sums(to);
  }

  // Adds up the partial sums of both warpgroups; called by the first.
  __device__ __forceinline__ void write_sums(GateSums& to) const {
    const GateSumsByWarp& sums = smem.sums();
    int const token = static_cast<int>(threadIdx.x) % 128;
    if (token >= kChunk) return;
    to.gates[token] = sums.gates[0][token] + sums.gates[1][token];
    to.later[token] = sums.later[0][token] + sums.later[1][token];
    float columns = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) columns += sums.columns[i][token];
    to.columns[token] = columns;
  }

  // Gradient of the normalization of rows of q and k (project).
  __device__ __forceinline__ void project_rows(const RecordVectors& vectors) {
    Lane const lane;
    int const row = 16 * lane.warp + lane.g;
    float2 const along_q = row_products<Config>(dq, tile_q(), warpgroup);
    float2 const along_k = row_products<Config>(dk, tile_k(), warpgroup);
    GateSumsByWarp& sums = smem.sums();
    sync_warpgroups();  // write_sums() has read the last head's sums
    if (lane.t == 0) {
      sums.gates[warpgroup][row] = along_q.x;
      sums.gates[warpgroup][row + 8] = along_q.y;
      sums.later[warpgroup][row] = along_k.x;
      sums.later[warpgroup][row + 8] = along_k.y;
    }
    sync_warpgroups();  // the sums of both halves are written
    project<Config>(dq, tile_q(), warpgroup, vectors.norm_q, sums.gates);
    project<Config>(dk, tile_k(), warpgroup, vectors.norm_k, sums.later);
  }

  __device__ __forceinline__ void store(const RowsItem& item) const {
    const BwdProblem& problem = args.problem;
    Lane const lane;
    int const column = static_cast<int>(warpgroup) * Config::kColumns;
    auto const put = [&](const Tensor& to, const float (&d)[Config::kColumns / 2]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int32_t const row = 16 * lane.warp + lane.g + 8 * half;
        uint16_t* const mine = to.data + item.batch * to.batch_stride +
                               (int64_t{item.begin} + item.first + row) * to.seq_stride +
                               item.head_qk * to.head_stride + column;
        store_row<typename Config::Dtype, Config::kColumns>(
            mine, d, half, 1.f, static_cast<int>(threadIdx.x) % 32, row < item.count(),
            problem.head_dim - column);
      }
    };
    put(problem.grad_q, dq);
    put(problem.grad_k, dk);
  }
};

// Computes dQ and dK of the block's items; two warpgroups.
template <class Config>
__device__ __forceinline__ void make_rows(const RowsArgs& args, const RowsSmem<Config>& smem,
                                          uint32_t warpgroup) {
  const BwdProblem& problem = args.problem;
  RowGradients<Config> rows{args, smem, warpgroup};
  SlotState<Config> slot;
  PipelineState<2> vectors;
  PipelineState<1> tiles;
  ItemQueue<Config> items{smem, {}};
  for (RowsItem item; items.next(item); tiles.advance()) {
    rows.clear();
    for (int32_t i = 0; i < problem.group; ++i, vectors.advance()) {
      BarrierPair const barrier = smem.vectors_barriers(vectors.stage());
      const RecordVectors& head_vectors = smem.vectors(vectors.stage());
      rows.add_head(head_vectors, barrier.full, vectors.phase(), tiles.phase(), slot,
                    args.workspace.sums[item.record(problem, i)]);
      bool const last = i + 1 == problem.group;
      if (last && problem.qk_l2norm) rows.project_rows(head_vectors);
      warp_arrive(barrier.empty());
      if (last) warp_arrive(smem.tiles_barriers().empty());
    }
    rows.store(item);
  }
}

// Grid: a block per multiprocessor, or per item if these are fewer.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    rows_kernel(const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  RowsSmem<Config> const smem(shared);
  if (threadIdx.x == 0) smem.init();
  if (col_blocks_of(args.problem.head_dim) < Config::kColBlocks) {
    zero_shared(smem.base, Config::kSlots);
  }
  __syncthreads();  // mbarriers are initialized, column blocks that are never loaded are zeroed
  uint32_t const warp = ptx::warp_uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kLoadRegisters>();
    if (warp == 0) {
      load_slots(args, smem);
    } else if (warp == 1) {
      load_items(args, smem);
    } else {
      sum_states(args, smem, warp - 2);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kRegisters>();
    make_rows(args, smem, warp / 4 - 1);
  }
}

}  // namespace flashvar::sm90::gated_delta_rule
