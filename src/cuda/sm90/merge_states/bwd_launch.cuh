// merge_states needs nothing of this family: its kernels are those of every architecture.
#pragma once
#include "merge_states/bwd_launch.cuh"

namespace flashvar::sm90::merge_states {
using flashvar::merge_states::BwdLaunch;
}  // namespace flashvar::sm90::merge_states
