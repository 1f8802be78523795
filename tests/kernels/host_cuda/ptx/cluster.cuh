// Stands for src/cuda/ptx/cluster.cuh, of blocks that core/launch_cluster.h runs.
#pragma once
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.h"
#include "ptx/warpgroup.cuh"

namespace flashvar::ptx {

inline uint32_t cluster_blocks = 1;
// The shared memory of blocks at their last cluster_sync().
inline std::map<uint32_t, std::vector<unsigned char>> written;
// Of the block that runs: calls of cluster_sync(), and loads after the last of them.
inline int cluster_syncs, cluster_loads;

// By the threads that have not exited, which here are `threads`: warps of a block whose others
// exit.
inline void cluster_sync(uint32_t threads = 128) {
  constexpr uint32_t kBarrier = 16;  // none of the named ones
  named_barrier_sync(kBarrier, threads);
  auto& bytes = written[blockIdx.x];
  if (threadIdx.x == 0) {
    bytes.assign(shared_memory, shared_memory + sizeof(shared_memory));
    ++cluster_syncs;
    cluster_loads = 0;
  }
  named_barrier_sync(kBarrier, threads);
}

inline uint32_t in_cta(uint32_t smem, uint32_t cta) {
  if (cta >= cluster_blocks) std::abort();
  return cta << 24 | smem;
}

template <class Words>
Words cluster_words(uint32_t address) {
  if (cluster_syncs == 0) std::abort();  // another block may not have begun
  ++cluster_loads;
  uint32_t const first = blockIdx.x / cluster_blocks * cluster_blocks;
  const auto& bytes = written[first + (address >> 24)];
  Words words{};
  if (!bytes.empty()) std::memcpy(&words, &bytes.at(address & 0xffffff), sizeof(words));
  return words;
}
inline float cluster_load(uint32_t address) { return cluster_words<float>(address); }
inline float4 cluster_load4(uint32_t address) {
  if (address % 16 != 0) std::abort();
  return cluster_words<float4>(address);
}

}  // namespace flashvar::ptx
