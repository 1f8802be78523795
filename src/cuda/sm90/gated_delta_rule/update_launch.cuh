// Updates need nothing of this family: their kernels are those of every architecture.
#pragma once
#include "gated_delta_rule/update_launch.cuh"

namespace flashvar::sm90::gated_delta_rule {
using flashvar::gated_delta_rule::UpdateLaunch;
}  // namespace flashvar::sm90::gated_delta_rule
