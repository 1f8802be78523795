// Launches the backward, on every architecture: one kernel with all gradients; or with partial sums
// of those of weights and biases, then sums_kernel.
#pragma once
#include <algorithm>

#include "causal_conv1d/bwd_channels.cuh"
#include "causal_conv1d/bwd_tokens.cuh"
#include "causal_conv1d/kernel_table.h"
#include "causal_conv1d/launch.h"
#include "causal_conv1d/layout.h"
#include "causal_conv1d/sums.cuh"
#include "core/kernel_facts.h"

namespace flashvar::causal_conv1d {

template <class Target, class Dtype>
struct BwdLaunch {
  static constexpr int kWordBytes = sizeof(typename Dtype::Word);
  // Elements per thread: fewer of contiguous channels, of which it keeps more values in registers.
  static constexpr int kChannels = 4, kTokens = 16 / kWordBytes;
  static constexpr int kStages = kWordBytes == 2 ? 6 : 4;
  // A group is two warps, with adjacent channels, so that 512 bytes of a 16-bit row are read at
  // about the same time.
  static constexpr int kLanesLog2 = 6;
  // Blocks per SM of the kernels of channels. With two, those for fp32 spill on 10.0 and newer.
  static constexpr int kChannelBlocksPerSM = kWordBytes == 2 || Target::kArchitecture <= 90 ? 2 : 1;
  // Blocks per SM of the kernels of tokens. Two where shared memory suffices for loading so far
  // ahead that two blocks have as many bytes in flight as three: the last wave of a long call is
  // fuller then. Kernels of single elements spill with three on 10.0 and newer.
  static constexpr bool kFarAhead = Target::kSharedMemory > 200'000;  // bytes: SMs with 228 KB
  static constexpr int token_blocks(int elements) {
    return (elements > 1 ? kFarAhead : Target::kArchitecture > 90) ? 2 : 3;
  }
  // Tiles of tokens that are loaded ahead, into shared memory; single elements into registers.
  static constexpr int tokens_ahead(int elements) { return elements == 1 ? 4 : kFarAhead ? 7 : 3; }
  static constexpr int kTokenTiles = 64;  // of a block, at most

  static constexpr CausalConv1dBwdKernel row() {
    return {Dtype::kAbi, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<3> facts(const char* row) {
    KernelFactsMaker const channels{row, "simt", "calls whose channels are contiguous"};
    KernelFactsMaker const tokens{row, "simt", "calls whose tokens are contiguous"};
    KernelFactsMaker const sums{row, "simt", "calls whose tokens are divided among blocks"};
    return {
        {channels.make("bwd_channels_kernel", kThreads, 0, 0),
         tokens.make("bwd_tokens_kernel", kThreads, sizeof(typename Tokens<4, kTokens>::Shared), 0),
         sums.make("sums_kernel", kThreads, 0, 0)}};
  }

 private:
  template <int kWidth, int kElements>
  using Tokens = BwdTokensConfig<Dtype, kWidth, kElements, tokens_ahead(kElements), kTokenTiles,
                                 token_blocks(kElements)>;

  // The kernel of a call, its tiles, and the number of parts of its sums.
  struct Plan {
    Layout layout;
    ChannelTiles channels;
    TokenTiles tokens;
    int64_t parts;
  };

  static int vector_bytes(bool tokens) { return (tokens ? kTokens : kChannels) * kWordBytes; }

  static Plan plan(const BwdProblem& problem) {
    Plan plan{
        Layout::of(problem, Dtype::kAbi, kWordBytes, vector_bytes,
                   {{"grad_x", problem.grad_x}, {"x", problem.x}, {"grad_y", problem.grad_y}}),
        {},
        {},
        0};
    if (plan.layout.tokens_inner) {
      int const elements = plan.layout.vectorized ? kTokens : 1;
      plan.tokens = TokenTiles::make(problem, elements, plan.layout.misalignment);
      plan.tokens.divide_tokens(kBlocks, kTokenTiles);
      plan.parts = plan.tokens.ranges();
    } else {
      ChannelLimits const limits{kLanesLog2, 32, 256, kStages, kBlocks};
      plan.channels = ChannelTiles::make(problem, plan.layout.vectorized ? kChannels : 1, limits);
      plan.parts = plan.channels.row_blocks(problem);
    }
    return plan;
  }

  static uint64_t workspace(const BwdProblem& problem) {
    int64_t const parts = plan(problem).parts;
    return parts == 1 ? 0 : parts * (problem.width + 1) * problem.dim * sizeof(float);
  }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    Plan const chosen = plan(problem);
    return with_width(problem.width, [&](auto width) {
      cudaError_t const error =
          chosen.layout.vectorized
              ? launch_tiles<width, kChannels, kTokens>(problem, chosen, device, stream)
              : launch_tiles<width, 1, 1>(problem, chosen, device, stream);
      if (error != cudaSuccess || chosen.parts == 1) return error;
      SumsArgs const args = SumsArgs::make(problem, chosen.parts);
      return launch_blocks<sums_kernel<width>, Target>(args, args.blocks(width), device, stream);
    });
  }

  template <int kWidth, int kOfChannels, int kOfTokens>
  static cudaError_t launch_tiles(const BwdProblem& problem, const Plan& chosen, int device,
                                  cudaStream_t stream) {
    int64_t const state_blocks = blocks_of(problem.state_elements());
    if (chosen.layout.tokens_inner) {
      using Config = Tokens<kWidth, kOfTokens>;
      BwdTokensArgs args{problem, chosen.tokens};
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
    return launch_blocks<bwd_channels_kernel<Dtype, kWidth, kOfChannels, kStages, 1 << kLanesLog2,
                                             kChannelBlocksPerSM>,
                         Target>(BwdChannelsArgs{problem, chosen.channels},
                                 chosen.channels.blocks + state_blocks, device, stream);
  }

  static void explain_call(const BwdProblem& problem, Text& text) {
    Layout const found = plan(problem).layout;
    found.explain(vector_bytes(found.tokens_inner), text);
  }
};

}  // namespace flashvar::causal_conv1d
