// Launches the update token by token, on every architecture.
#pragma once
#include <cstdint>

#include "core/ceil_div.h"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "gated_delta_rule/update.cuh"
#include "gated_delta_rule/update_once.cuh"

namespace flashvar::gated_delta_rule {

constexpr int power_of_two(int least) {
  int power = 1;
  while (power < least) power *= 2;
  return power;
}

template <class Target, class Dtype, int kHeadDim>
struct UpdateLaunch {
  template <class StateDtype, bool kKFirst>
  using Config = UpdateConfig<Dtype, StateDtype, kKFirst, power_of_two(kHeadDim)>;
  using Once = OnceConfig<Dtype, power_of_two(kHeadDim)>;

  static constexpr GatedDeltaRuleUpdateKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<2> facts(const char* row) {
    using C = Config<dtype::fp32, true>;
    KernelFactsMaker const others{row, "simt", "every call but those of update_once_kernel"};
    KernelFactsMaker const once{row, "simt",
                                "one token a sequence, 16-bit states that are contiguous along V"};
    return {{others.make("update_kernel", 32 * C::kWarps, 0, 1, C::kWarps * C::kWarpColumns),
             once.make("update_once_kernel", 32 * Once::kWarps, 0, 1,
                       Once::kWarps * Once::kWarpColumns)}};
  }

 private:
  static uint64_t workspace(const UpdateProblem&) { return 0; }

  // Whether columns of the states are contiguous in memory, not rows.
  static bool k_first(const UpdateProblem& problem) {
    bool const written = problem.final_state.data != nullptr;
    const StateView<void>& states = written ? problem.final_state : problem.initial_state;
    return states.k_stride == 1;
  }

  // Whether 16-byte accesses of a state, if there is one, are possible: elements are contiguous and
  // aligned.
  template <class C>
  static bool aligned(const UpdateProblem& problem, const StateView<void>& states) {
    constexpr int64_t kElements = C::StateVec::kElements;
    auto const [inner, outer, length] =
        C::kKFirst ? Strides{states.k_stride, states.v_stride, problem.head_dim}
                   : Strides{states.v_stride, states.k_stride, problem.head_dim_v};
    int64_t const others = outer | states.head_stride | states.sequence_stride | length;
    return states.data == nullptr || (inner == 1 && others % kElements == 0 &&
                                      reinterpret_cast<uintptr_t>(states.data) % 16 == 0);
  }
  struct Strides {
    int64_t inner, outer, length;
  };

  template <class C, bool kOnce = false>
  static cudaError_t launch_blocks(const UpdateProblem& problem, int device, cudaStream_t stream) {
    int const warps = ceil_div(problem.head_dim_v, C::kWarpColumns);
    int const tiles = ceil_div(warps, C::kWarps);
    UpdateArgs const args{problem, tiles, aligned<C>(problem, problem.initial_state),
                          aligned<C>(problem, problem.final_state)};
    LaunchShape const shape{problem.sequences * problem.heads * tiles, 32 * ceil_div(warps, tiles),
                            0, Target::kArchitecture >= 90};
    if constexpr (kOnce) {
      return launch_kernel<update_once_kernel<C>>(args, shape, device, stream);
    } else {
      return launch_kernel<update_kernel<C>>(args, shape, device, stream);
    }
  }

  template <class StateDtype>
  static cudaError_t launch_of(const UpdateProblem& problem, int device, cudaStream_t stream) {
    return k_first(problem) ? launch_blocks<Config<StateDtype, true>>(problem, device, stream)
                            : launch_blocks<Config<StateDtype, false>>(problem, device, stream);
  }

  static cudaError_t launch(const UpdateProblem& problem, int device, cudaStream_t stream) {
    if (problem.state_dtype == dtype::fp32::kAbi) {
      return launch_of<dtype::fp32>(problem, device, stream);
    }
    return once(problem) ? launch_blocks<Once, true>(problem, device, stream)
                         : launch_of<Dtype>(problem, device, stream);
  }

  // Whether update_once_kernel serves a call on states of 16 bits.
  static bool once(const UpdateProblem& problem) {
    return problem.rows.offsets == nullptr && problem.rows.seqlen == 1 && !k_first(problem) &&
           aligned<Once>(problem, problem.initial_state) &&
           aligned<Once>(problem, problem.final_state);
  }

  static void explain_call(const UpdateProblem& problem, Text& text) {
    bool const by_k = k_first(problem);
    auto const fits = [&](const StateView<void>& states) {
      bool const is_fp32 = problem.state_dtype == dtype::fp32::kAbi;
      return by_k ? (is_fp32 ? aligned<Config<dtype::fp32, true>>(problem, states)
                             : aligned<Config<Dtype, true>>(problem, states))
                  : (is_fp32 ? aligned<Config<dtype::fp32, false>>(problem, states)
                             : aligned<Config<Dtype, false>>(problem, states));
    };
    bool const whole = fits(problem.initial_state) && fits(problem.final_state);
    text.print("simt: token by token, states are read %s along %s",
               whole ? "16 bytes at a time" : "element by element, for strides do not allow more,",
               by_k ? "K" : "V");
  }
};

}  // namespace flashvar::gated_delta_rule
