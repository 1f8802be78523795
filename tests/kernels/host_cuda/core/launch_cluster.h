// Stands for src/cuda/core/launch_cluster.h: blocks run one after the other, those of clusters
// twice. In the second round a block finds in the others' shared memory what they wrote in the
// first.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/launch.h"
#include "device.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace flashvar {

// A block begins with shared memory full of NaN. It may not write beyond its part of it, or load
// from another block that may have exited.
template <class Call>
void run_block_of(const Call& call, const LaunchShape& shape) {
  constexpr int kNaN = 0xff;
  std::memset(shared_memory, kNaN, sizeof(shared_memory));
  ptx::mbarriers.clear();
  ptx::cluster_syncs = ptx::cluster_loads = 0;
  run_block(shape.threads, [](const void* what) { (*static_cast<const Call*>(what))(); }, &call);
  if (ptx::cluster_loads > 0) std::abort();
  for (size_t at = shape.shared_memory; at < sizeof(shared_memory); ++at) {
    if (shared_memory[at] == kNaN) continue;
    std::fprintf(stderr, "block %u writes to byte %zu of shared memory\n", blockIdx.x, at);
    std::abort();
  }
}

inline bool device_runs_clusters = true;

template <auto* kKernel, int kMostSharedMemory>
struct ClusterLaunch {
  template <class Args>
  static cudaError_t launch(const Args& args, const LaunchShape& shape, int cluster, int,
                            cudaStream_t) {
    if (shape.shared_memory > kMostSharedMemory || shape.blocks % cluster != 0) std::abort();
    auto const call = [&args] { kKernel(args); };
    gridDim.x = static_cast<uint32_t>(shape.blocks);
    ptx::cluster_blocks = static_cast<uint32_t>(cluster);
    ptx::written.clear();
    for (int round = 0; round < (cluster > 1 ? 2 : 1); ++round) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block_of(call, shape);
    }
    return cudaSuccess;
  }

  static bool runs_clusters(int, int, int) { return device_runs_clusters; }
};

}  // namespace flashvar
