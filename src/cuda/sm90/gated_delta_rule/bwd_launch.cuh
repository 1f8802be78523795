// The backward needs nothing of this family: its kernels are those of sm_80.
#pragma once
#include "sm80/gated_delta_rule/bwd_launch.cuh"

namespace flashvar::sm90::gated_delta_rule {
using sm80::gated_delta_rule::BwdLaunch;
}  // namespace flashvar::sm90::gated_delta_rule
