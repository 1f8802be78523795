// What producers and consumers share: the rings of buffers, and their barriers.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/problem.h"
#include "ptx/mbarrier.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/vectors.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/config.cuh"
#include "sm90/query_items.h"

namespace flashvar::sm90 {

// Named barriers of kernels that walk over keys: all consumers meet at kZeroed; kTurn + i lets
// consumer i start its products.
enum : uint32_t { kZeroed = 1, kTurn = 2 };

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

// One lane starts the copies.
template <int kPages, int kPageBytes>
__device__ __forceinline__ void load_rows(uint32_t smem, const CUtensorMap* map, uint32_t full,
                                          ptx::CacheHint hint, int32_t row, uint32_t head,
                                          uint32_t batch) {
  if (!ptx::elect_one()) return;
  ptx::mbarrier_arrive_expect(full, kPages * kPageBytes);
#pragma unroll
  for (int page = 0; page < kPages; ++page) {
    ptx::tma_load_4d(smem + page * kPageBytes, map, full, hint, page * kPageCols, row, head, batch);
  }
}

// Rows of V, or in the backward of K, past the sequence's end may hold anything where the tensor
// goes on: what they are multiplied by is 0, but 0 times infinity is not.
template <class Config, int kPages>
__device__ __forceinline__ void zero_rows(uint32_t smem, int32_t first) {
  int const chunk = ptx::thread_index() % 8;
  for (int row = first + (ptx::thread_index() - 128) / 8; row < Config::kBlockKV;
       row += Config::kConsumers * 16) {
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      ptx::store_zeros_16(smem + page * Config::kPageBytesKV + row * 128 + chunk * 16);
    }
  }
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(kZeroed, 128 * Config::kConsumers);  // the zeros are there for all
}

}  // namespace flashvar::sm90
