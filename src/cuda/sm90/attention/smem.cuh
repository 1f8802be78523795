// Addresses in a CTA's shared memory: mbarriers and work tiles first, then operand tiles, which
// start at multiples of 1024 bytes, the period of the swizzle. mbarriers come in pairs: full = the
// buffer is written, empty = all readers have released it. Of the kBarrierBytes before the tiles,
// the first half has the mbarriers of operands, the second half the work tiles and their mbarriers.
#pragma once
#include <cstdint>

#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/vectors.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::attention {

// Numbers of named barriers. kZeroed: all consumers, in zero_rows(). kOrder + i: the ordering
// barrier of consumer i. kDsWritten: the consumer of small tiles has written dS; no
// kernel uses both it and kZeroed.
enum : uint32_t { kZeroed = 1, kOrder = 2, kDsWritten = 1 };

// CTAs that own query tiles (forward, dQ): Q (in the dQ kernel with dO after it), rings of K and
// V.
template <class Config>
struct QueryTileSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base + Config::kBarrierBytes; }
  __device__ __forceinline__ uint32_t k(uint32_t stage) const {
    return q() + Config::kBytesQ + stage * Config::kBytesK;
  }
  __device__ __forceinline__ uint32_t v(uint32_t stage) const {
    return k(Config::kStages) + stage * Config::kBytesV;
  }

  // The BiasStage of a consumer warp. `warp`: its number among the warps of all consumers.
  __device__ __forceinline__ uint32_t bias(uint32_t warp) const {
    return base + Config::kBiasOffset + warp * Config::kBytesBias;
  }

  // full: the tile is loaded. empty: all consumers have released it.
  __device__ __forceinline__ uint32_t full_q() const { return base; }
  __device__ __forceinline__ uint32_t empty_q() const { return base + 8; }
  __device__ __forceinline__ uint32_t full_k(uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t empty_k(uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t full_v(uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t empty_v(uint32_t stage) const { return ring(3, stage); }
  // full: the work tile is published. empty: the consumers have read it and the load warp has
  // released it, late (kBlocksAhead), so that the scheduler does not prepare the next one too
  // early.
  __device__ __forceinline__ uint32_t full_work_tile() const {
    return base + Config::kBarrierBytes / 2;
  }
  __device__ __forceinline__ uint32_t empty_work_tile() const { return full_work_tile() + 8; }
  __device__ __forceinline__ uint32_t work_tile() const { return full_work_tile() + 16; }

 private:
  __device__ __forceinline__ uint32_t ring(int which, uint32_t stage) const {
    return base + 16 + (which * Config::kStages + stage) * 8;
  }
};

// Dynamic schedule: slots for key tiles that the scheduler warp has prepared, and the bytes of
// each.
inline constexpr uint32_t kTileSlots = 2, kTileBytes = 128;

// CTAs that own key tiles (dK and dV): K, V, rings of Q, of dO with LSE and delta, and of dS or P.
template <class Config>
struct KeyTileSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base + Config::kBarrierBytes; }
  __device__ __forceinline__ uint32_t v() const { return k() + Config::kBytesK; }
  __device__ __forceinline__ uint32_t q(uint32_t stage) const {
    return v() + Config::kBytesV + stage * Config::kBytesQ;
  }
  __device__ __forceinline__ uint32_t grad_out(uint32_t stage) const {
    return q(Config::kStages) + stage * Config::kBytesGradOut;
  }
  // dS: rows are queries, in column blocks of 64 keys.
  __device__ __forceinline__ uint32_t ds(uint32_t stage) const {
    return grad_out(Config::kStages) + stage * Config::kBytesExchange;
  }
  // WorkSplit::kGemms: P in fp32, passed from each thread of the first consumer to the thread of
  // the second with the same index.
  __device__ __forceinline__ uint32_t p(uint32_t stage) const { return ds(stage); }
  __device__ __forceinline__ uint32_t lse(uint32_t stage) const {
    return ds(Config::kExchangeStages) + stage * Config::kRowBytes;
  }
  __device__ __forceinline__ uint32_t delta(uint32_t stage) const {
    return lse(Config::kStages) + stage * Config::kRowBytes;
  }
  // The BiasStage of a consumer warp. `warp`: its number among the warps of all consumers.
  __device__ __forceinline__ uint32_t bias(uint32_t warp) const {
    return base + Config::kBiasOffset + warp * Config::kBytesBias;
  }

  // full: loaded (LSE and delta share the mbarriers of dO). empty_kv: all consumers have released K
  // and V.
  __device__ __forceinline__ uint32_t full_k() const { return base; }
  __device__ __forceinline__ uint32_t full_v() const { return base + 8; }
  __device__ __forceinline__ uint32_t empty_kv() const { return base + 16; }
  // dS or P, passed between the consumers. full: written; empty: read.
  __device__ __forceinline__ uint32_t full_exchange(uint32_t stage) const {
    return ring(4, 0) + stage * 16;
  }
  __device__ __forceinline__ uint32_t empty_exchange(uint32_t stage) const {
    return full_exchange(stage) + 8;
  }
  // Dynamic schedule: slots of prepared key tiles. full: written by the scheduler warp; empty: read
  // by consumers and load threads. tile_request: a load thread asks the scheduler for the next
  // tile.
  __device__ __forceinline__ uint32_t full_tile(uint32_t slot) const {
    return base + Config::kBarrierBytes / 2 + slot * 16;
  }
  __device__ __forceinline__ uint32_t empty_tile(uint32_t slot) const {
    return full_tile(slot) + 8;
  }
  __device__ __forceinline__ uint32_t tile_request() const { return full_tile(kTileSlots); }
  __device__ __forceinline__ uint32_t tile(uint32_t slot) const {
    return tile_request() + 16 + slot * kTileBytes;
  }
  __device__ __forceinline__ uint32_t full_q(uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t empty_q(uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t full_grad_out(uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t empty_grad_out(uint32_t stage) const {
    return ring(3, stage);
  }

 private:
  __device__ __forceinline__ uint32_t ring(int which, uint32_t stage) const {
    return base + 32 + (which * Config::kStages + stage) * 8;
  }
};

// Zeros rows [first, kBlockKV) of a tile of V (dQ kernel: of K), by all consumers. Needed where the
// tensor holds other data after the sequence's last key: P (dQ kernel: dS) is 0 there, but 0 * inf
// is not.
template <class Config, int kColBlocks>
__device__ __forceinline__ void zero_rows(uint32_t smem, int32_t first) {
  int const unit = ptx::thread_index() % 8;
  for (int row = first + (ptx::thread_index() - 128) / 8; row < Config::kBlockKV;
       row += Config::kConsumers * 16) {
#pragma unroll
    for (int col_block = 0; col_block < kColBlocks; ++col_block) {
      ptx::shared_store(smem + col_block * Config::kColBlockBytesKV + row * 128 + unit * 16,
                        uint4{});
    }
  }
  ptx::fence_async_proxy();  // wgmma reads the zeros
  // All consumers have written their zeros.
  ptx::named_barrier_sync(kZeroed, 128 * Config::kConsumers);
}

}  // namespace flashvar::sm90::attention
