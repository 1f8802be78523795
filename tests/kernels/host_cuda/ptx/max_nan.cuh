// Stands for src/cuda/ptx/max_nan.cuh.
#pragma once

namespace flashvar::ptx {

inline float max_nan(float a, float b) { return a != a || a > b ? a : b; }

}  // namespace flashvar::ptx
