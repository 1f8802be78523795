// merge_states needs nothing of this family: its kernels are those of every architecture.
#pragma once
#include "merge_states/fwd_launch.cuh"

namespace flashvar::sm90::merge_states {
using flashvar::merge_states::FwdLaunch;
}  // namespace flashvar::sm90::merge_states
