// What producers and consumers share: the rings of buffers, and their barriers.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/divisor.h"
#include "core/mask.cuh"
#include "core/problem.h"
#include "ptx/mbarrier.cuh"
#include "ptx/vectors.cuh"
#include "sm90/config.cuh"

namespace flashvar::sm90 {

struct AttentionFwdArguments {
  AttentionFwdProblem problem;
  CUtensorMap q, k, v;
  uint32_t items;      // tiles of kBlockQ query rows, or pairs of them, over all heads and batches
  uint32_t row_items;  // of one head: of one sequence, or of all where they are packed
  bool paired;
  Divisor by_row_items, by_heads_q, by_group;
  uint32_t* next_item;  // 0 at the start: how many items were asked for; null: they are dealt out
};

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Which buffer of a ring, and the parity of the phase that fills it: one register for both.
template <int kStages>
struct PipelineState {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

// Shared memory of a block: barriers and the next place, then tiles of whole 1024-byte swizzle
// periods.
template <class Config>
struct Smem {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base + Config::kBarrierBytes; }
  __device__ __forceinline__ uint32_t k(uint32_t stage) const {
    return q() + Config::kBytesQ + stage * Config::kBytesK;
  }
  __device__ __forceinline__ uint32_t v(uint32_t stage) const {
    return k(Config::kStages) + stage * Config::kBytesV;
  }

  // full: the tile has arrived; empty: all consumers are done with it.
  __device__ __forceinline__ uint32_t full_q() const { return base; }
  __device__ __forceinline__ uint32_t empty_q() const { return base + 8; }
  __device__ __forceinline__ uint32_t full_k(uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t empty_k(uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t full_v(uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t empty_v(uint32_t stage) const { return ring(3, stage); }
  // full: the place is written; empty: consumers have read it, and the producer wants the next.
  __device__ __forceinline__ uint32_t full_place() const {
    return base + Config::kBarrierBytes / 2;
  }
  __device__ __forceinline__ uint32_t empty_place() const { return full_place() + 8; }
  __device__ __forceinline__ uint32_t place() const { return full_place() + 16; }

 private:
  __device__ __forceinline__ uint32_t ring(int which, uint32_t stage) const {
    return base + 16 + (which * Config::kStages + stage) * 8;
  }
};

}  // namespace flashvar::sm90
