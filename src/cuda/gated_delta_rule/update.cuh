// The gated delta rule token by token. Bound by memory: each element of a state is read once and
// written once, and for all tokens between stays in a register.
//
// A warp has all rows of a few columns of the state of one head. For each token, from one pass over
// its registers,
//   known = decay S^T k,  read = decay S^T q
//   update = beta (v - known),  out = scale (read + (k . q) update)
//   S = decay S + k update^T
// so that lanes exchange sums once a token. Warps share nothing.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/chunk.cuh"
#include "core/math.cuh"
#include "gated_delta_rule/gates.cuh"
#include "gated_delta_rule/problem.h"
#include "ptx/grid_dependency.cuh"

namespace flashvar::gated_delta_rule {

// How the elements of a state are spread over the lanes of a warp. kKFirst: elements of a column
// are neighbours in memory ([head_dim_v][head_dim]), else those of a row. Lanes load 16 bytes of
// neighbours at once, and 64 bytes or more of neighbours together.
template <class Dtype_, class StateDtype_, bool kKFirst_, int kDim_>
struct UpdateConfig {
  using Dtype = Dtype_;
  using StateDtype = StateDtype_;
  using States = Chunk<StateDtype>;
  static constexpr bool kKFirst = kKFirst_;
  static constexpr int kDim = kDim_;  // rows of a state that there is room for: a power of two
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  // Neighbouring rows of a lane: of one load of the state, or of q and k.
  static constexpr int kRun = kKFirst ? States::kElements : 8;
  static constexpr int kMostLanes = kDim == 256 && (kKFirst || States::kElements == 8) ? 16 : 8;
  static constexpr int kLanesK = kDim / kRun < kMostLanes ? kDim / kRun : kMostLanes;
  static constexpr int kLanesV = 32 / kLanesK;
  static constexpr int kRows = kDim / kLanesK, kRuns = kRows / kRun;
  static constexpr int kColumns =
      !kKFirst ? States::kElements : (64 / kRows < 8 ? 64 / kRows : 8);  // of a lane
  static constexpr int kWarpColumns = kLanesV * kColumns;
  // Blocks of a multiprocessor: as many as the registers of the states leave room for.
  static constexpr int kBlocks = kRows * kColumns > 64 ? 2 : 3;
};

struct UpdateArgs {
  UpdateProblem problem;
  int32_t tiles;  // warps of a state
  int32_t warps;
  // Whether 16 bytes may be accessed at once: rows of q and k; neighbours in states.
  bool inputs_aligned, initial_aligned, final_aligned;
};

// The work of a warp, and the place of a lane in it.
template <class C>
struct UpdateTile {
  int64_t sequence, head, batch, place;  // of the state; -1: there is none
  Span span;
  int32_t column;  // the lane's first of V
  int32_t lane_k;

  __device__ __forceinline__ UpdateTile(const UpdateArgs& args, uint32_t warp) {
    const UpdateProblem& problem = args.problem;
    uint32_t const row = warp / args.tiles;
    uint32_t const index = row / problem.heads;
    uint32_t const lane = threadIdx.x % 32;
    sequence = index;
    head = row - index * problem.heads;
    lane_k = static_cast<int32_t>(lane) % C::kLanesK;
    column = static_cast<int32_t>(warp - row * args.tiles) * C::kWarpColumns +
             static_cast<int32_t>(lane) / C::kLanesK * C::kColumns;
    if constexpr (!C::kKFirst) {  // neighbouring lanes have neighbouring columns
      lane_k = static_cast<int32_t>(lane) / C::kLanesV;
      column = static_cast<int32_t>(warp - row * args.tiles) * C::kWarpColumns +
               static_cast<int32_t>(lane) % C::kLanesV * C::kColumns;
    }
    span = problem.rows.span(index);
    batch = problem.rows.offsets == nullptr ? sequence : 0;
    place = problem.indices[sequence];
    if (place >= problem.states) place = -1;
  }

  // Adds up a value of the lanes that share columns; all of them have the sum then, of the same
  // bits.
  static __device__ __forceinline__ float sum(float value) {
    constexpr int kStride = C::kKFirst ? 1 : C::kLanesV;
#pragma unroll
    for (int step = kStride; step < kStride * C::kLanesK; step *= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
  }

  // The row of a lane's element.
  __device__ __forceinline__ int32_t row(int i) const {
    return (i / C::kRun * C::kLanesK + lane_k) * C::kRun + i % C::kRun;
  }

  // Calls f(chunk, address of its first element, how many of its elements exist, stride) for each
  // 16 bytes of the lane's part of a state.
  template <class F>
  __device__ __forceinline__ void each_chunk(const UpdateProblem& problem,
                                             const StateView<void>& states, F f) const {
    using Word = typename C::StateDtype::Word;
    constexpr int kChunks = C::kRows * C::kColumns / C::States::kElements;
    Word* const state = static_cast<Word*>(states.data) + place * states.sequence_stride +
                        head * states.head_stride;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      int32_t const k = row(C::kKFirst ? i % C::kRuns * C::kRun : i);
      int32_t const v = column + (C::kKFirst ? i / C::kRuns : 0);
      bool const exists = k < problem.head_dim && v < problem.head_dim_v;
      int32_t const left = C::kKFirst ? problem.head_dim - k : problem.head_dim_v - v;
      f(i, state + k * states.k_stride + v * states.v_stride, exists ? left : 0,
        C::kKFirst ? states.k_stride : states.v_stride);
    }
  }
};

// The lane's part of a state, in fp32.
template <class C>
struct UpdateState {
  using Tile = UpdateTile<C>;
  using Word = typename C::StateDtype::Word;
  static constexpr int kElements = C::States::kElements;
  float elements[C::kRows][C::kColumns];

  // Element e of chunk i.
  __device__ __forceinline__ float& of_chunk(int i, int e) {
    return C::kKFirst ? elements[i % C::kRuns * C::kRun + e][i / C::kRuns] : elements[i][e];
  }

  __device__ __forceinline__ void load(const UpdateProblem& problem, const Tile& tile,
                                       bool aligned) {
    typename C::States chunks[C::kRows * C::kColumns / kElements];
    bool const exists = problem.initial_state.data != nullptr && tile.place >= 0;
    tile.each_chunk(problem, problem.initial_state,
                    [&](int i, const Word* from, int32_t count, int64_t stride) {
                      if (!exists) count = 0;
                      if (aligned) {
                        chunks[i].template load<true>(from, count);
                        return;
                      }
                      Word words[kElements];
#pragma unroll
                      for (int e = 0; e < kElements; ++e) {
                        words[e] = e < count ? from[e * stride] : Word{0};
                      }
                      memcpy(&chunks[i].bits, words, sizeof(words));
                    });
#pragma unroll
    for (int i = 0; i < C::kRows * C::kColumns / kElements; ++i) {
      float values[kElements];
      chunks[i].unpack(values);
#pragma unroll
      for (int e = 0; e < kElements; ++e) of_chunk(i, e) = values[e];
    }
  }

  __device__ __forceinline__ void store(const UpdateProblem& problem, const Tile& tile,
                                        bool aligned) {
    if (problem.final_state.data == nullptr || tile.place < 0) return;
    tile.each_chunk(problem, problem.final_state,
                    [&](int i, Word* to, int32_t count, int64_t stride) {
                      float values[kElements];
#pragma unroll
                      for (int e = 0; e < kElements; ++e) values[e] = of_chunk(i, e);
                      typename C::States chunk;
                      chunk.pack(values);
                      if (aligned) {
                        chunk.template store<true>(to, count);
                        return;
                      }
                      Word words[kElements];
                      memcpy(words, &chunk.bits, sizeof(words));
#pragma unroll
                      for (int e = 0; e < kElements; ++e) {
                        if (e < count) to[e * stride] = words[e];
                      }
                    });
  }
};

// What a token brings: the lane's rows of k and q, and its columns of v, as they are in memory.
template <class C>
struct UpdateToken {
  uint32_t k[C::kRows / 2], q[C::kRows / 2];
  uint16_t v[C::kColumns];
  float decay, beta;

  // `row`: of the tensors.
  __device__ __forceinline__ void load(const UpdateArgs& args, const UpdateTile<C>& tile,
                                       int64_t row) {
    const UpdateProblem& problem = args.problem;
    int64_t const head_qk = static_cast<uint32_t>(tile.head) / problem.group;
    auto const at = [&](const Tensor& tensor, int64_t head) {
      return tensor.data + tile.batch * tensor.batch_stride + row * tensor.seq_stride +
             head * tensor.head_stride;
    };
    load_rows(k, at(problem.k, head_qk), problem.head_dim, tile, args.inputs_aligned);
    load_rows(q, at(problem.q, head_qk), problem.head_dim, tile, args.inputs_aligned);
    const uint16_t* const values = at(problem.v, tile.head) + tile.column;
#pragma unroll
    for (int j = 0; j < C::kColumns; ++j) {
      v[j] = tile.column + j < problem.head_dim_v ? values[j] : uint16_t{0};
    }
    GatePlace const place{tile.batch, row, tile.head};
    decay = exp2_approx(decay_log(problem, place) * (1.f / kLn2));
    beta = beta_of(problem, place);
  }

  static __device__ __forceinline__ float element(const uint32_t (&words)[C::kRows / 2], int i) {
    return C::Dtype::unpack(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
  }

 private:
  static __device__ __forceinline__ void load_rows(uint32_t (&words)[C::kRows / 2],
                                                   const uint16_t* from, int32_t head_dim,
                                                   const UpdateTile<C>& tile, bool aligned) {
#pragma unroll
    for (int i = 0; i < C::kRows; i += C::kRun) {
      int32_t const first = tile.row(i), count = head_dim - first;
      uint32_t* const run = words + i / 2;
      if (aligned) {
        using Run = std::conditional_t<C::kRun == 8, uint4, uint2>;
        Run const bits = count > 0 ? *reinterpret_cast<const Run*>(from + first) : Run{};
        memcpy(run, &bits, sizeof(bits));
        continue;
      }
#pragma unroll
      for (int e = 0; e < C::kRun; e += 2) {
        uint32_t const low = e < count ? from[first + e] : 0;
        uint32_t const high = e + 1 < count ? from[first + e + 1] : 0;
        run[e / 2] = low | high << 16;
      }
    }
  }
};

// One token: out, in each lane of all its columns, and the state after it.
template <class C>
__device__ __forceinline__ void update_state(const UpdateProblem& problem,
                                             const UpdateToken<C>& token, UpdateState<C>& state,
                                             float (&out)[C::kColumns]) {
  using Tile = UpdateTile<C>;
  float known[C::kColumns] = {}, read[C::kColumns] = {};
  float k_q = 0.f, k_k = 0.f, q_q = 0.f;
#pragma unroll
  for (int i = 0; i < C::kRows; ++i) {
    float const k = token.element(token.k, i), q = token.element(token.q, i);
    k_q = fmaf(k, q, k_q);
    k_k = fmaf(k, k, k_k);
    q_q = fmaf(q, q, q_q);
#pragma unroll
    for (int j = 0; j < C::kColumns; ++j) {
      known[j] = fmaf(state.elements[i][j], k, known[j]);
      read[j] = fmaf(state.elements[i][j], q, read[j]);
    }
  }
  float norm_k = 1.f, factor = problem.scale;
  if (problem.qk_l2norm) {
    norm_k = rsqrtf(Tile::sum(k_k) + 1e-6f);
    factor *= rsqrtf(Tile::sum(q_q) + 1e-6f);
  }
  k_q = Tile::sum(k_q);
#pragma unroll
  for (int j = 0; j < C::kColumns; ++j) {
    // k is not normalised in memory: its factor is part of what it is multiplied by.
    float const before = token.decay * norm_k * Tile::sum(known[j]);
    float const update = norm_k * token.beta * (C::Dtype::unpack(token.v[j]) - before);
    out[j] = factor * fmaf(k_q, update, token.decay * Tile::sum(read[j]));
#pragma unroll
    for (int i = 0; i < C::kRows; ++i) {
      state.elements[i][j] =
          fmaf(token.element(token.k, i), update, token.decay * state.elements[i][j]);
    }
  }
}

// Stores a lane's columns of out, each by another of the lanes that have it.
template <class C>
__device__ __forceinline__ void store_out(const UpdateProblem& problem, const UpdateTile<C>& tile,
                                          int64_t row, const float (&out)[C::kColumns]) {
  uint16_t* const to = problem.out.data + tile.batch * problem.out.batch_stride +
                       row * problem.out.seq_stride + tile.head * problem.out.head_stride;
#pragma unroll
  for (int first = 0; first < C::kColumns; first += C::kLanesK) {
    float mine = 0.f;
#pragma unroll
    for (int j = first; j < first + C::kLanesK && j < C::kColumns; ++j) {
      if (tile.lane_k == j - first) mine = out[j];
    }
    int32_t const j = first + tile.lane_k;
    if (j < C::kColumns && tile.column + j < problem.head_dim_v) {
      to[tile.column + j] = static_cast<uint16_t>(C::Dtype::pack(mine, 0.f));
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    update_kernel(const __grid_constant__ UpdateArgs args) {
  ptx::griddepcontrol_launch_dependents();
  const UpdateProblem& problem = args.problem;
  uint32_t const warp = blockIdx.x * C::kWarps + threadIdx.x / 32;
  if (warp >= static_cast<uint32_t>(args.warps)) return;

  ptx::griddepcontrol_wait();
  UpdateTile<C> const tile(args, warp);
  int32_t const count = tile.span.count;
  bool const in_place = problem.initial_state.data == problem.final_state.data;
  if (count == 0 && in_place) return;

  UpdateToken<C> token;
  if (count > 0) token.load(args, tile, tile.span.first);
  UpdateState<C> state;
  state.load(problem, tile, args.initial_aligned);
#pragma unroll 1
  for (int32_t t = 0; t < count; ++t) {
    UpdateToken<C> const current = token;
    int64_t const row = int64_t{tile.span.first} + t;
    if (t + 1 < count) token.load(args, tile, row + 1);
    float out[C::kColumns];
    update_state<C>(problem, current, state, out);
    store_out<C>(problem, tile, row, out);
  }
  state.store(problem, tile, args.final_aligned);
}

}  // namespace flashvar::gated_delta_rule
