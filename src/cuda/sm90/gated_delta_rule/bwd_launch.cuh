// Launches the backward: as on sm_80, but for the chains and the rows.
#pragma once
#include "sm80/gated_delta_rule/bwd_launch.cuh"
#include "sm90/gated_delta_rule/chains_launch.cuh"
#include "sm90/gated_delta_rule/rows_launch.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
using BwdLaunch =
    sm80::gated_delta_rule::BwdLaunch<Target, Dtype, kHeadDim, ChainsLaunch, RowsLaunch>;

}  // namespace flashvar::sm90::gated_delta_rule
