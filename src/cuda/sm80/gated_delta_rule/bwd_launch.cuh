// Launches the backward: prepare (the records of all chunks), both chains, rows (dQ and dK), gates.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/ceil_div.h"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "sm80/gated_delta_rule/chains_launch.cuh"
#include "sm80/gated_delta_rule/grad_prepare.cuh"
#include "sm80/gated_delta_rule/prepare_launch.cuh"
#include "sm80/gated_delta_rule/rows_launch.cuh"

namespace flashvar::sm80::gated_delta_rule {

// Chains_ and Rows_: the family's launchers of these kernels.
template <class Target, class Dtype, int kHeadDim,
          template <class, class, int> class Chains_ = ChainsLaunch,
          template <class, class, int> class Rows_ = RowsLaunch>
struct BwdLaunch {
  static constexpr int kDim = kHeadDim;
  static_assert(kDim % 64 == 0, "whole column blocks");
  using Prepare = PrepareConfig<Dtype, kDim, GradRecord>;
  using Chains = Chains_<Target, Dtype, kDim>;
  using Rows = Rows_<Target, Dtype, kDim>;

  static constexpr GatedDeltaRuleBwdKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr auto facts(const char* row) {
    KernelFactsMaker const maker{row, "mma.sync", "every call"};
    KernelFactsMaker const sums{row, "mma.sync", "gradients of a_log or dt_bias"};
    return join(join(Rows::facts(row), Chains::facts(row)),
                KernelFactsList<3>{{maker.make("prepare_kernel", Prepare::kThreads,
                                               Prepare::kSharedMemory, kChunk),
                                    maker.make("gates_kernel", kGatesThreads, 0, kChunk),
                                    sums.make("gate_sums_kernel", kSumThreads, 0, 0)}});
  }

 private:
  // Sets the pointers into the workspace; returns its size.
  static uint64_t lay_out(const BwdProblem& problem, GradWorkspace& workspace) {
    workspace.tiles = ceil_div(problem.head_dim_v, kChainColumns);
    workspace.state_bytes = kDim * kChainColumns * static_cast<int>(sizeof(uint16_t));
    auto const records = static_cast<uint64_t>(record_count(problem));
    uint64_t const tiles = records * workspace.tiles;
    uint64_t used = 0;
    auto take = [&](auto*& part, uint64_t bytes) {
      auto* const base = static_cast<unsigned char*>(problem.workspace);
      if (base != nullptr)
        part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + used);
      used += ceil_div(bytes, 256) * 256;
    };
    take(workspace.records, records * sizeof(GradRecord));
    take(workspace.states, tiles * workspace.state_bytes);
    take(workspace.grad_states, tiles * workspace.state_bytes);
    take(workspace.residuals, tiles * kTile64Bytes);
    take(workspace.residuals_low, tiles * kTile64Bytes);
    take(workspace.grad_values_low, tiles * kTile64Bytes);
    take(workspace.sums, records * sizeof(GateSums) + Rows::bytes(problem));
    take(workspace.grad_a_log, records * sizeof(float));
    take(workspace.grad_dt_bias, records * sizeof(float));
    return used;
  }

  // The memory of GradSegments lies after the `used` bytes of lay_out().
  static GradSegments grad_segments(const BwdProblem& problem, uint64_t used) {
    return {problem, Chains::segments(problem), kDim,
            static_cast<unsigned char*>(problem.workspace) + used};
  }

  static uint64_t workspace(const BwdProblem& problem) {
    GradWorkspace parts{};
    uint64_t const used = lay_out(problem, parts);
    return used + grad_segments(problem, used).bytes;
  }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    GradWorkspace workspace{};
    uint64_t const used = lay_out(problem, workspace);
    cudaError_t error = launch_prepare<Prepare>(problem, device, stream);
    if (error != cudaSuccess) return error;
    error = Chains::launch(problem, workspace, grad_segments(problem, used), device, stream);
    int64_t const slots = problem.rows.tiles(problem.sequences, kChunk);
    if (error == cudaSuccess && slots > 0) {
      error = Rows::launch(problem, workspace, device, stream);
    }
    if (error == cudaSuccess && slots > 0) {
      int64_t const groups = ceil_div(problem.heads, kGatesHeads);
      LaunchShape const shape{slots * groups, kGatesThreads, 0, Target::kArchitecture >= 90};
      error =
          launch_kernel<gates_kernel<Target>>(GatesArgs{problem, workspace}, shape, device, stream);
    }
    bool const has_sums =
        problem.grad_a_log.data != nullptr || problem.grad_dt_bias.data != nullptr;
    if (error != cudaSuccess || !has_sums) return error;
    GateSumsArgs const sums{{problem.grad_a_log, problem.grad_dt_bias},
                            {workspace.grad_a_log, workspace.grad_dt_bias},
                            slots,
                            problem.heads};
    return launch_kernel<gate_sums_kernel<Target>>(sums, {problem.heads, kSumThreads, 0}, device,
                                                   stream);
  }

  static void explain_call(const BwdProblem& problem, Text& text) {
    text.print(
        "%s: states of chunks of %d tokens, their gradients from the last to the "
        "first, %d columns of v at a time, then %s: rows by heads of q and k, %d heads of v each",
        Chains::kFamily, kChunk, kChainColumns, Rows::kFamily, problem.group);
    int32_t const rows = Chains::segments(problem).rows;
    if (rows > 0) text.print("; segments of %d tokens of a sequence at the same time", rows);
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
