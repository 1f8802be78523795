// launch_kernel(): launches a kernel with dynamic shared memory and, where asked, as a programmatic
// dependent launch (PDL). Host only.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flashvar {

struct LaunchShape {
  int64_t blocks;
  int threads;
  int shared_memory;  // dynamic, bytes
  // PDL: blocks may start before the preceding grid of the stream is complete. The kernel must
  // execute griddepcontrol.wait before it reads what that grid writes, and before it writes what
  // that grid reads. It must also execute griddepcontrol.wait before
  // griddepcontrol.launch_dependents if the next grid accesses device memory before its own wait.
  bool programmatic = false;
};

// Raises a kernel's limit of dynamic shared memory (cudaFuncSetAttribute) once per device: the call
// applies to the current device only. One instance per kernel. Devices from 64 on have no bit and
// are set at every launch.
class SharedMemoryLimit {
 public:
  template <class Kernel>
  cudaError_t raise(Kernel* kernel, int bytes, int device) {
    uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
    if ((done_.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
    cudaError_t const error = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) done_.fetch_or(bit, std::memory_order_relaxed);
    return error;
  }

 private:
  std::atomic<uint64_t> done_{0};  // bit i: device i has the limit
};

template <auto* kKernel, class Args>
cudaError_t launch_kernel(const Args& args, const LaunchShape& shape, int device,
                          cudaStream_t stream) {
  static SharedMemoryLimit limit;
  if (shape.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (cudaError_t const error = limit.raise(kKernel, shape.shared_memory, device);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_memory;
  config.stream = stream;
  cudaLaunchAttribute programmatic{};
  programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  programmatic.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &programmatic;
  config.numAttrs = shape.programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, args);
}

}  // namespace flashvar
