// Stands for src/cuda/ptx/warpgroup.cuh: named barriers and elect.
#pragma once
#include <map>

#include "device.h"

namespace flashvar::ptx {

inline std::map<uint32_t, Barrier> named_barriers;

inline void named_barrier_sync(uint32_t barrier, uint32_t threads) {
  Barrier const fresh{static_cast<int>(threads)};
  block->wait(named_barriers.try_emplace(barrier, fresh).first->second);
}

inline bool elect_one() { return threadIdx.x % 32 == 0; }

}  // namespace flashvar::ptx
