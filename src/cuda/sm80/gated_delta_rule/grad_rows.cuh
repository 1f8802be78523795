// The fourth kernel of the backward, rows_kernel: dQ and dK of all chunks in parallel. A block
// takes a chunk of one head of q and k, and sums over the heads of v that share the head, in their
// order. Careful chunks have a kernel of their own, whose blocks search for them.
//
// A warp has 16 tokens and a quarter of the columns of dQ and dK. First the block computes the
// squares E = dV R^T and F = dOut R^T and from them dQK and dB, the gradients of Q K^T and K K^T;
// then the products with S and dS:
//   dQ = c o (dOut S^T) + dQK K
//   dK = -a o (dV S^T) + beta b o (R dS^T) + dQK^T Q + (dB + dB^T) K
#pragma once
#include <cstdint>

#include "ptx/grid_dependency.cuh"
#include "sm80/gated_delta_rule/grad_chain.cuh"
#include "sm80/gated_delta_rule/grad_gates.cuh"
#include "sm80/gated_delta_rule/grad_products.cuh"

namespace flashvar::sm80::gated_delta_rule {

struct RowsArgs {
  BwdProblem problem;
  GradWorkspace workspace;
  uint32_t items;  // chunks of all sequences times heads of q and k
};

// kCareful: the kernel of careful chunks, which unrolls less for want of registers.
template <class Target, class Dtype_, int kDim_, bool kCareful_>
struct RowsConfig : RowsSlot<SmemLayout<kChunk, kDim_>::kBytes> {
  using Dtype = Dtype_;
  static constexpr bool kCareful = kCareful_;
  static constexpr int kUnroll = kCareful ? 1 : 4;
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = 512;
  using Slot = RowsSlot<SmemLayout<kChunk, kDim>::kBytes>;
  using Tile = SmemLayout<kChunk, kDim>;     // Q, K, and the images of S^T and dS^T
  static constexpr int kColumns = kDim / 4;  // of a warp

  static constexpr int kK = Tile::kBytes;
  static constexpr int kSlots = 2 * Tile::kBytes;
  // Bytes after the slots: dQK and dB, vectors of two heads, sums of warps.
  static constexpr int kRest = 2 * kSquareBytes + 2 * static_cast<int>(sizeof(RecordRows)) +
                               static_cast<int>(sizeof(GateRows));
  // Two slots, if they fit: a head's tiles are loaded once, and those of the next head are loaded
  // ahead. Else there is one slot, loaded for each use, and dQK and dB overwrite its dOut and dV.
  static constexpr int kSlotCount =
      !kCareful && kSlots + 2 * Slot::kSlotBytes + kRest <= Target::kSharedMemory ? 2 : 1;
  static constexpr int kAfterSlots = kSlots + kSlotCount * Slot::kSlotBytes;
  static constexpr int kSquares = kSlotCount == 2 ? kAfterSlots : kSlots;
  static constexpr int kVectors = kSlotCount == 2 ? kAfterSlots + 2 * kSquareBytes : kAfterSlots;
  static constexpr int kGates = kVectors + 2 * static_cast<int>(sizeof(RecordRows));
  // The kernel of careful chunks: flags of the items that its warps examined, and its arguments.
  static constexpr int kCarefulItems = kGates + static_cast<int>(sizeof(GateRows));
  static constexpr int kArgs = kCarefulItems + kThreads / 32;
  static constexpr int kSharedMemory =
      kCareful ? kArgs + static_cast<int>(sizeof(RowsArgs)) : kCarefulItems;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Starts the loads of a block (cp.async).
template <class Config>
struct RowsLoads {
  const RowsArgs& args;
  ChunkCoordinate const& coordinate;
  unsigned char* shared;

  __device__ __forceinline__ void rows(const Tensor& from, uint32_t head, int at) const {
    load_rows<typename Config::Tile, Config::kThreads>(shared + at, from, coordinate, head, 0,
                                                       args.problem.head_dim);
  }

  __device__ __forceinline__ void image(const unsigned char* from, int64_t tile, int bytes,
                                        unsigned char* to) const {
    copy_async<Config::kThreads>(ptx::smem_address(to), from + tile * bytes, bytes);
  }

  // dOut, dV and R of a tile of columns of V. low_values, low_residuals: the low parts of dV or R.
  __device__ __forceinline__ void values(unsigned char* slot, uint32_t head, int64_t record,
                                         int32_t tile, bool low_values, bool low_residuals) const {
    const BwdProblem& problem = args.problem;
    const GradWorkspace& workspace = args.workspace;
    int64_t const of_workspace = record * workspace.tiles + tile;
    int32_t const column = tile * kChainColumns;
    load_rows<Square, Config::kThreads>(slot + Config::kGradOut, problem.grad_out, coordinate, head,
                                        column, problem.head_dim_v);
    if (low_values) {
      load_tile<Square, Config::kThreads, true>(
          slot + Config::kGradValues,
          reinterpret_cast<const uint16_t*>(workspace.grad_values_low +
                                            of_workspace * kSquareBytes),
          kChainColumns, coordinate.count, kChainColumns);
    } else {
      load_rows<Square, Config::kThreads>(slot + Config::kGradValues, problem.grad_v, coordinate,
                                          head, column, problem.head_dim_v);
    }
    image(low_residuals ? workspace.residuals_low : workspace.residuals, of_workspace, kSquareBytes,
          slot + Config::kResiduals);
  }

  __device__ __forceinline__ void states(unsigned char* slot, int64_t record, int32_t tile) const {
    int64_t const of_workspace = record * args.workspace.tiles + tile;
    image(args.workspace.states, of_workspace, Config::Tile::kBytes, slot + Config::kState);
    image(args.workspace.grad_states, of_workspace, Config::Tile::kBytes,
          slot + Config::kGradState);
  }

  __device__ __forceinline__ unsigned char* slot(int32_t tile) const {
    return shared + Config::kSlots + tile % Config::kSlotCount * Config::kSlotBytes;
  }

  // The vectors of head i of the group; two heads' are kept.
  __device__ __forceinline__ RecordRows* vectors(int32_t i) const {
    return reinterpret_cast<RecordRows*>(shared + Config::kVectors) + i % 2;
  }
  __device__ __forceinline__ void start_vectors(int32_t i, int64_t record) const {
    image(reinterpret_cast<const unsigned char*>(args.workspace.records[record].a), 0,
          sizeof(RecordRows), reinterpret_cast<unsigned char*>(vectors(i)));
  }
};

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
                                                const GroupHead& head, const RecordRows& rows,
                                                bool resident) {
  int32_t const tiles = loads.args.workspace.tiles;
  e.clear();
  f.clear();
  for (int32_t tile = 0; tile < tiles; ++tile) {
    unsigned char* const slot = loads.slot(tile);
    int parts = 1;
    for (int part = 0; part < parts; ++part) {
      if (!resident || part > 0) {
        if (tile + part > 0) __syncthreads();  // all warps have read the slot
        loads.values(slot, head.head, head.record, tile, part == 2, part == 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
      } else if (tile == 0 && tiles == 2) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncthreads();  // the slot and the vectors are loaded
      add_squares<typename Config::Dtype, Config>(e, f, ptx::smem_address(slot), part < 2);
      if (Config::kCareful && rows.growth > kCarefulGrowth) parts = 3;
    }
  }
}

// Adds up the lanes' sums over columns of a square, over the warp's 16 rows, and writes them.
__device__ __forceinline__ void write_column_sums(float (&to)[4][kChunk], float (&columns)[4],
                                                  const Lane& at, const Part& part) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      columns[n] += __shfl_xor_sync(0xffffffffu, columns[n], step);
    }
    if (at.g == 0) {
      to[part.strip][16 * part.quarter + n / 2 * 8 + 2 * at.t + n % 2] = columns[n];
    }
  }
}

// dQ and dK of an item, by a block. Over 100 lines, because its steps share the accumulators of dQ
// and dK: with further steps as functions the compiler allocates registers otherwise.
template <class Config>
__device__ __forceinline__ void make_rows(const RowsArgs& args, const RowsItem& item,
                                          unsigned char* shared) {
  using Dtype = typename Config::Dtype;
  const BwdProblem& problem = args.problem;
  const GradWorkspace& workspace = args.workspace;
  uint32_t const head_qk = item.head_qk;
  ChunkCoordinate const coordinate(item.batch, int64_t{item.begin} + item.first, item.count());
  auto of_group = [&](int32_t i) -> GroupHead {
    return {item.head(problem, i), item.record(problem, i)};
  };
  RowsLoads<Config> const loads{args, coordinate, shared};
  bool const resident = workspace.tiles <= Config::kSlotCount && Config::kSlotCount > 1;
  // One cp.async group: what a head needs of a tile. Empty past the last head.
  auto start = [&](int32_t i, int32_t tile) {
    if (i < problem.group) {
      GroupHead const head = of_group(i);
      if (tile == 0) loads.start_vectors(i, head.record);
      if (resident) {
        loads.values(loads.slot(tile), head.head, head.record, tile, false, false);
        loads.states(loads.slot(tile), head.record, tile);
      }
    }
    ptx::cp_async_commit();
  };
  loads.rows(problem.q, head_qk, 0);
  loads.rows(problem.k, head_qk, Config::kK);
  for (int32_t tile = 0; tile < (resident ? workspace.tiles : 1); ++tile) start(0, tile);

  uint32_t const tiles = ptx::smem_address(shared);
  auto& found = *reinterpret_cast<GateRows*>(shared + Config::kGates);
  Lane const at;
  Part const part;
  int const row = 16 * part.strip + at.g;
  Accumulator<16, Config::kColumns> dq, dk;
  dq.clear();
  dk.clear();
  for (int32_t i = 0; i < problem.group; ++i) {
    GroupHead const head = of_group(i);
    const RecordRows& rows = *loads.vectors(i);
    float2 of_gates{};
    bool careful;
    {
      Squares e, f, product;
      compute_squares(e, f, loads, head, rows, resident);
      careful = Config::kCareful && rows.growth > kCarefulGrowth;
      float columns[4] = {};
      multiply_keys<Config>(product, tiles, tiles + Config::kK);
      finish_square<false>(f, product, problem.scale, rows, of_gates, columns);
      multiply_keys<Config>(product, tiles + Config::kK, tiles + Config::kK);
      finish_square<true>(e, product, problem.scale, rows, of_gates, columns);
      write_column_sums(found.columns, columns, at, part);
      for (int n = 0; n < (careful ? 2 : 1); ++n) {
        __syncthreads();  // all warps have read what the squares overwrite
        store_square<Dtype>(f, tiles + Config::kSquares);
        store_square<Dtype>(e, tiles + Config::kSquares + kSquareBytes);
        __syncthreads();  // all warps have written the squares
        add_square_products<Config>(dq, dk, tiles);
      }
    }
    StateProducts<Config> products;
    products.clear();
    float states = 0.f;
    for (int32_t tile = 0; tile < workspace.tiles; ++tile) {
      unsigned char* const tile_slot = loads.slot(tile);
      for (int n = 0; n < (careful ? 2 : 1); ++n) {
        if (!resident || n == 1) {
          __syncthreads();  // all warps have read the slot, or the squares in it
          loads.values(tile_slot, head.head, head.record, tile, n == 1, n == 1);
          if (!resident && n == 0) loads.states(tile_slot, head.record, tile);
          ptx::cp_async_commit();
          ptx::cp_async_wait<0>();
          __syncthreads();  // the slot is loaded
        }
        products.add(ptx::smem_address(tile_slot), n == 0);
        if (n == 0) states += state_products<Config>(tile_slot);
      }
      if (resident) {
        __syncthreads();  // all warps have read the slot
        start(i + 1, tile);
      }
    }
    if (!resident) start(i + 1, 0);

    float const of_q[2] = {rows.c[row], rows.c[row + 8]};
    float const of_k[2] = {-rows.a[row], -rows.a[row + 8]};
    float2 const kept = row_products<Config>(products.later, tiles + Config::kK);
    float2 const of_state = row_products<Config>(products.of_q, tiles);
    float2 const of_read = row_products<Config>(products.of_k, tiles + Config::kK);
    of_gates.x += of_q[0] * of_state.x + of_k[0] * of_read.x;
    of_gates.y += of_q[1] * of_state.y + of_k[1] * of_read.y;
    add_scaled(dq, products.of_q, of_q);
    add_scaled(dk, products.of_k, of_k);
    add_scaled(dk, products.later,
               {rows.b[row] * rows.beta[row], rows.b[row + 8] * rows.beta[row + 8]});
    write_row_sums(found.gates[part.quarter], of_gates);
    write_row_sums(found.kept[part.quarter], kept);
    states = warp_sum(states);
    if (threadIdx.x % 32 == 0) found.states[threadIdx.x / 32] = states;
    __syncthreads();  // all warps have written their sums
    write_sums(found, workspace.sums[head.record]);
  }
  if (problem.qk_l2norm) {
    const RecordRows& rows = *loads.vectors(problem.group - 1);
    __syncthreads();  // write_sums() has read the sums, which project() overwrites
    project<Config>(dq, tiles, rows.norm_q, found.gates);
    project<Config>(dk, tiles + Config::kK, rows.norm_k, found.kept);
  }
  store_rows<Config>(dq, coordinate.of(problem.grad_q, head_qk), problem.grad_q.seq_stride,
                     coordinate.count, problem.head_dim);
  store_rows<Config>(dk, coordinate.of(problem.grad_k, head_qk), problem.grad_k.seq_stride,
                     coordinate.count, problem.head_dim);
}

// Grid: items.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    rows_kernel(const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  RowsItem const item(args.problem, blockIdx.x);
  if (item.count() <= 0) return;  // a surplus chunk
  ptx::griddepcontrol_wait();     // the chains are complete
  if (!item.careful(args.problem, args.workspace)) make_rows<Config>(args, item, shared);
}

// make_rows() as a function call: inlined into the loop below it would keep addresses in registers,
// and spill. A function that is not inlined cannot refer to kernel arguments, so they are copied to
// shared memory.
template <class Config>
__device__ __noinline__ void call_make_rows(uint32_t item) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto const& args = *reinterpret_cast<const RowsArgs*>(shared + Config::kArgs);
  make_rows<Config>(args, RowsItem(args.problem, item), shared);
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
  for (uint32_t i = threadIdx.x; i < sizeof(RowsArgs) / sizeof(uint32_t); i += Config::kThreads) {
    reinterpret_cast<uint32_t*>(shared + Config::kArgs)[i] =
        reinterpret_cast<const uint32_t*>(&args)[i];
  }
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
    uint32_t const lane = threadIdx.x % 32;
    uint32_t flags = __ballot_sync(0xffffffffu, lane < kWarps && careful[lane]);
#pragma unroll 1
    for (; flags != 0; flags &= flags - 1) {
      call_make_rows<Config>(first + (__ffs(flags) - 1) * gridDim.x);
      __syncthreads();  // all warps have read the last item's tiles and sums
    }
    __syncthreads();  // all warps have read the flags
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
