// Shared memory of rows_kernel (grad_rows.cuh), and the loads into it.
#pragma once
#include <cstdint>

#include "gated_delta_rule/large_dim.h"
#include "sm80/gated_delta_rule/grad_chain_parts.cuh"
#include "sm80/gated_delta_rule/grad_gates.cuh"

namespace flashvar::sm80::gated_delta_rule {

struct RowsArgs {
  BwdProblem problem;
  GradWorkspace workspace;
  uint32_t items;  // chunks of all sequences times heads of q and k
};

// Columns of Q and K of a part.
constexpr int part_columns(int head_dim) {
  return head_dim <= kMaxSmallDim ? head_dim : head_dim % 128 == 0 ? 128 : 64;
}

// kCareful: the kernel of careful chunks. It unrolls less, because registers are scarce.
template <class Target, class Dtype_, int kHeadDim, bool kCareful_>
struct RowsConfig : RowsSlot<SmemLayout<kChunk, part_columns(kHeadDim)>::kBytes> {
  using Dtype = Dtype_;
  static constexpr bool kCareful = kCareful_;
  static constexpr int kUnroll = kCareful ? 1 : 4;
  static constexpr int kDim = part_columns(kHeadDim);
  static constexpr int kParts = kHeadDim / kDim;
  static constexpr int kThreads = 512;
  using Slot = RowsSlot<SmemLayout<kChunk, kDim>::kBytes>;
  using Tile = SmemLayout<kChunk, kDim>;      // Q, K, and the images of S^T and dS^T
  static constexpr int kColumns = kDim / 4;   // of a warp
  static constexpr int kKept = kColumns / 8;  // float4 of a thread that hold dQ, or dK, of a part

  static constexpr int kK = Tile::kBytes;
  static constexpr int kSlots = 2 * Tile::kBytes;
  // Bytes after the slots: dQK and dKK, vectors of two heads, sums of warps.
  static constexpr int kRest = 2 * kTile64Bytes + 2 * static_cast<int>(sizeof(RecordVectors)) +
                               static_cast<int>(sizeof(GateSumsByWarp));
  // Two slots, if they fit: a head's tiles are loaded once, and those of the next head are loaded
  // ahead. Else there is one slot, loaded for each use, and dQK and dKK overwrite its dOut and dV.
  static constexpr int kSlotCount =
      !kCareful && kSlots + 2 * Slot::kSlotBytes + kRest <= Target::kSharedMemory ? 2 : 1;
  static constexpr int kAfterSlots = kSlots + kSlotCount * Slot::kSlotBytes;
  static constexpr int kSquares = kSlotCount == 2 ? kAfterSlots : kSlots;
  static constexpr int kVectors = kSlotCount == 2 ? kAfterSlots + 2 * kTile64Bytes : kAfterSlots;
  static constexpr int kGates = kVectors + 2 * static_cast<int>(sizeof(RecordVectors));
  // The kernel of careful chunks: flags of the items that its warps examined. Persistent blocks:
  // the kernel's arguments.
  static constexpr int kCarefulItems = kGates + static_cast<int>(sizeof(GateSumsByWarp));
  static constexpr int kArgs = kCarefulItems + kThreads / 32;
  static constexpr int kSharedMemory =
      kCareful || kParts > 1 ? kArgs + static_cast<int>(sizeof(RowsArgs)) : kCarefulItems;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Starts the loads of a block (cp.async).
template <class Config>
struct RowsLoads {
  const RowsArgs& args;
  ChunkCoordinate const& coordinate;
  unsigned char* shared;
  int part;  // of the columns of Q and K

  __device__ __forceinline__ void rows(const Tensor& from, uint32_t head, int at) const {
    load_rows<typename Config::Tile, Config::kThreads>(shared + at, from, coordinate, head,
                                                       part * Config::kDim,
                                                       args.problem.head_dim - part * Config::kDim);
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
    int64_t const index = record * workspace.tiles + tile;
    int32_t const column = tile * kChainColumns;
    load_rows<Tile64, Config::kThreads>(slot + Config::kGradOut, problem.grad_out, coordinate, head,
                                        column, problem.head_dim_v - column);
    if (low_values) {
      load_tile<Tile64, Config::kThreads, true>(
          slot + Config::kGradValues,
          reinterpret_cast<const uint16_t*>(workspace.grad_values_low + index * kTile64Bytes),
          kChainColumns, coordinate.count, kChainColumns);
    } else {
      load_rows<Tile64, Config::kThreads>(slot + Config::kGradValues, problem.grad_v, coordinate,
                                          head, column, problem.head_dim_v - column);
    }
    image(low_residuals ? workspace.residuals_low : workspace.residuals, index, kTile64Bytes,
          slot + Config::kResiduals);
  }

  __device__ __forceinline__ void states(unsigned char* slot, int64_t record, int32_t tile) const {
    int64_t const index = (record * args.workspace.tiles + tile) * Config::kParts + part;
    image(args.workspace.states, index, Config::Tile::kBytes, slot + Config::kState);
    image(args.workspace.grad_states, index, Config::Tile::kBytes, slot + Config::kGradState);
  }

  __device__ __forceinline__ unsigned char* slot(int32_t tile) const {
    return shared + Config::kSlots + tile % Config::kSlotCount * Config::kSlotBytes;
  }

  // The vectors of head i of the group; two heads' are kept.
  __device__ __forceinline__ RecordVectors* vectors(int32_t i) const {
    return reinterpret_cast<RecordVectors*>(shared + Config::kVectors) + i % 2;
  }
  __device__ __forceinline__ void start_vectors(int32_t i, int64_t record) const {
    image(reinterpret_cast<const unsigned char*>(args.workspace.records[record].a), 0,
          sizeof(RecordVectors), reinterpret_cast<unsigned char*>(vectors(i)));
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
