// Backward on 9.0: the kernels of the mma.sync family.
#pragma once
#include "sm80/attention_bwd_launch.cuh"

namespace flashvar::hopper {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
using AttentionBwdLaunch = sm80::AttentionBwdLaunch<Target, Dtype, kHeadDim, kHeadDimV>;

}  // namespace flashvar::hopper
