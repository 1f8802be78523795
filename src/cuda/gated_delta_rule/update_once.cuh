// The update (update.cuh) by one token a sequence, of states of 16 bits that are contiguous along
// V.
//
// Unpacked, a lane's part of such a state takes so many registers that few blocks fit on an SM, and
// too few loads are in flight. Here it stays in shared memory as it was copied, and is unpacked
// twice: for the sums over rows, and as it is updated and stored. For one token only: with more,
// the state would be rounded after each.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/vec.cuh"
#include "gated_delta_rule/problem.h"
#include "gated_delta_rule/update.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shared_pointer.cuh"

namespace flashvar::gated_delta_rule {

// Lanes lie along V as far as adjacent ones load 128 contiguous bytes.
template <class Dtype, int kDim>
using OnceConfig = UpdateConfig<Dtype, Dtype, false, kDim, kDim == 256 ? 8 : 4, 2>;
// Blocks per SM that the registers are limited for; shared memory may allow fewer.
constexpr int kOnceBlocks = 6;

// The lane's part of a state, in shared memory: Vec i is of its row i.
template <class C>
struct OnceState {
  using StateVec = typename C::StateVec;
  static constexpr int kThreads = 32 * C::kWarps;
  static_assert(!C::kKFirst && StateVec::kElements == 8, "a Vec is columns of a row");
  ptx::SharedPointer<uint4> vecs;  // [C::kVecs][kThreads], from the thread's first on

  // Starts to copy a state. Only the thread itself reads the copy, after cp_async_wait.
  __device__ __forceinline__ void load(const UpdateProblem& problem,
                                       const UpdateTile<C>& tile) const {
    bool const exists = problem.initial_state.data != nullptr && tile.state_index >= 0;
    tile.for_each_vec(problem, problem.initial_state, true,
                      [&](int i, const typename C::Word* from, int32_t count) {
                        ptx::cp_async_16(vecs + i * kThreads, from, exists && count > 0);
                      });
  }

  __device__ __forceinline__ void unpack(int i, float (&values)[C::kColumns]) const {
    uint4 const words = vecs[i * kThreads];
    StateVec vec;
    memcpy(&vec.words, &words, sizeof(words));
    vec.unpack(values);
  }

  // Sets update and out of the token for the lane's columns.
  __device__ __forceinline__ void read(const UpdateToken<C>& token, const UpdateTile<C>& tile,
                                       float (&update)[C::kColumns],
                                       float (&out)[C::kColumns]) const {
    UpdateSums<C> sums;
    float k[C::kRows];
    for_each_row(token.k, tile, [&](int i, float value) { k[i] = value; });
    for_each_row(token.q, tile, [&](int i, float q) {
      float values[C::kColumns];
      unpack(i, values);
#pragma unroll
      for (int j = 0; j < C::kColumns; ++j) {
        sums.predicted[j] = fmaf(values[j], k[i], sums.predicted[j]);
        sums.read[j] = fmaf(values[j], q, sums.read[j]);
      }
    });
    sums.finish(token, tile, update, out);
  }

  // Stores the state after the token.
  __device__ __forceinline__ void store(const UpdateProblem& problem, const UpdateToken<C>& token,
                                        const UpdateTile<C>& tile,
                                        const float (&update)[C::kColumns]) const {
    if (problem.final_state.data == nullptr || tile.state_index < 0) return;
    float const decay = token.decay;
    float k[C::kRows];
    for_each_row(token.k, tile, [&](int i, float value) { k[i] = value; });
    tile.for_each_vec(problem, problem.final_state, true,
                      [&](int i, typename C::Word* to, int32_t count) {
                        float values[C::kColumns];
                        unpack(i, values);
#pragma unroll
                        for (int j = 0; j < C::kColumns; ++j) {
                          values[j] = fmaf(k[i], update[j], decay * values[j]);
                        }
                        StateVec vec;
                        vec.pack(values);
                        vec.template store<true>(to, count);
                      });
  }
};

// States are aligned for 16-byte accesses.
template <class C>
__global__ void __launch_bounds__(32 * C::kWarps, kOnceBlocks)
    update_once_kernel(const __grid_constant__ UpdateArgs args) {
  __shared__ __align__(16) UpdateToken<C> token;
  __shared__ uint4 vecs[C::kVecs * OnceState<C>::kThreads];
  const UpdateProblem& problem = args.problem;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  UpdateTile<C> tile(args);

  // Loads are issued in the order in which they are waited for.
  bool const prepares = threadIdx.x < 32;
  UpdateInputs<C> inputs;
  if (prepares) inputs.load(problem, tile, tile.span.first);
  tile.load_state_index(problem);
  OnceState<C> const state{ptx::SharedPointer<uint4>(vecs + threadIdx.x)};
  state.load(problem, tile);
  ptx::cp_async_commit();
  if (prepares) inputs.prepare(problem, token);
  ptx::cp_async_wait<0>();  // the thread's part of the state is copied
  __syncthreads();          // the first warp has written the token

  float update[C::kColumns], out[C::kColumns];
  state.read(token, tile, update, out);
  store_out<C>(problem, tile, tile.span.first, out);
  // Not for ordering: ptxas moves no load across it. Without it ptxas would keep the unpacked
  // elements in registers from read() to store(), and spill.
  __syncwarp();
  state.store(problem, token, tile, update);
}

}  // namespace flashvar::gated_delta_rule
