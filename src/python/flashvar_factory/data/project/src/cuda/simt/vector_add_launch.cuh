#pragma once
#include "abi/kernel_table.h"
#include "core/kernel_types.h"

namespace vecadd::simt {

template <class Element, int kPerThread>
__global__ void vector_add_kernel(const Element* x, const Element* y, Element* out,
                                  int64_t length) {
  int64_t const thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (int i = 0; i < kPerThread; ++i) {
    int64_t const at = thread * kPerThread + i;
    if (at < length) out[at] = x[at] + y[at];
  }
}

template <class Target, class Dtype, int kPerThread>
struct VectorAddLaunch {
  static constexpr int kThreads = 256;
  static constexpr int kTile = kThreads * kPerThread;

  static constexpr VectorAddKernel row() { return {Dtype::kAbi, kPerThread, &launch}; }

  static constexpr KernelFacts facts(const char* name) {
    KernelFacts facts{{}, {}, {}, {}, kThreads, 0, {kTile, 0, 0, 0}};
    for (int i = 0; i < 63 && name[i] != '\0'; ++i) facts.row[i] = name[i];
    return facts;
  }

 private:
  using Element = typename Dtype::Element;

  static cudaError_t launch(const vecadd_vector_add_params& p) {
    auto const blocks = static_cast<unsigned>((p.length + kTile - 1) / kTile);
    auto const stream = static_cast<cudaStream_t>(p.stream);
    vector_add_kernel<Element, kPerThread><<<blocks, kThreads, 0, stream>>>(
        static_cast<const Element*>(p.x), static_cast<const Element*>(p.y),
        static_cast<Element*>(p.out), p.length);
    return cudaGetLastError();
  }
};

}  // namespace vecadd::simt
