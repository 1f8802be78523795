// Stands for src/cuda/ptx/special_registers.cuh.
#pragma once
#include "device.h"

namespace flashvar::ptx {

inline uint32_t thread_index() { return threadIdx.x; }
inline uint32_t block_index() { return blockIdx.x; }

}  // namespace flashvar::ptx
