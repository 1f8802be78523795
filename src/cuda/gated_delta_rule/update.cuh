// The gated delta rule token by token, for decoding. Bound by memory: each element of a state is
// read once and written once, and stays in a register for all tokens in between.
//
// A warp holds all rows of a few columns of the state of one head; the warps of a block share a
// head. What all columns of a head need of a token (k, q and the gates) is prepared in shared
// memory once per block, one token per warp at a time, while the state is being loaded. Then one
// pass over a warp's registers gives for each token
//   predicted = S^T k,  read = S^T q
//   update = beta (v - decay predicted),  out = decay read + (k . q) update
//   S = decay S + k update^T
// so that lanes reduce sums once per token.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/math.cuh"
#include "core/vec.cuh"
#include "gated_delta_rule/gates.cuh"
#include "gated_delta_rule/problem.h"
#include "ptx/grid_dependency.cuh"

namespace flashvar::gated_delta_rule {

// Distribution of a state's elements over the lanes of a warp. kKFirst: columns are contiguous in
// memory ([head_dim_v][head_dim]), else rows are. A lane loads 16 contiguous bytes at once;
// adjacent lanes load at least 64 contiguous bytes together.
// kLanes: most lanes along K; 0: kMaxLanes chooses. kWarps_: most warps of a block.
template <class Dtype_, class StateDtype_, bool kKFirst_, int kDim_, int kLanes = 0,
          int kWarps_ = 4>
struct UpdateConfig {
  using Dtype = Dtype_;
  using StateDtype = StateDtype_;
  using Word = typename StateDtype::Word;
  using StateVec = Vec<StateDtype>;
  static constexpr bool kKFirst = kKFirst_;
  static constexpr int kDim = kDim_;  // the most rows of a state: a power of two
  // Consecutive rows that a lane has in one run.
  static constexpr int kRun = kKFirst ? StateVec::kElements : 8;
  // Most lanes along K. The fewer, the more lie along V, where adjacent lanes then load up to 128
  // contiguous bytes; but each lane has more rows, which its registers must hold.
  static constexpr int kMaxLanes = kLanes > 0    ? kLanes
                                   : kDim == 256 ? (kKFirst || StateVec::kElements == 8 ? 16 : 8)
                                                 : (!kKFirst && StateVec::kElements == 4 ? 4 : 8);
  static constexpr int kLanesK = kDim / kRun < kMaxLanes ? kDim / kRun : kMaxLanes;
  static constexpr int kLanesV = 32 / kLanesK;
  static constexpr int kRows = kDim / kLanesK, kRuns = kRows / kRun;  // of a lane
  static constexpr int kColumns =
      !kKFirst ? StateVec::kElements : (64 / kRows < 8 ? 64 / kRows : 8);
  static constexpr int kVecs = kRows * kColumns / StateVec::kElements;
  static constexpr int kWarpColumns = kLanesV * kColumns;
  static constexpr int kWarps = kWarps_;
  // Blocks per SM that the registers are limited for: some load while others compute or store.
  static constexpr int kBlocks = kRows * kColumns > 64 ? 2 : 4;
  static_assert(kRun % 4 == 0 && kColumns % 4 == 0, "rows and columns are read four at a time");
  static_assert(kWarps * kWarpColumns % 32 == 0, "a warp loads v in whole steps");
};

struct UpdateArgs {
  UpdateProblem problem;
  int32_t tiles;  // blocks per state
  // Whether states are aligned for 16-byte accesses.
  bool initial_aligned, final_aligned;
};

// A token's inputs to the columns of a block, in fp32: k and q, normalized if the call normalizes
// rows, q scaled, and v.
template <class C>
struct UpdateToken {
  float k[C::kDim], q[C::kDim];
  float v[C::kWarps * C::kWarpColumns];
  float decay, beta, k_q, unused;
};

// The work of a block, and the coordinates of a lane in it.
template <class C>
struct UpdateTile {
  int64_t sequence, head, batch;
  int64_t state_index;  // negative: there is no state
  Span span;
  int32_t first_column, column;  // of the block in V; of the lane within the block
  int32_t lane_k;

  __device__ __forceinline__ explicit UpdateTile(const UpdateArgs& args) {
    const UpdateProblem& problem = args.problem;
    uint32_t const row = blockIdx.x / args.tiles;
    uint32_t const index = row / problem.heads;
    int32_t const lane_id = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const lane_v = C::kKFirst ? lane_id / C::kLanesK : lane_id % C::kLanesV;
    lane_k = C::kKFirst ? lane_id % C::kLanesK : lane_id / C::kLanesV;
    sequence = index;
    head = row - index * problem.heads;
    first_column = static_cast<int32_t>(blockIdx.x - row * args.tiles) *
                   (static_cast<int32_t>(blockDim.x) / 32 * C::kWarpColumns);
    column = static_cast<int32_t>(threadIdx.x) / 32 * C::kWarpColumns + lane_v * C::kColumns;
    span = problem.rows.span(index);
    batch = problem.rows.offsets == nullptr ? sequence : 0;
  }

  __device__ __forceinline__ void load_state_index(const UpdateProblem& problem) {
    state_index = problem.state_indices[sequence];
    if (state_index >= problem.states) state_index = -1;
  }

  // Sum over the lanes that share columns. All of them get it, bit for bit the same.
  static __device__ __forceinline__ float sum(float value) {
    constexpr int kStride = C::kKFirst ? 1 : C::kLanesV;
#pragma unroll
    for (int step = kStride; step < kStride * C::kLanesK; step *= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
  }

  // Row of the lane's element i.
  __device__ __forceinline__ int32_t row(int i) const {
    return (i / C::kRun * C::kLanesK + lane_k) * C::kRun + i % C::kRun;
  }

  // Calls f(i, address, count) for each 16 bytes of the lane's part of a state; `count`: how many
  // of their elements lie within the state.
  template <class F>
  __device__ __forceinline__ void for_each_vec(const UpdateProblem& problem,
                                               const StateView<void>& states, bool aligned,
                                               F f) const {
    using Word = typename C::Word;
    int64_t const k_stride = C::kKFirst && aligned ? 1 : states.k_stride;
    int64_t const v_stride = !C::kKFirst && aligned ? 1 : states.v_stride;
    int32_t const first_k = row(0), first_v = first_column + column;
    // Addresses are computed incrementally: multiples of the strides would be kept in registers.
    int64_t const next_run = C::kRun * C::kLanesK * k_stride;
    int64_t const next_run_row = next_run - (C::kRun - 1) * k_stride;
    Word* start = static_cast<Word*>(states.data) + state_index * states.sequence_stride +
                  head * states.head_stride + first_k * k_stride + first_v * v_stride;
    Word* address = start;
#pragma unroll
    for (int i = 0; i < C::kVecs; ++i) {
      if (i > 0) {
        if constexpr (!C::kKFirst) {
          address += i % C::kRun == 0 ? next_run_row : k_stride;
        } else if (i % C::kRuns == 0) {
          address = start += v_stride;
        } else {
          address += next_run;
        }
      }
      // Relative to the lane's first row: distances are the same in every lane.
      int const rows = C::kKFirst ? i % C::kRuns * (C::kRun * C::kLanesK)
                                  : i / C::kRun * (C::kRun * C::kLanesK) + i % C::kRun;
      int const columns = C::kKFirst ? i / C::kRuns : 0;
      int32_t const k = problem.head_dim - first_k - rows;
      int32_t const v = problem.head_dim_v - first_v - columns;
      f(i, address, k > 0 && v > 0 ? (C::kKFirst ? k : v) : 0);
    }
  }
};

// Loads the lane's part of a state without converting it, so that nothing waits for the loads yet.
template <class C>
__device__ __forceinline__ void load_state(typename C::StateVec (&vecs)[C::kVecs],
                                           const UpdateProblem& problem, const UpdateTile<C>& tile,
                                           bool aligned) {
  using Word = typename C::Word;
  constexpr int kElements = C::StateVec::kElements;
  const StateView<void>& states = problem.initial_state;
  bool const exists = states.data != nullptr && tile.state_index >= 0;
  if (aligned) {
    tile.for_each_vec(problem, states, true, [&](int i, const Word* from, int32_t count) {
      vecs[i].template load<true>(from, exists ? count : 0);
    });
    return;
  }
  int64_t const stride = C::kKFirst ? states.k_stride : states.v_stride;
  tile.for_each_vec(problem, states, false, [&](int i, const Word* from, int32_t count) {
    Word words[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e, from += stride) {
      words[e] = exists && e < count ? *from : Word{0};
    }
    memcpy(&vecs[i].words, words, sizeof(words));
  });
}

// Calls f(i, value) for the lane's rows of a vector in shared memory.
template <class C, class F>
__device__ __forceinline__ void for_each_row(const float* vector, const UpdateTile<C>& tile, F f) {
#pragma unroll
  for (int i = 0; i < C::kRows; i += 4) {
    float4 const four = *reinterpret_cast<const float4*>(vector + tile.row(i));
    f(i, four.x), f(i + 1, four.y), f(i + 2, four.z), f(i + 3, four.w);
  }
}

// S^T k and S^T q of the lane's columns: sums over its own rows.
template <class C>
struct UpdateSums {
  float predicted[C::kColumns] = {}, read[C::kColumns] = {};

  // Adds up the lanes that share the columns, and sets update and out of the token in all of them.
  __device__ __forceinline__ void finish(const UpdateToken<C>& token, const UpdateTile<C>& tile,
                                         float (&update)[C::kColumns],
                                         float (&out)[C::kColumns]) const {
    float v[C::kColumns];
#pragma unroll
    for (int j = 0; j < C::kColumns; j += 4) {
      float4 const four = *reinterpret_cast<const float4*>(token.v + tile.column + j);
      v[j] = four.x, v[j + 1] = four.y, v[j + 2] = four.z, v[j + 3] = four.w;
    }
    float const decay = token.decay, beta = token.beta, k_q = token.k_q;
#pragma unroll
    for (int j = 0; j < C::kColumns; ++j) {
      update[j] = beta * (v[j] - decay * tile.sum(predicted[j]));
      out[j] = fmaf(k_q, update[j], decay * tile.sum(read[j]));
    }
  }
};

// The lane's part of a state, in fp32.
template <class C>
struct UpdateState {
  using Tile = UpdateTile<C>;
  using Word = typename C::Word;
  static constexpr int kElements = C::StateVec::kElements;
  float elements[C::kRows][C::kColumns];

  __device__ __forceinline__ explicit UpdateState(const typename C::StateVec (&vecs)[C::kVecs]) {
#pragma unroll
    for (int i = 0; i < C::kVecs; ++i) {
      float values[kElements];
      vecs[i].unpack(values);
#pragma unroll
      for (int e = 0; e < kElements; ++e) element(i, e) = values[e];
    }
  }

  __device__ __forceinline__ void store(const UpdateProblem& problem, const Tile& tile,
                                        bool aligned) {
    if (problem.final_state.data == nullptr || tile.state_index < 0) return;
    if (aligned) {
      tile.for_each_vec(problem, problem.final_state, true, [&](int i, Word* to, int32_t count) {
        packed(i).template store<true>(to, count);
      });
      return;
    }
    int64_t const stride = C::kKFirst ? problem.final_state.k_stride : problem.final_state.v_stride;
    tile.for_each_vec(problem, problem.final_state, false, [&](int i, Word* to, int32_t count) {
      typename C::StateVec const vec = packed(i);
      Word words[kElements];
      memcpy(words, &vec.words, sizeof(words));
#pragma unroll
      for (int e = 0; e < kElements; ++e, to += stride) {
        if (e < count) *to = words[e];
      }
    });
  }

  // Processes one token: returns out for the lane's columns, in every lane that shares them, and
  // updates the state.
  __device__ __forceinline__ void step(const UpdateToken<C>& token, const Tile& tile,
                                       float (&out)[C::kColumns]) {
    UpdateSums<C> sums;
    for_each_row(token.k, tile, [&](int i, float k) {
#pragma unroll
      for (int j = 0; j < C::kColumns; ++j) {
        sums.predicted[j] = fmaf(elements[i][j], k, sums.predicted[j]);
      }
    });
    for_each_row(token.q, tile, [&](int i, float q) {
#pragma unroll
      for (int j = 0; j < C::kColumns; ++j) sums.read[j] = fmaf(elements[i][j], q, sums.read[j]);
    });
    float update[C::kColumns];
    sums.finish(token, tile, update, out);
    float const decay = token.decay;
    for_each_row(token.k, tile, [&](int i, float k) {
#pragma unroll
      for (int j = 0; j < C::kColumns; ++j) {
        elements[i][j] = fmaf(k, update[j], decay * elements[i][j]);
      }
    });
  }

 private:
  // Element e of the lane's Vec i.
  __device__ __forceinline__ float& element(int i, int e) {
    return C::kKFirst ? elements[i % C::kRuns * C::kRun + e][i / C::kRuns] : elements[i][e];
  }

  __device__ __forceinline__ typename C::StateVec packed(int i) {
    float values[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) values[e] = element(i, e);
    typename C::StateVec vec;
    vec.pack(values);
    return vec;
  }
};

// The unconverted inputs of a token that a warp prepares.
template <class C>
struct UpdateInputs {
  static constexpr int kSteps = C::kDim / 32, kValues = C::kWarps * C::kWarpColumns / 32;
  uint16_t k[kSteps], q[kSteps], v[kValues];
  GateBits gates;

  // `row`: row of the token in the tensors.
  __device__ __forceinline__ void load(const UpdateProblem& problem, const UpdateTile<C>& tile,
                                       int64_t row) {
    int32_t const lane_id = static_cast<int32_t>(threadIdx.x) % 32;
    auto const address_of = [&](const Tensor& tensor, int64_t head) {
      return tensor.data + tile.batch * tensor.batch_stride + row * tensor.seq_stride +
             head * tensor.head_stride;
    };
    int64_t const head_qk = static_cast<uint32_t>(tile.head) / problem.group;
    const uint16_t* const from_k = address_of(problem.k, head_qk);
    const uint16_t* const from_q = address_of(problem.q, head_qk);
    const uint16_t* const from_v = address_of(problem.v, tile.head) + tile.first_column;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int32_t const column = 32 * i + lane_id;
      bool const exists = column < problem.head_dim;
      k[i] = exists ? from_k[column] : uint16_t{0};
      q[i] = exists ? from_q[column] : uint16_t{0};
    }
    int32_t const columns = min(static_cast<int32_t>(blockDim.x) / 32 * C::kWarpColumns,
                                problem.head_dim_v - tile.first_column);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      v[j] = 32 * j + lane_id < columns ? from_v[32 * j + lane_id] : uint16_t{0};
    }
    gates = GateBits(problem, {tile.batch, row, tile.head});
  }

  // Called by all lanes of the warp.
  __device__ __forceinline__ void prepare(const UpdateProblem& problem,
                                          UpdateToken<C>& token) const {
    using Dtype = typename C::Dtype;
    int32_t const lane_id = static_cast<int32_t>(threadIdx.x) % 32;
    float k_k = 0.f, q_q = 0.f, k_q = 0.f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float const k_value = Dtype::unpack(k[i]), q_value = Dtype::unpack(q[i]);
      k_k = fmaf(k_value, k_value, k_k);
      q_q = fmaf(q_value, q_value, q_q);
      k_q = fmaf(k_value, q_value, k_q);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      k_k += __shfl_xor_sync(0xffffffffu, k_k, step);
      q_q += __shfl_xor_sync(0xffffffffu, q_q, step);
      k_q += __shfl_xor_sync(0xffffffffu, k_q, step);
    }
    float const norm_k = problem.qk_l2norm ? rsqrtf(k_k + 1e-6f) : 1.f;
    float const norm_q = problem.scale * (problem.qk_l2norm ? rsqrtf(q_q + 1e-6f) : 1.f);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      token.k[32 * i + lane_id] = norm_k * Dtype::unpack(k[i]);
      token.q[32 * i + lane_id] = norm_q * Dtype::unpack(q[i]);
    }
#pragma unroll
    for (int j = 0; j < kValues; ++j) token.v[32 * j + lane_id] = Dtype::unpack(v[j]);
    if (lane_id == 0) {
      token.decay = exp2_approx(gates.decay_log(problem) * kLog2E);
      token.beta = gates.beta_of(problem);
      token.k_q = norm_k * norm_q * k_q;
    }
  }
};

// Stores out for the lane's columns. The lanes that share them store a different column each.
template <class C>
__device__ __forceinline__ void store_out(const UpdateProblem& problem, const UpdateTile<C>& tile,
                                          int64_t row, const float (&out)[C::kColumns]) {
  int32_t const column = tile.first_column + tile.column;
  uint16_t* const to = problem.out.data + tile.batch * problem.out.batch_stride +
                       row * problem.out.seq_stride + tile.head * problem.out.head_stride + column;
#pragma unroll
  for (int first = 0; first < C::kColumns; first += C::kLanesK) {
    float mine = 0.f;
#pragma unroll
    for (int j = first; j < first + C::kLanesK && j < C::kColumns; ++j) {
      if (tile.lane_k == j - first) mine = out[j];
    }
    int32_t const j = first + tile.lane_k;
    if (j < C::kColumns && column + j < problem.head_dim_v) {
      to[j] = static_cast<uint16_t>(C::Dtype::pack(mine, 0.f));
    }
  }
}

template <class C>
__global__ void __launch_bounds__(32 * C::kWarps, C::kBlocks)
    update_kernel(const __grid_constant__ UpdateArgs args) {
  __shared__ __align__(16) UpdateToken<C> tokens[C::kWarps];
  const UpdateProblem& problem = args.problem;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  UpdateTile<C> tile(args);
  int32_t const count = tile.span.count;
  bool const in_place = problem.initial_state.data == problem.final_state.data;
  if (count == 0 && in_place) return;

  // Loads are issued in the order in which they are waited for, without conversions in between,
  // which would wait.
  auto const warp = static_cast<int32_t>(threadIdx.x) / 32;
  auto const warps = static_cast<int32_t>(blockDim.x) / 32;
  UpdateInputs<C> inputs;
  if (warp < count) inputs.load(problem, tile, int64_t{tile.span.first} + warp);
  tile.load_state_index(problem);
  typename C::StateVec vecs[C::kVecs];
  load_state<C>(vecs, problem, tile, args.initial_aligned);
  if (warp < count) inputs.prepare(problem, tokens[warp]);
  __syncthreads();  // all warps have written their tokens

  UpdateState<C> state(vecs);
#pragma unroll 1
  for (int32_t first = 0; first < count; first += warps) {
    int64_t const row = int64_t{tile.span.first} + first;
    if (first > 0) {
      __syncthreads();  // all warps have read the last tokens, which the next overwrite
      if (first + warp < count) {
        inputs.load(problem, tile, row + warp);
        inputs.prepare(problem, tokens[warp]);
      }
      __syncthreads();  // all warps have written their tokens
    }
    int32_t const here = min(count - first, warps);
#pragma unroll 1
    for (int32_t t = 0; t < here; ++t) {
      float out[C::kColumns];
      state.step(tokens[t], tile, out);
      store_out<C>(problem, tile, row + t, out);
    }
  }
  state.store(problem, tile, args.final_aligned);
}

}  // namespace flashvar::gated_delta_rule
