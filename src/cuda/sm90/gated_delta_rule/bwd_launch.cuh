// Launches the backward: that of sm80 with this family's launchers of the chains and of
// rows_kernel; above head dim 128 that of sm80.
#pragma once
#include <type_traits>

#include "gated_delta_rule/large_dim.h"
#include "sm80/gated_delta_rule/bwd_launch.cuh"
#include "sm90/gated_delta_rule/chains_launch.cuh"
#include "sm90/gated_delta_rule/rows_launch.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
using BwdLaunch = std::conditional_t<
    flashvar::gated_delta_rule::kLargeDim<kHeadDim>,
    sm80::gated_delta_rule::BwdLaunch<Target, Dtype, kHeadDim, LargeDimChainsLaunch>,
    sm80::gated_delta_rule::BwdLaunch<Target, Dtype, kHeadDim, ChainsLaunch, RowsLaunch>>;

}  // namespace flashvar::sm90::gated_delta_rule
