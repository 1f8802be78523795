// Shared parts of the launchers of causal_conv1d. Host only.
#pragma once
#include <cstdint>
#include <type_traits>

#include "causal_conv1d/tiles.h"
#include "core/ceil_div.h"
#include "core/launch.h"
#include "core/target.h"

namespace flashvar::causal_conv1d {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls f with the width, 2 to 4, as a constant.
template <class F>
cudaError_t with_width(int width, F f) {
  return width == 2 ? f(Constant<2>{}) : width == 3 ? f(Constant<3>{}) : f(Constant<4>{});
}

inline int64_t blocks_of(int64_t elements) { return ceil_div(elements, kThreads); }

template <auto* kKernel, class Target, class Args>
cudaError_t launch_blocks(const Args& args, int64_t blocks, int device, cudaStream_t stream,
                          int shared_memory = 0) {
  if (blocks == 0) return cudaSuccess;
  LaunchShape const shape{blocks, kThreads, shared_memory, Target::kArchitecture >= 90};
  return launch_kernel<kKernel>(args, shape, device, stream);
}

}  // namespace flashvar::causal_conv1d
