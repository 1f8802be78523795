// The last kernels of the backward: gradients of beta and of the gates; then the sums over chunks
// for a_log and dt_bias.
#pragma once
#include <cstdint>

#include "core/any_dtype.cuh"
#include "core/ceil_div.h"
#include "core/quad.cuh"
#include "gated_delta_rule/gates.cuh"
#include "gated_delta_rule/grad_chunk.h"
#include "gated_delta_rule/grad_rows.cuh"
#include "sm80/gated_delta_rule/prepare.cuh"

namespace flashvar::sm80::gated_delta_rule {

// Partial sums of the warps of a block of rows_kernel; each warp has 16 tokens and a quarter of the
// columns.
struct GateSumsByWarp {
  float gates[4][kChunk];    // sums over rows of A, P, c and a, each times its gradient
  float later[4][kChunk];    // rows of K times rows of R dS^T
  float columns[4][kChunk];  // sums over columns of A and P times gradients, without beta
  float states[16];          // S times dS, by warps
};

__device__ __forceinline__ float sum_of(const float (&parts)[4][kChunk], int token) {
  return parts[0][token] + parts[1][token] + (parts[2][token] + parts[3][token]);
}

// Adds up the warps' partial sums, by the first threads of the block. `add`: to what the same
// threads have written before, of other columns.
__device__ __forceinline__ void write_sums(const GateSumsByWarp& by_warp, GateSums& sums,
                                           bool add) {
  int const thread = static_cast<int>(threadIdx.x);
  auto const put = [add](float& to, float sum) { to = add ? to + sum : sum; };
  if (thread < kChunk) {
    put(sums.gates[thread], sum_of(by_warp.gates, thread));
    put(sums.later[thread], sum_of(by_warp.later, thread));
    put(sums.columns[thread], sum_of(by_warp.columns, thread));
  } else if (thread == kChunk) {
    float states = 0.f;
#pragma unroll
    for (float const one : by_warp.states) states += one;
    put(sums.states, states);
  }
}

// Exclusive suffix sum over the lanes of the warp.
__device__ __forceinline__ float exclusive_suffix_sum(float value) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  float sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    float const after = __shfl_down_sync(0xffffffffu, sum, step);
    if (lane_id + step < 32) sum += after;
  }
  float const after = __shfl_down_sync(0xffffffffu, sum, 1);
  return lane_id == 31 ? 0.f : after;
}

__device__ __forceinline__ void store(const GradGate& gate, const GateCoordinate& coordinate,
                                      float value) {
  store_value(gate, coordinate.index(gate), value);
}

// Gradients of a gate's inputs from that of the gate. That of dt_bias is that of g.
struct GateInputGrads {
  float g, a_log;
};
__device__ __forceinline__ GateInputGrads gate_backward(const FwdProblem& problem,
                                                        const GateCoordinate& coordinate,
                                                        float grad) {
  GateBits const bits(problem, coordinate);
  float const gate = bits.decay_log(problem);
  if (gate <= kLowestGate) return {0.f, 0.f};  // clamped: the inputs have no effect
  if (problem.a_log.data == nullptr) return {grad, 0.f};
  float x = value_of(problem.g, bits.g);
  if (problem.dt_bias.data != nullptr) x += value_of(problem.dt_bias, bits.dt_bias);
  float const rate = -expf(value_of(problem.a_log, bits.a_log));
  return {grad * rate / (1.f + expf(-x)), grad * gate};
}

struct GatesArgs {
  BwdProblem problem;
  GradWorkspace workspace;
};

// A warp computes a head's gradients, from sums that are contiguous along tokens. Gates are
// contiguous along heads: gradients go through shared memory, so that adjacent threads store those
// of adjacent heads.
inline constexpr int kGatesThreads = 256, kGatesHeads = kGatesThreads / 32;

struct GateGrads {
  static constexpr int kRow = kChunk + 4;  // no bank conflicts when read by heads
  float beta[kGatesHeads][kRow], gate[kGatesHeads][kRow];
  float a_log[kGatesThreads / 32][kGatesHeads], dt_bias[kGatesThreads / 32][kGatesHeads];
};

// Gradients of two tokens' beta and gates, per lane of a head's warp.
__device__ __forceinline__ void compute_gate_grads(const FwdProblem& problem,
                                                   const GradRecord& record, const GateSums& sums,
                                                   float (&grad_beta)[2], float (&grad_gates)[2]) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  float grad_sums[2], later[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const token = 2 * lane_id + i;
    float const column = sums.columns[token], beta = record.beta[token];
    float const from_state = record.b[token] * sums.later[token];
    grad_beta[i] = from_state + column;
    if (problem.beta_sigmoid) grad_beta[i] *= beta * (1.f - beta / problem.beta_scale);
    later[i] = beta * from_state;
    grad_sums[i] = sums.gates[token] - beta * column - later[i];
  }
  // A gate also scales what the state and the tokens before it contribute to the next state.
  float const tail = warp_sum(later[0] + later[1]) + record.decay * sums.states;
  float const after = tail + exclusive_suffix_sum(grad_sums[0] + grad_sums[1]);
  grad_gates[0] = after + grad_sums[1] + grad_sums[0];
  grad_gates[1] = after + grad_sums[1];
}

// Grid: chunks of all sequences x groups of kGatesHeads heads. A template, so that every source of
// a library may define it.
template <class Target>
__global__ void __launch_bounds__(kGatesThreads)
    gates_kernel(const __grid_constant__ GatesArgs args) {
  __shared__ GateGrads grads;
  const BwdProblem& problem = args.problem;
  int const thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane_id = thread % 32;
  uint32_t const groups = ceil_div(problem.heads, kGatesHeads);
  uint32_t const slot = blockIdx.x / groups;
  int32_t const first_head = static_cast<int32_t>(blockIdx.x % groups) * kGatesHeads;
  int64_t const first_record = int64_t{slot} * problem.heads + first_head;
  int32_t const heads = min(problem.heads - first_head, kGatesHeads);
  TileCoordinate const chunk = problem.rows.find(slot, problem.sequences, kChunk);
  Span const span = problem.rows.span(chunk.batch);
  int32_t const count = min(span.count - chunk.first, kChunk);  // none in a surplus chunk
  ptx::griddepcontrol_wait();                                   // all sums of rows are written

  if (warp < heads && count > 0) {
    float grad_beta[2], grad_gates[2];
    compute_gate_grads(problem, args.workspace.records[first_record + warp],
                       args.workspace.sums[first_record + warp], grad_beta, grad_gates);
    *reinterpret_cast<float2*>(&grads.beta[warp][2 * lane_id]) = {grad_beta[0], grad_beta[1]};
    *reinterpret_cast<float2*>(&grads.gate[warp][2 * lane_id]) = {grad_gates[0], grad_gates[1]};
  }
  __syncthreads();  // the gradients of all heads are written
  int32_t const head = thread % kGatesHeads;
  float sum_a_log = 0.f, sum_dt_bias = 0.f;
  for (int32_t token = thread / kGatesHeads; head < heads && token < count;
       token += kGatesThreads / kGatesHeads) {
    GateCoordinate const coordinate{problem.rows.offsets == nullptr ? chunk.batch : 0,
                                    int64_t{span.first} + chunk.first + token, first_head + head};
    store(problem.grad_beta, coordinate, grads.beta[head][token]);
    if (problem.g.data == nullptr) continue;
    GateInputGrads const raw = gate_backward(problem, coordinate, grads.gate[head][token]);
    if (problem.grad_g.data != nullptr) store(problem.grad_g, coordinate, raw.g);
    sum_a_log += raw.a_log;
    sum_dt_bias += raw.g;
  }
#pragma unroll
  for (int step = kGatesHeads; step < 32; step *= 2) {
    sum_a_log += __shfl_xor_sync(0xffffffffu, sum_a_log, step);
    sum_dt_bias += __shfl_xor_sync(0xffffffffu, sum_dt_bias, step);
  }
  if (lane_id < kGatesHeads) {
    grads.a_log[warp][lane_id] = sum_a_log;
    grads.dt_bias[warp][lane_id] = sum_dt_bias;
  }
  __syncthreads();  // the sums of all warps are written
  if (thread >= heads) return;
  sum_a_log = sum_dt_bias = 0.f;
#pragma unroll
  for (int i = 0; i < kGatesThreads / 32; ++i) {
    sum_a_log += grads.a_log[i][thread];
    sum_dt_bias += grads.dt_bias[i][thread];
  }
  args.workspace.grad_a_log[first_record + thread] = sum_a_log;
  args.workspace.grad_dt_bias[first_record + thread] = sum_dt_bias;
}

struct GateSumsArgs {
  GradGate to[2];
  const float* parts[2];  // [slot][head]
  int64_t slots;
  int32_t heads;
};

inline constexpr int kSumThreads = 128;

// Adds up the chunks' contributions to the gradients of a_log and dt_bias. Grid: heads.
template <class Target>
__global__ void __launch_bounds__(kSumThreads)
    gate_sums_kernel(const __grid_constant__ GateSumsArgs args) {
  __shared__ float sums[kSumThreads / 32];
  int const thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if (args.to[which].data == nullptr) continue;
    float sum = 0.f;
    for (int64_t slot = thread; slot < args.slots; slot += kSumThreads) {
      sum += args.parts[which][slot * args.heads + blockIdx.x];
    }
    sum = warp_sum(sum);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();  // all warps have written their sums
    if (thread == 0) {
      float total = 0.f;
      for (float const one : sums) total += one;
      store(args.to[which], {0, 0, blockIdx.x}, total);
    }
    __syncthreads();  // the sums have been read; the next round overwrites them
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
