// Launches the backward: the records of all chunks, both chains, and the gradients of rows.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "sm80/gated_delta_rule/grad_prepare.cuh"
#include "sm80/gated_delta_rule/grad_reverse.cuh"
#include "sm80/gated_delta_rule/grad_rows.cuh"
#include "sm80/gated_delta_rule/grad_states.cuh"
#include "sm80/gated_delta_rule/prepare_launch.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
struct BwdLaunch {
  static constexpr int kDim = (kHeadDim + 63) / 64 * 64;  // of tiles, in whole column blocks
  using Prepare = PrepareConfig<Dtype, kDim, GradRecord>;
  using States = StatesConfig<Target, Dtype, kDim>;
  using Reverse = ReverseConfig<Target, Dtype, kDim>;
  using Rows = RowsConfig<Target, Dtype, kDim>;

  static constexpr GatedDeltaRuleBwdKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<5> facts(const char* row) {
    KernelFactsMaker const maker{row, "mma.sync", "every call"};
    KernelFactsMaker const sums{row, "mma.sync", "gradients of a_log or dt_bias"};
    return {
        {maker.make("rows_kernel", Rows::kThreads, Rows::kSharedMemory, kChunk, kDim),
         maker.make("reverse_kernel", kChainThreads, Reverse::kSharedMemory, kChunk, kChainColumns),
         maker.make("states_kernel", kChainThreads, States::kSharedMemory, kChunk, kChainColumns),
         maker.make("prepare_kernel", Prepare::kThreads, Prepare::kSharedMemory, kChunk),
         sums.make("gate_sums_kernel", kSumThreads, 0, 0)}};
  }

 private:
  // Finds the parts of the workspace; its size.
  static uint64_t lay_out(const BwdProblem& problem, GradWorkspace& workspace) {
    workspace.tiles = (problem.head_dim_v + kChainColumns - 1) / kChainColumns;
    workspace.state_bytes = Rows::Tile::kBytes;
    auto const records = static_cast<uint64_t>(record_count(problem));
    uint64_t const tiles = records * workspace.tiles;
    uint64_t used = 0;
    auto take = [&](auto*& part, uint64_t bytes) {
      auto* const base = static_cast<unsigned char*>(problem.workspace);
      if (base != nullptr)
        part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + used);
      used += (bytes + 255) / 256 * 256;
    };
    take(workspace.records, records * sizeof(GradRecord));
    take(workspace.states, tiles * workspace.state_bytes);
    take(workspace.grad_states, tiles * workspace.state_bytes);
    take(workspace.residuals, tiles * kSquareBytes);
    take(workspace.residuals_low, tiles * kSquareBytes);
    take(workspace.grad_values_low, tiles * kSquareBytes);
    take(workspace.grad_a_log, records * sizeof(float));
    take(workspace.grad_dt_bias, records * sizeof(float));
    return used;
  }

  static uint64_t workspace(const BwdProblem& problem) {
    GradWorkspace parts{};
    return lay_out(problem, parts);
  }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    GradWorkspace workspace{};
    lay_out(problem, workspace);
    cudaError_t error = launch_prepare<Prepare>(problem, device, stream);
    if (error != cudaSuccess) return error;
    int64_t const chains = problem.sequences * problem.heads * workspace.tiles;
    LaunchShape shape{chains, kChainThreads, States::kSharedMemory};
    error =
        launch_kernel<states_kernel<States>>(StatesArgs{problem, workspace}, shape, device, stream);
    if (error != cudaSuccess) return error;
    shape.shared_memory = Reverse::kSharedMemory;
    error = launch_kernel<reverse_kernel<Reverse>>(ReverseArgs{problem, workspace}, shape, device,
                                                   stream);
    if (error != cudaSuccess) return error;
    int64_t const slots = problem.rows.tiles(problem.sequences, kChunk);
    if (slots > 0) {
      shape = {slots * problem.heads_qk, Rows::kThreads, Rows::kSharedMemory};
      error = launch_kernel<rows_kernel<Rows>>(RowsArgs{problem, workspace}, shape, device, stream);
    }
    bool const has_sums =
        problem.grad_a_log.data != nullptr || problem.grad_dt_bias.data != nullptr;
    if (error != cudaSuccess || !has_sums) return error;
    GateSumsArgs const sums{{problem.grad_a_log, problem.grad_dt_bias},
                            {workspace.grad_a_log, workspace.grad_dt_bias},
                            slots,
                            problem.heads};
    return launch_kernel<gate_sums_kernel>(sums, {problem.heads, kSumThreads, 0}, device, stream);
  }

  static void explain_call(const BwdProblem& problem, Text& text) {
    text.print(
        "mma.sync: states of chunks of %d tokens, their gradients from the last to the "
        "first, %d columns of v at a time, then rows by heads of q and k, %d heads of v each",
        kChunk, kChainColumns, problem.group);
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
