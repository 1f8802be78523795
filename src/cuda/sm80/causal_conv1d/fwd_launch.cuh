// causal_conv1d needs nothing of this family: its kernels are those of every architecture.
#pragma once
#include "causal_conv1d/fwd_launch.cuh"

namespace flashvar::sm80::causal_conv1d {
using flashvar::causal_conv1d::FwdLaunch;
}  // namespace flashvar::sm80::causal_conv1d
