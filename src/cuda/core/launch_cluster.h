// ClusterLaunch: launches of a kernel with thread block clusters, and with amounts of shared memory
// that differ from call to call (launch_kernel() has neither). Host only.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "core/launch.h"

namespace flashvar {

// kMostSharedMemory: of all launches of the kernel.
template <auto* kKernel, int kMostSharedMemory>
class ClusterLaunch {
 public:
  // `cluster`: blocks of a cluster, of which the number of blocks is a multiple.
  template <class Args>
  static cudaError_t launch(const Args& args, const LaunchShape& shape, int cluster, int device,
                            cudaStream_t stream) {
    if (shape.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    if (cudaError_t const error = raise(device); error != cudaSuccess) return error;
    Configuration const of(shape, cluster, stream);
    return cudaLaunchKernelEx(&of.config, kKernel, args);
  }

  // Whether the device runs clusters of so many blocks that have an SM each. It does not where its
  // SMs are shared with other processes (MPS) or contexts, and too few of a GPC are left. The first
  // answer is kept. Devices from 32 on are asked each time.
  static bool runs_clusters(int cluster, int threads, int device) {
    static std::atomic<uint64_t> answers{0};  // two bits of a device: known, and yes
    uint64_t const known = device < 32 ? uint64_t{1} << 2 * device : 0;
    uint64_t const found = answers.load(std::memory_order_relaxed);
    if ((found & known) != 0) return (found & known << 1) != 0;
    if (raise(device) != cudaSuccess) return false;
    Configuration const of({cluster, threads, kMostSharedMemory}, cluster, nullptr);
    int clusters = 0;
    bool const runs =
        cudaOccupancyMaxActiveClusters(&clusters, kKernel, &of.config) == cudaSuccess &&
        clusters > 0;
    answers.fetch_or(known | (runs ? known << 1 : 0), std::memory_order_relaxed);
    return runs;
  }

 private:
  struct Configuration {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config{};

    Configuration(const LaunchShape& shape, int cluster, cudaStream_t stream) {
      config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
      config.blockDim = dim3(shape.threads);
      config.dynamicSmemBytes = shape.shared_memory;
      config.stream = stream;
      config.attrs = attributes;
      if (shape.programmatic) {
        cudaLaunchAttribute& programmatic = attributes[config.numAttrs++];
        programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        programmatic.val.programmaticStreamSerializationAllowed = 1;
      }
      if (cluster > 1) {
        cudaLaunchAttribute& clusters = attributes[config.numAttrs++];
        clusters.id = cudaLaunchAttributeClusterDimension;
        clusters.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
      }
    }
    Configuration(const Configuration&) = delete;
  };

  static cudaError_t raise(int device) {
    static SharedMemoryLimit limit;
    return limit.raise(kKernel, kMostSharedMemory, device);
  }
};

}  // namespace flashvar
