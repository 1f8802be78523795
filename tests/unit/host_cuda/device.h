// A block of threads on the host: each of its threads is one of the system's.
#pragma once
#include <pthread.h>

#include <thread>
#include <vector>

#include "cuda_runtime_api.h"

struct Index {
  uint32_t x;
};
inline thread_local Index threadIdx, blockIdx;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

// Of the block that runs.
struct Block {
  pthread_barrier_t all;
  std::vector<pthread_barrier_t> warps;
  std::vector<float> exchanged;

  explicit Block(int threads) : warps(threads / 32), exchanged(threads) {
    pthread_barrier_init(&all, nullptr, threads);
    for (pthread_barrier_t& warp : warps) pthread_barrier_init(&warp, nullptr, 32);
  }
};
inline Block* block = nullptr;

inline void __syncthreads() { pthread_barrier_wait(&block->all); }

inline float __shfl_xor_sync(uint32_t, float value, int mask) {
  pthread_barrier_t* const warp = &block->warps[threadIdx.x / 32];
  block->exchanged[threadIdx.x] = value;
  pthread_barrier_wait(warp);
  float const other = block->exchanged[threadIdx.x ^ mask];
  pthread_barrier_wait(warp);
  return other;
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  pthread_barrier_t* const warp = &block->warps[threadIdx.x / 32];
  block->exchanged[threadIdx.x] = value;
  pthread_barrier_wait(warp);
  uint32_t ballot = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    ballot |= uint32_t{block->exchanged[threadIdx.x / 32 * 32 + lane] != 0} << lane;
  }
  pthread_barrier_wait(warp);
  return ballot;
}

template <class To, class From>
To bits_of(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __int_as_float(int32_t bits) { return bits_of<float>(bits); }
inline float __uint_as_float(uint32_t bits) { return bits_of<float>(bits); }
inline uint32_t __float_as_uint(float value) { return bits_of<uint32_t>(value); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __popcll(uint64_t bits) { return __builtin_popcountll(bits); }

template <class Element>
Element __ldg(const Element* from) {
  return *from;
}
template <class Element>
Element __ldcs(const Element* from) {
  return *from;
}

template <class Kernel, class Args>
void run_blocks(Kernel* kernel, const Args& args, int64_t blocks, int threads) {
  for (uint32_t index = 0; index < blocks; ++index) {
    Block one(threads);
    block = &one;
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread) {
      running.emplace_back([=, &args] {
        threadIdx.x = thread;
        blockIdx.x = index;
        kernel(args);
      });
    }
    for (std::thread& each : running) each.join();
  }
}
