// Turns that warpgroups take by named barriers, and registers that one gives to others.
#include "probe.h"
#include "ptx/warpgroup.cuh"

namespace {

namespace ptx = flashvar::ptx;

constexpr uint32_t kTurn = 2;
constexpr int kWarpgroups = 3;

// log: the warpgroups in the order in which they had their turns.
__global__ void turns(int* log, int rounds) {
  __shared__ int count;
  uint32_t const warpgroup = threadIdx.x / 128, next = (warpgroup + 1) % kWarpgroups;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (next == 0) ptx::named_barrier_arrive(kTurn, 256);
  for (int round = 0; round < rounds; ++round) {
    __nanosleep((threadIdx.x * 7919 + round * 104729) % 2000);
    ptx::named_barrier_sync(kTurn + warpgroup, 256);
    if (threadIdx.x % 128 == round % 128) {
      volatile int* const counter = &count;
      int const place = *counter;
      log[place] = warpgroup;
      *counter = place + 1;
    }
    ptx::named_barrier_arrive(kTurn + next, 256);
  }
  if (warpgroup == 0) ptx::named_barrier_sync(kTurn, 256);
}

constexpr int kHeld = 200;  // of 240; at the start a thread has 168

// Each of 256 threads holds kHeld values at once and writes them in the opposite order, each plus
// another one.
__global__ void __launch_bounds__(384, 1) registers(const float* data, float* out, int* producer) {
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    producer[threadIdx.x] = ptx::elect_one();
  } else {
    ptx::setmaxnreg_inc<240>();
    int const thread = threadIdx.x - 128;
    float held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = data[i * 256 + thread];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) asm volatile("" : "+f"(held[i])::"memory");
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      out[(kHeld - 1 - i) * 256 + thread] = held[i] + held[(i + 77) % kHeld];
    }
  }
}

}  // namespace

FLASHVAR_PROBE probe_turns(int* log, int rounds) {
  return probe::run(turns, 1, 128 * kWarpgroups, 0, log, rounds);
}

FLASHVAR_PROBE probe_registers(const float* data, float* out, int* producer) {
  return probe::run(registers, 1, 384, 0, data, out, producer);
}
