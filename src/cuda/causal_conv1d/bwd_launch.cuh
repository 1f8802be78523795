// Launches the backward, on every architecture: one kernel with all gradients; or with partial sums
// of those of weights and biases, then sums_kernel. Before it, a copy of the gradient of y if it
// alone has another order of dimensions.
#pragma once
#include <algorithm>

#include "causal_conv1d/bwd_channels.cuh"
#include "causal_conv1d/bwd_plan.h"
#include "causal_conv1d/bwd_tokens.cuh"
#include "causal_conv1d/channel_rows.cuh"
#include "causal_conv1d/kernel_table.h"
#include "causal_conv1d/launch.h"
#include "causal_conv1d/sums.cuh"
#include "core/kernel_facts.h"

namespace flashvar::causal_conv1d {

template <class Target, class Dtype>
struct BwdLaunch {
  using Plan = BwdPlan<Dtype>;
  // Blocks per SM of the kernels of channels. With two, those for fp32 spill on 10.0 and newer.
  static constexpr int kChannelBlocksPerSM =
      Plan::kWordBytes == 2 || Target::kArchitecture <= 90 ? 2 : 1;
  // Blocks per SM of the kernels of tokens. Two where shared memory suffices for loading so far
  // ahead that two blocks have as many bytes in flight as three: the last wave of a long call is
  // fuller then. Kernels of single elements spill with three on 10.0 and newer.
  static constexpr bool kFarAhead = Target::kSharedMemory > 200'000;  // bytes: SMs with 228 KB
  static constexpr int token_blocks(int elements) {
    return (elements > 1 ? kFarAhead : Target::kArchitecture > 90) ? 2 : 3;
  }
  // Tiles of tokens that are loaded ahead, into shared memory; single elements into registers.
  static constexpr int tokens_ahead(int elements) { return elements == 1 ? 4 : kFarAhead ? 7 : 3; }

  static constexpr CausalConv1dBwdKernel row() {
    return {Dtype::kAbi, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<4> facts(const char* row) {
    KernelFactsMaker const channels{row, "simt", "calls whose channels are contiguous"};
    KernelFactsMaker const tokens{row, "simt", "calls whose tokens are contiguous"};
    KernelFactsMaker const sums{row, "simt", "calls whose tokens are divided among blocks"};
    KernelFactsMaker const copy{row, "simt", "calls whose grad_y alone has another order"};
    return {{channels.make("bwd_channels_kernel", kThreads, 0, 0),
             tokens.make("bwd_tokens_kernel", kThreads,
                         sizeof(typename Tokens<4, Plan::kTokens>::Shared), 0),
             sums.make("sums_kernel", kThreads, 0, 0),
             copy.make("channel_rows_kernel", kThreads, 0, kCopyTile)}};
  }

 private:
  template <int kWidth, int kElements>
  using Tokens = BwdTokensConfig<Dtype, kWidth, kElements, tokens_ahead(kElements),
                                 Plan::kTokenTiles, token_blocks(kElements)>;

  static uint64_t workspace(const BwdProblem& problem) {
    Plan const plan = Plan::make(problem);
    return plan.part_bytes + plan.copy_bytes;
  }

  static cudaError_t launch(const BwdProblem& call, int device, cudaStream_t stream) {
    Plan const plan = Plan::make(call);
    BwdProblem problem = call;
    if (plan.copy_bytes > 0) {
      auto const args = ChannelRowsArgs::make(call, call.grad_y, plan.copy(call), Plan::kWordBytes);
      cudaError_t const error = launch_blocks<channel_rows_kernel<Plan::kWordBytes>, Target>(
          args, args.blocks(call), device, stream);
      if (error != cudaSuccess) return error;
      problem.grad_y = {args.to, {call.seqlen * call.dim, call.dim, 1}, Dtype::kAbi};
    }
    return with_width(problem.width, [&](auto width) {
      cudaError_t const error =
          plan.layout.vectorized
              ? launch_tiles<width, Plan::kChannels, Plan::kTokens>(problem, plan, device, stream)
              : launch_tiles<width, 1, 1>(problem, plan, device, stream);
      if (error != cudaSuccess || plan.parts == 1) return error;
      SumsArgs const args = SumsArgs::make(problem, plan.parts);
      return launch_blocks<sums_kernel<width>, Target>(args, args.blocks(width), device, stream);
    });
  }

  template <int kWidth, int kOfChannels, int kOfTokens>
  static cudaError_t launch_tiles(const BwdProblem& problem, const Plan& plan, int device,
                                  cudaStream_t stream) {
    int64_t const state_blocks = blocks_of(problem.state_elements());
    if (plan.layout.tokens_inner) {
      using Config = Tokens<kWidth, kOfTokens>;
      BwdTokensArgs args{problem, plan.tokens};
      // With single elements no next channel is loaded ahead, so a group has one channel.
      if constexpr (kOfTokens > 1) {
        int multiprocessors = 0;
        cudaError_t const error =
            cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (error != cudaSuccess) return error;
        constexpr int kFit =
            Target::blocks_that_fit(static_cast<int>(sizeof(typename Config::Shared)));
        args.tiles.divide_channels_among(int64_t{multiprocessors} *
                                         std::min(kFit, Config::kBlocksPerSM));
      }
      return launch_blocks<bwd_tokens_kernel<Config>, Target>(
          args, args.tiles.blocks + state_blocks, device, stream, sizeof(typename Config::Shared));
    }
    return launch_blocks<bwd_channels_kernel<Dtype, kWidth, kOfChannels, Plan::kStages,
                                             1 << Plan::kLanesLog2, kChannelBlocksPerSM>,
                         Target>(BwdChannelsArgs{problem, plan.channels},
                                 plan.channels.blocks + state_blocks, device, stream);
  }

  static void explain_call(const BwdProblem& problem, Text& text) {
    Plan::make(problem).explain(text);
  }
};

}  // namespace flashvar::causal_conv1d
