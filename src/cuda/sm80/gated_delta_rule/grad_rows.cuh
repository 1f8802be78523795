// The fourth kernel of the backward, rows_kernel: dQ and dK of all chunks in parallel. A block
// takes a chunk of one head of q and k, and sums over the heads of v that share the head, in their
// order. Careful chunks have a kernel of their own, whose blocks search for them.
//
// A warp has 16 tokens and a quarter of the columns of dQ and dK. First the block computes the
// squares E = dV R^T and F = dOut R^T and from them dQK and dKK, the gradients of Q K^T and K K^T;
// then the products with S and dS:
//   dQ = c o (dOut S^T) + dQK K
//   dK = -a o (dV S^T) + beta b o (R dS^T) + dQK^T Q + (dKK + dKK^T) K
// Head dims above 128 are computed in parts of their columns, one after the other: all sums over
// columns are sums over parts.
#pragma once
#include <cstdint>

#include "ptx/grid_dependency.cuh"
#include "sm80/gated_delta_rule/grad_chain_parts.cuh"
#include "sm80/gated_delta_rule/grad_gates.cuh"
#include "sm80/gated_delta_rule/grad_products.cuh"
#include "sm80/gated_delta_rule/grad_rows_loads.cuh"

namespace flashvar::sm80::gated_delta_rule {

// A head of v of the group, and the index of its record.
struct GroupHead {
  uint32_t head;
  int64_t record;
};

// Computes E and F of a head, over all of its columns of V. In careful chunks as three products: of
// the high parts, with the low part of R, and with the low part of dV.
template <class Config>
__device__ __forceinline__ void compute_squares(Squares& e, Squares& f,
                                                const RowsLoads<Config>& loads,
                                                const GroupHead& head, const RecordVectors& vectors,
                                                bool resident) {
  int32_t const tiles = loads.args.workspace.tiles;
  e.clear();
  f.clear();
  for (int32_t tile = 0; tile < tiles; ++tile) {
    unsigned char* const slot = loads.slot(tile);
    int products = 1;
    for (int product = 0; product < products; ++product) {
      bool const low_values = product == 2, low_residuals = product == 1;
      if (!resident || product > 0) {
        if (tile + product > 0) __syncthreads();  // all warps have read the slot
        loads.values(slot, head.head, head.record, tile, low_values, low_residuals);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
      } else if (tile == 0 && tiles == 2) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncthreads();  // the slot and the vectors are loaded
      add_squares<typename Config::Dtype, Config>(e, f, ptx::smem_address(slot), product < 2);
      if (Config::kCareful && vectors.growth > kCarefulGrowth) products = 3;
    }
  }
}

// Adds up the lanes' sums over columns of a square, over the warp's 16 rows, and writes them.
__device__ __forceinline__ void write_column_sums(float (&to)[4][kChunk], float (&columns)[4],
                                                  const Lane& lane, const WarpTile& warp_tile) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      columns[n] += __shfl_xor_sync(0xffffffffu, columns[n], step);
    }
    if (lane.g == 0) {
      to[warp_tile.strip][16 * warp_tile.quarter + n / 2 * 8 + 2 * lane.t + n % 2] = columns[n];
    }
  }
}

template <class Config>
using RowsAccumulator = Accumulator<16, Config::kColumns>;

// Adds the products of the squares to dQ and dK, with squares rounded to 16 bits; in careful chunks
// those of their low parts as well.
template <class Config>
__device__ __forceinline__ void add_rounded_squares(RowsAccumulator<Config>& dq,
                                                    RowsAccumulator<Config>& dk, Squares& dqk,
                                                    Squares& dkk, uint32_t tiles, bool careful) {
  using Dtype = typename Config::Dtype;
  for (int n = 0; n < (careful ? 2 : 1); ++n) {
    __syncthreads();  // all warps have read what the squares overwrite
    store_square<Dtype>(dqk, tiles + Config::kSquares);
    store_square<Dtype>(dkk, tiles + Config::kSquares + kTile64Bytes);
    __syncthreads();  // all warps have written the squares
    add_square_products<Config>(dq, dk, tiles);
  }
}

// Starts the loads of one head and tile, as one cp.async group: the vectors, and what is loaded
// ahead where all of a head's tiles have slots (`resident`). Empty past the last head.
template <class Config>
__device__ __forceinline__ void start_head(const RowsLoads<Config>& loads, const RowsItem& item,
                                           int32_t i, int32_t tile, bool resident) {
  const BwdProblem& problem = loads.args.problem;
  if (i < problem.group) {
    GroupHead const head{item.head(problem, i), item.record(problem, i)};
    if (tile == 0) loads.start_vectors(i, head.record);
    if (resident) {
      loads.values(loads.slot(tile), head.head, head.record, tile, false, false);
      loads.states(loads.slot(tile), head.record, tile);
    }
  }
  ptx::cp_async_commit();
}

// Computes the products of head i with S and dS, over all of its columns of V; in careful chunks
// those of the low parts of dV and R as well. Returns the thread's part of the sum of S o dS.
// Starts the loads of the next head.
template <class Config>
__device__ __forceinline__ float multiply_states(StateProducts<Config>& products,
                                                 const RowsLoads<Config>& loads,
                                                 const RowsItem& item, const GroupHead& head,
                                                 int32_t i, bool careful, bool resident) {
  products.clear();
  float states = 0.f;
  for (int32_t tile = 0; tile < loads.args.workspace.tiles; ++tile) {
    unsigned char* const slot = loads.slot(tile);
    for (int n = 0; n < (careful ? 2 : 1); ++n) {
      if (!resident || n == 1) {
        __syncthreads();  // all warps have read the slot, or the squares in it
        loads.values(slot, head.head, head.record, tile, n == 1, n == 1);
        if (!resident && n == 0) loads.states(slot, head.record, tile);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();  // the slot is loaded
      }
      products.add(ptx::smem_address(slot), n == 0);
      if (n == 0) states += state_products<Config>(slot);
    }
    if (resident) {
      __syncthreads();  // all warps have read the slot
      start_head(loads, item, i + 1, tile, resident);
    }
  }
  if (!resident) start_head(loads, item, i + 1, 0, resident);
  return states;
}

// Computes dQ and dK of an item, or of a part of their columns, by a block; before the gradient of
// the normalization. The steps that make dQK and dKK are written out: as a function they spill more
// registers.
template <class Config>
__device__ __forceinline__ void add_heads(RowsAccumulator<Config>& dq, RowsAccumulator<Config>& dk,
                                          const RowsLoads<Config>& loads, const RowsItem& item) {
  const BwdProblem& problem = loads.args.problem;
  const GradWorkspace& workspace = loads.args.workspace;
  unsigned char* const shared = loads.shared;
  bool const resident = workspace.tiles <= Config::kSlotCount && Config::kSlotCount > 1;
  loads.rows(problem.q, item.head_qk, 0);
  loads.rows(problem.k, item.head_qk, Config::kK);
  for (int32_t tile = 0; tile < (resident ? workspace.tiles : 1); ++tile) {
    start_head(loads, item, 0, tile, resident);
  }

  uint32_t const tile_q = ptx::smem_address(shared), tile_k = tile_q + Config::kK;
  auto& sums = *reinterpret_cast<GateSumsByWarp*>(shared + Config::kGates);
  Lane const lane;
  WarpTile const warp_tile;
  int const row = 16 * warp_tile.strip + lane.g;
  dq.clear();
  dk.clear();
  for (int32_t i = 0; i < problem.group; ++i) {
    GroupHead const head{item.head(problem, i), item.record(problem, i)};
    const RecordVectors& vectors = *loads.vectors(i);
    float2 gates{};
    bool careful;
    {
      Squares e, f, product;  // e and f become dKK and dQK
      compute_squares(e, f, loads, head, vectors, resident);
      careful = Config::kCareful && vectors.growth > kCarefulGrowth;
      float columns[4] = {};
      multiply_keys<Config>(product, tile_q, tile_k);
      finish_square<false>(f, product, problem.scale, vectors, gates, columns);
      multiply_keys<Config>(product, tile_k, tile_k);
      finish_square<true>(e, product, problem.scale, vectors, gates, columns);
      write_column_sums(sums.columns, columns, lane, warp_tile);
      add_rounded_squares<Config>(dq, dk, f, e, tile_q, careful);
    }
    StateProducts<Config> products;
    float states = multiply_states(products, loads, item, head, i, careful, resident);

    float const factors_q[2] = {vectors.c[row], vectors.c[row + 8]};
    float const factors_k[2] = {-vectors.a[row], -vectors.a[row + 8]};
    float2 const later = row_products<Config>(products.later, tile_k);
    // Of a row each: q . (S dout) and k . (S dv), the gradients of c and of -a.
    float2 const dot_q = row_products<Config>(products.q, tile_q);
    float2 const dot_k = row_products<Config>(products.k, tile_k);
    gates.x += factors_q[0] * dot_q.x + factors_k[0] * dot_k.x;
    gates.y += factors_q[1] * dot_q.y + factors_k[1] * dot_k.y;
    add_scaled(dq, products.q, factors_q);
    add_scaled(dk, products.k, factors_k);
    add_scaled(dk, products.later,
               {vectors.b[row] * vectors.beta[row], vectors.b[row + 8] * vectors.beta[row + 8]});
    write_row_sums(sums.gates[warp_tile.quarter], gates);
    write_row_sums(sums.later[warp_tile.quarter], later);
    states = warp_sum(states);
    if (threadIdx.x % 32 == 0) sums.states[threadIdx.x / 32] = states;
    __syncthreads();  // all warps have written their sums
    write_sums(sums, workspace.sums[head.record], loads.part > 0);
  }
}

// Stores dQ and dK, or a part of their columns.
template <class Config>
__device__ __forceinline__ void store_both(const RowsAccumulator<Config>& dq,
                                           const RowsAccumulator<Config>& dk,
                                           const RowsLoads<Config>& loads, uint32_t head_qk) {
  const BwdProblem& problem = loads.args.problem;
  int const column = loads.part * Config::kDim;
  auto const put = [&](const RowsAccumulator<Config>& d, const Tensor& to) {
    store_rows<Config>(d, loads.coordinate.address(to, head_qk) + column, to.seq_stride,
                       loads.coordinate.count, problem.head_dim - column);
  };
  put(dq, problem.grad_q);
  put(dk, problem.grad_k);
}

// make_rows() in parts. The gradient of the normalization needs sums over all columns: until then
// the block's dQ and dK are in the workspace, in fp32.
template <class Config>
__device__ __forceinline__ void make_parts(RowsLoads<Config>& loads, const RowsItem& item) {
  const BwdProblem& problem = loads.args.problem;
  uint32_t const tile_q = ptx::smem_address(loads.shared), tile_k = tile_q + Config::kK;
  auto& sums = *reinterpret_cast<GateSumsByWarp*>(loads.shared + Config::kGates);
  int const quarter = WarpTile().quarter, row = 16 * WarpTile().strip + Lane().g;
  // [block][part][dQ, dK][n][thread], after the sums of all chunks and heads.
  GateSums* const end = loads.args.workspace.sums + int64_t{loads.args.items} * problem.group;
  float4* const kept = reinterpret_cast<float4*>(end) + threadIdx.x +
                       blockIdx.x * (Config::kParts * 2 * Config::kKept * Config::kThreads);
  auto const for_each_kept = [&](RowsAccumulator<Config>& d, int which, auto f) {
#pragma unroll
    for (int n = 0; n < Config::kKept; ++n) {
      f(reinterpret_cast<float4&>(d.tile[0][n]),
        kept[((2 * loads.part + which) * Config::kKept + n) * Config::kThreads]);
    }
  };
  RowsAccumulator<Config> dq, dk;
  float along_q[2] = {}, along_k[2] = {};  // q dq and k dk
#pragma unroll 1
  for (loads.part = 0; loads.part < Config::kParts; ++loads.part) {
    __syncthreads();  // all warps have read the last part's tiles and sums
    add_heads<Config>(dq, dk, loads, item);
    if (!problem.qk_l2norm) {
      store_both(dq, dk, loads, item.head_qk);
      continue;
    }
    __syncthreads();  // write_sums() has read the sums
    write_row_sums(sums.gates[quarter], row_products<Config>(dq, tile_q));
    write_row_sums(sums.later[quarter], row_products<Config>(dk, tile_k));
    auto const put = [](const float4& from, float4& to) { to = from; };
    for_each_kept(dq, 0, put);
    for_each_kept(dk, 1, put);
    __syncthreads();  // the warps of all quarters have written their sums
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      along_q[half] += sum_of(sums.gates, row + 8 * half);
      along_k[half] += sum_of(sums.later, row + 8 * half);
    }
  }
  if (!problem.qk_l2norm) return;
  const RecordVectors& vectors = *loads.vectors(problem.group - 1);
#pragma unroll 1
  for (loads.part = 0; loads.part < Config::kParts; ++loads.part) {
    __syncthreads();  // all warps have read the last part's tiles
    loads.rows(problem.q, item.head_qk, 0);
    loads.rows(problem.k, item.head_qk, Config::kK);
    ptx::cp_async_commit();
    auto const get = [](float4& to, const float4& from) { to = from; };
    for_each_kept(dq, 0, get);
    for_each_kept(dk, 1, get);
    ptx::cp_async_wait<0>();
    __syncthreads();  // the tiles are loaded
    subtract_along<Config>(dq, tile_q, vectors.norm_q, along_q);
    subtract_along<Config>(dk, tile_k, vectors.norm_k, along_k);
    store_both(dq, dk, loads, item.head_qk);
  }
}

// dQ and dK of an item, by a block.
template <class Config>
__device__ __forceinline__ void make_rows(const RowsArgs& args, const RowsItem& item,
                                          unsigned char* shared) {
  const BwdProblem& problem = args.problem;
  uint32_t const head_qk = item.head_qk;
  ChunkCoordinate const coordinate(item.batch, int64_t{item.begin} + item.first, item.count());
  RowsLoads<Config> loads{args, coordinate, shared, 0};
  if constexpr (Config::kParts > 1) return make_parts(loads, item);
  RowsAccumulator<Config> dq, dk;
  add_heads<Config>(dq, dk, loads, item);
  uint32_t const tiles = ptx::smem_address(shared);
  auto& sums = *reinterpret_cast<GateSumsByWarp*>(shared + Config::kGates);
  if (problem.qk_l2norm) {
    const RecordVectors& vectors = *loads.vectors(problem.group - 1);
    __syncthreads();  // write_sums() has read the sums, which project() overwrites
    project<Config>(dq, tiles, vectors.norm_q, sums.gates);
    project<Config>(dk, tiles + Config::kK, vectors.norm_k, sums.later);
  }
  store_both(dq, dk, loads, head_qk);
}

// make_rows() as a function call: inlined into a loop over items it would keep addresses in
// registers, and spill. A function that is not inlined cannot refer to kernel arguments, so they
// are copied to shared memory.
template <class Config>
__device__ __noinline__ void call_make_rows(uint32_t item) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto const& args = *reinterpret_cast<const RowsArgs*>(shared + Config::kArgs);
  make_rows<Config>(args, RowsItem(args.problem, item), shared);
}

// Copies the arguments for call_make_rows().
template <class Config>
__device__ __forceinline__ void share_args(const RowsArgs& args, unsigned char* shared) {
  for (uint32_t i = threadIdx.x; i < sizeof(RowsArgs) / sizeof(uint32_t); i += Config::kThreads) {
    reinterpret_cast<uint32_t*>(shared + Config::kArgs)[i] =
        reinterpret_cast<const uint32_t*>(&args)[i];
  }
}

// Grid: items; in parts, persistent blocks, each with memory of its own in the workspace.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    rows_kernel(const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if constexpr (Config::kParts == 1) {
    RowsItem const item(args.problem, blockIdx.x);
    if (item.count() <= 0) return;  // a surplus chunk
    ptx::griddepcontrol_wait();     // the chains are complete
    if (!item.careful(args.problem, args.workspace)) make_rows<Config>(args, item, shared);
  } else {
    share_args<Config>(args, shared);
    ptx::griddepcontrol_wait();  // the chains are complete
    __syncthreads();             // the arguments are written
#pragma unroll 1
    for (uint32_t i = blockIdx.x; i < args.items; i += gridDim.x) {
      RowsItem const item(args.problem, i);
      if (item.count() <= 0 || item.careful(args.problem, args.workspace)) continue;
      call_make_rows<Config>(i);
    }
  }
}

// The same for careful items, which are few if any. Persistent blocks: each warp examines another
// item, then the block computes those that are careful.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    careful_rows_kernel(const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr uint32_t kWarps = Config::kThreads / 32;
  auto* const careful = reinterpret_cast<bool*>(shared + Config::kCarefulItems);
  uint32_t const warp = threadIdx.x / 32;
  share_args<Config>(args, shared);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // rows_kernel is complete, and with it the chains
  for (uint32_t first = blockIdx.x; first < args.items; first += kWarps * gridDim.x) {
    uint32_t const mine = first + warp * gridDim.x;
    bool found = false;
    if (mine < args.items) {
      RowsItem const item(args.problem, mine);
      found = item.count() > 0 && item.careful(args.problem, args.workspace);
    }
    if (threadIdx.x % 32 == 0) careful[warp] = found;
    __syncthreads();  // all flags and the arguments are written
    uint32_t const lane_id = threadIdx.x % 32;
    uint32_t flags = __ballot_sync(0xffffffffu, lane_id < kWarps && careful[lane_id]);
#pragma unroll 1
    for (; flags != 0; flags &= flags - 1) {
      call_make_rows<Config>(first + (__ffs(flags) - 1) * gridDim.x);
      __syncthreads();  // all warps have read the last item's tiles and sums
    }
    __syncthreads();  // all warps have read the flags
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
