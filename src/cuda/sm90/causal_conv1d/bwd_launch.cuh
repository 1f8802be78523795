// causal_conv1d needs nothing of this family: its kernels are those of every architecture.
#pragma once
#include "causal_conv1d/bwd_launch.cuh"

namespace flashvar::sm90::causal_conv1d {
using flashvar::causal_conv1d::BwdLaunch;
}  // namespace flashvar::sm90::causal_conv1d
