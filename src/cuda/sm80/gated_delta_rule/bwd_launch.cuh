// Launches the backward: the records of all chunks, both chains, and the gradients of rows.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "sm80/gated_delta_rule/grad_chains.cuh"
#include "sm80/gated_delta_rule/grad_prepare.cuh"
#include "sm80/gated_delta_rule/grad_rows.cuh"
#include "sm80/gated_delta_rule/prepare_launch.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
struct BwdLaunch {
  static constexpr int kDim = (kHeadDim + 63) / 64 * 64;  // of tiles, in whole column blocks
  using Prepare = PrepareConfig<Dtype, kDim, GradRecord>;
  using States = StatesConfig<Target, Dtype, kDim>;
  using Reverse = ReverseConfig<Target, Dtype, kDim>;
  template <bool kCareful>
  using Rows = RowsConfig<Target, Dtype, kDim, kCareful>;

  static constexpr GatedDeltaRuleBwdKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<7> facts(const char* row) {
    KernelFactsMaker const maker{row, "mma.sync", "every call"};
    KernelFactsMaker const sums{row, "mma.sync", "gradients of a_log or dt_bias"};
    return {
        {maker.make("rows_kernel", Rows<false>::kThreads, Rows<false>::kSharedMemory, kChunk, kDim),
         maker.make("rows_kernel, careful", Rows<true>::kThreads, Rows<true>::kSharedMemory, kChunk,
                    kDim),
         maker.make("reverse_kernel", kChainThreads, Reverse::kSharedMemory, kChunk, kChainColumns),
         maker.make("states_kernel", kChainThreads, States::kSharedMemory, kChunk, kChainColumns),
         maker.make("prepare_kernel", Prepare::kThreads, Prepare::kSharedMemory, kChunk),
         maker.make("gates_kernel", kGatesThreads, 0, kChunk),
         sums.make("gate_sums_kernel", kSumThreads, 0, 0)}};
  }

 private:
  // Finds the parts of the workspace; its size.
  static uint64_t lay_out(const BwdProblem& problem, GradWorkspace& workspace) {
    workspace.tiles = (problem.head_dim_v + kChainColumns - 1) / kChainColumns;
    workspace.state_bytes = Rows<false>::Tile::kBytes;
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
    take(workspace.sums, records * sizeof(GateSums));
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
    LaunchShape shape{chains, kChainThreads, Reverse::kSharedMemory};
    ChainArgs const chain{problem, workspace};
    error = launch_kernel<reverse_kernel<Reverse>>(chain, shape, device, stream);
    if (error != cudaSuccess) return error;
    shape.shared_memory = States::kSharedMemory;
    shape.programmatic = Target::kArchitecture >= 90;
    error = launch_kernel<states_kernel<States>>(chain, shape, device, stream);
    int64_t const slots = problem.rows.tiles(problem.sequences, kChunk);
    if (error == cudaSuccess && slots > 0) {
      error = launch_rows<Rows<false>>({problem, workspace}, slots, device, stream);
    }
    if (error == cudaSuccess && slots > 0) {
      error = launch_rows<Rows<true>>({problem, workspace}, slots, device, stream);
    }
    if (error == cudaSuccess && slots > 0) {
      constexpr int kWarps = kGatesThreads / 32;
      shape = {(slots * problem.heads + kWarps - 1) / kWarps, kGatesThreads, 0};
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

  template <class Config>
  static cudaError_t launch_rows(const RowsArgs& args, int64_t slots, int device,
                                 cudaStream_t stream) {
    LaunchShape const shape{slots * args.problem.heads_qk, Config::kThreads, Config::kSharedMemory};
    return launch_kernel<rows_kernel<Config>>(args, shape, device, stream);
  }

  static void explain_call(const BwdProblem& problem, Text& text) {
    text.print(
        "mma.sync: states of chunks of %d tokens, their gradients from the last to the "
        "first, %d columns of v at a time, then rows by heads of q and k, %d heads of v each",
        kChunk, kChainColumns, problem.group);
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
