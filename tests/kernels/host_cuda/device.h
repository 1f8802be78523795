// A block of threads on the host: they take turns, each as far as its next barrier.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_runtime_api.h"

struct Index {
  uint32_t x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct uint2 {
  uint32_t x, y;
};
struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};

// Shared memory, where sources address it by 32 bits.
alignas(1024) inline unsigned char shared_memory[232448];

struct Barrier {
  int threads, arrived = 0, round = 0;
};

// An asynchronous copy that a thread has started; zeros are written where the source does not
// exist.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  bool exists, ends_group;
};

// It begins once and runs block after block. Between the stacks go jumps: swapcontext sets the
// mask of signals, a system call that takes most of the time of a block.
struct Thread {
  static constexpr size_t kStackBytes = 256 << 10;

  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool begun = false;
  jmp_buf place;
  Barrier* barrier;  // the one it waits at
  int round;
  bool finished;
  std::vector<Copy> copies;

  bool waits() const { return barrier != nullptr && barrier->round == round; }
};

// Of the block that runs.
struct Block {
  jmp_buf scheduler;
  std::vector<Thread>& threads;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<float> exchanged;
  void (*run)(const void*);
  const void* what;
  bool copies_at_once;  // else at a wait for them

  void wait(Barrier& barrier) {
    Thread& thread = threads[threadIdx.x];
    if (++barrier.arrived == barrier.threads) {
      barrier.arrived = 0;
      ++barrier.round;
      return;
    }
    thread.barrier = &barrier;
    thread.round = barrier.round;
    leave(thread);
  }

  void leave(Thread& thread) {
    if (_setjmp(thread.place) == 0) _longjmp(scheduler, 1);
  }

  void resume(Thread& thread, void (*begin)()) {
    if (_setjmp(scheduler) != 0) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack = {thread.stack.get(), 0, Thread::kStackBytes};
    makecontext(&context, begin, 0);
    setcontext(&context);
  }
};
inline Block* block = nullptr;

inline void __syncthreads() { block->wait(block->all); }
inline void __syncwarp() { block->wait(block->warps[threadIdx.x / 32]); }

inline float __shfl_xor_sync(uint32_t, float value, int mask) {
  Barrier& warp = block->warps[threadIdx.x / 32];
  block->exchanged[threadIdx.x] = value;
  block->wait(warp);
  float const other = block->exchanged[threadIdx.x ^ mask];
  block->wait(warp);
  return other;
}

template <class Value>
Value __shfl_sync(uint32_t, Value value, int lane, int width = 32) {
  static_assert(sizeof(Value) == 4);
  Barrier& warp = block->warps[threadIdx.x / 32];
  std::memcpy(&block->exchanged[threadIdx.x], &value, 4);
  block->wait(warp);
  uint32_t const first = threadIdx.x / width * width;
  Value other;
  std::memcpy(&other, &block->exchanged[first + static_cast<uint32_t>(lane) % width], 4);
  block->wait(warp);
  return other;
}

inline float __shfl_up_sync(uint32_t all, float value, int distance) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(all, value, lane < distance ? lane : lane - distance);
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  Barrier& warp = block->warps[threadIdx.x / 32];
  block->exchanged[threadIdx.x] = value;
  block->wait(warp);
  uint32_t ballot = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    ballot |= uint32_t{block->exchanged[threadIdx.x / 32 * 32 + lane] != 0} << lane;
  }
  block->wait(warp);
  return ballot;
}

inline bool __any_sync(uint32_t all, bool value) { return __ballot_sync(all, value) != 0; }

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
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.f / std::sqrt(value); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
inline int __popcll(uint64_t bits) { return __builtin_popcountll(bits); }

template <class Element>
Element __ldg(const Element* from) {
  return *from;
}
// The end of a tensor, which no access may cross; null: none is checked.
extern "C" {
inline const void* end_of_tensor = nullptr;
}
// Ends the program if a device does not allow an access of so many bytes, which faults elsewhere
// than at a multiple of them, or if it goes beyond the tensor.
inline void check_access(const void* address, size_t bytes) {
  auto const begin = reinterpret_cast<uintptr_t>(address);
  auto const end = reinterpret_cast<uintptr_t>(end_of_tensor);
  bool const crosses = begin < end && begin + bytes > end;
  if (begin % bytes == 0 && !crosses) return;
  std::fprintf(stderr, "thread %u of block %u accesses %zu bytes at %p, %s\n", threadIdx.x,
               blockIdx.x, bytes, address, crosses ? "across a tensor's end" : "misaligned");
  std::abort();
}
template <class Element>
Element __ldcs(const Element* from) {
  check_access(from, sizeof(Element));
  return *from;
}
// Threads take turns.
inline uint32_t atomicOr(uint32_t* to, uint32_t bits) {
  uint32_t const before = *to;
  *to |= bits;
  return before;
}

inline void run_thread() {
  for (;;) {
    block->run(block->what);
    Thread& thread = block->threads[threadIdx.x];
    thread.finished = true;
    block->leave(thread);
  }
}

// Runs the threads of a block. Who goes first changes from turn to turn and from block to block,
// and when copies are made from every second block to the next, so that a barrier that is missing
// shows.
inline void run_block(int threads, void (*run)(const void*), const void* what) {
  static std::vector<Thread> pool;
  static bool backwards = false;
  static uint32_t blocks = 0;
  if (pool.size() < size_t(threads)) pool = std::vector<Thread>(threads);
  Block one{{},
            pool,
            {threads},
            std::vector<Barrier>(threads / 32, Barrier{32}),
            std::vector<float>(threads),
            run,
            what,
            (blocks++ & 2) != 0};
  block = &one;
  blockDim.x = threads;
  for (int index = 0; index < threads; ++index) {
    Thread& thread = pool[index];
    thread.barrier = nullptr;
    thread.finished = false;
    thread.copies.clear();
  }
  bool const first = backwards;
  for (int left = threads; left > 0; backwards = !backwards) {
    bool moved = false;
    for (int turn = 0; turn < threads; ++turn) {
      threadIdx.x = backwards ? threads - 1 - turn : turn;
      Thread& thread = pool[threadIdx.x];
      if (thread.finished || thread.waits()) continue;
      moved = true;
      one.resume(thread, run_thread);
      left -= thread.finished;
    }
    if (!moved) {
      std::fprintf(stderr, "%d threads wait at barriers that others do not reach\n", left);
      std::abort();
    }
  }
  backwards = !first;
}

template <class Kernel, class Args>
void run_blocks(Kernel* kernel, const Args& args, int64_t blocks, int threads) {
  auto const call = [kernel, &args] { kernel(args); };
  using Call = decltype(call);
  gridDim.x = static_cast<uint32_t>(blocks);
  for (uint32_t index = 0; index < blocks; ++index) {
    blockIdx.x = index;
    run_block(threads, [](const void* what) { (*static_cast<Call*>(what))(); }, &call);
  }
}
