// Stands for src/cuda/ptx/mbarrier.cuh. TMA loads are made no sooner than a wait for them; in some
// blocks as soon as they are started (cp_async.cuh). A thread that waits for a barrier that is not
// initialized, or for bytes that nobody loads, ends the program.
#pragma once
#include <functional>
#include <map>
#include <vector>

#include "device.h"

namespace flashvar::ptx {

struct Mbarrier {
  Barrier phase;
  int64_t bytes = 0;  // that are expected
  bool awaited = false;
  std::vector<std::function<void()>> loads;

  void start(std::function<void()> load) {
    loads.push_back(std::move(load));
    if (block->copies_at_once || awaited) finish_loads();
  }
  void finish_loads() {
    auto const started = std::move(loads);
    loads.clear();
    for (const auto& load : started) load();
  }
  void count(int arrivals, int64_t more_bytes) {
    phase.arrived += arrivals;
    bytes += more_bytes;
    if (phase.arrived < phase.threads || bytes != 0) return;
    phase.arrived = 0;
    awaited = false;
    ++phase.round;
  }
};
inline std::map<uint32_t, Mbarrier> mbarriers;  // by address

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  mbarriers[barrier] = {{static_cast<int>(arrivals)}};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) { mbarriers.at(barrier).count(1, 0); }
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  mbarriers.at(barrier).count(1, bytes);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  Mbarrier& one = mbarriers.at(barrier);
  Barrier& phase = one.phase;
  one.finish_loads();
  if (static_cast<uint32_t>(phase.round) % 2 != parity) return;
  one.awaited = true;
  Thread& thread = block->threads[threadIdx.x];
  thread.barrier = &phase;
  thread.round = phase.round;
  block->leave(thread);
}

}  // namespace flashvar::ptx
