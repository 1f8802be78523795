// Launches the backward: that of sm80 with this family's launchers of the chains and of
// rows_kernel.
#pragma once
#include "sm80/gated_delta_rule/bwd_launch.cuh"
#include "sm90/gated_delta_rule/chains_launch.cuh"
#include "sm90/gated_delta_rule/rows_launch.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
using BwdLaunch =
    sm80::gated_delta_rule::BwdLaunch<Target, Dtype, kHeadDim, ChainsLaunch, RowsLaunch>;

}  // namespace flashvar::sm90::gated_delta_rule
