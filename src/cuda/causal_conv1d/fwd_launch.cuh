// Launches the forward, on every architecture.
#pragma once
#include <type_traits>

#include "causal_conv1d/fwd_channels.cuh"
#include "causal_conv1d/fwd_tokens.cuh"
#include "causal_conv1d/kernel_table.h"
#include "causal_conv1d/launch.h"
#include "causal_conv1d/layout.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"

namespace flashvar::causal_conv1d {

template <class Target, class Dtype>
struct FwdLaunch {
  static constexpr int kWordBytes = sizeof(typename Dtype::Word);
  // Elements per thread: fewer of contiguous channels, of which it keeps more values in registers.
  static constexpr int kChannels = 4, kTokens = 16 / kWordBytes;
  static constexpr int kChannelStages = kWordBytes == 2 ? 8 : 4;
  // Tiles of tokens that are loaded ahead, into shared memory; single elements into registers.
  static constexpr int tokens_ahead(int elements) { return elements > 1 ? 3 : 4; }
  // Blocks per SM. With three, kernels of channels spill on other architectures, and for fp16 and
  // fp32; with four, kernels of tokens spill on 10.0 and newer.
  static constexpr int kBlocksPerSM =
      std::is_same_v<Dtype, dtype::bf16> && Target::kArchitecture == 90 ? 3 : 2;
  static constexpr int kTokenBlocksPerSM = Target::kArchitecture <= 90 ? 4 : 3;
  static constexpr int kMinRows = 16, kMaxRows = 64;
  static constexpr int kTokenTiles = 64;  // of a block, at most

  static constexpr CausalConv1dFwdKernel row() {
    return {Dtype::kAbi, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<2> facts(const char* row) {
    KernelFactsMaker const channels{row, "simt", "calls whose channels are contiguous"};
    KernelFactsMaker const tokens{row, "simt", "calls whose tokens are contiguous"};
    return {{channels.make("fwd_channels_kernel", kThreads, 0, 0),
             tokens.make("fwd_tokens_kernel", kThreads, 0, 0)}};
  }

 private:
  static uint64_t workspace(const FwdProblem&) { return 0; }

  static int vector_bytes(bool tokens) { return (tokens ? kTokens : kChannels) * kWordBytes; }

  static Layout layout(const FwdProblem& problem) {
    return Layout::of(problem, Dtype::kAbi, kWordBytes, vector_bytes,
                      {{"y", problem.y}, {"x", problem.x}, {"residual", problem.residual}});
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    Layout const chosen = layout(problem);
    return with_width(problem.width, [&](auto width) {
      return chosen.vectorized
                 ? launch_tiles<width, kChannels, kTokens>(problem, chosen, device, stream)
                 : launch_tiles<width, 1, 1>(problem, chosen, device, stream);
    });
  }

  template <int kWidth, int kOfChannels, int kOfTokens>
  static cudaError_t launch_tiles(const FwdProblem& problem, const Layout& chosen, int device,
                                  cudaStream_t stream) {
    int64_t const state_blocks = blocks_of(problem.final_elements());
    if (chosen.tokens_inner) {
      FwdTokensArgs args{problem, TokenTiles::make(problem, kOfTokens, chosen.misalignment)};
      int multiprocessors = 0;
      cudaError_t const error =
          cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      if (error != cudaSuccess) return error;
      args.tiles.divide_tokens_among(int64_t{multiprocessors} * kTokenBlocksPerSM, kTokenTiles);
      return launch_blocks<fwd_tokens_kernel<Dtype, kWidth, kOfTokens, tokens_ahead(kOfTokens),
                                             kTokenTiles, kTokenBlocksPerSM>,
                           Target>(args, args.tiles.blocks + state_blocks, device, stream);
    }
    ChannelLimits const limits{5, kMinRows, kMaxRows, kChannelStages, kBlocks};
    FwdChannelsArgs const args{problem, ChannelTiles::make(problem, kOfChannels, limits)};
    return launch_blocks<
        fwd_channels_kernel<Dtype, kWidth, kOfChannels, kChannelStages, kBlocksPerSM>, Target>(
        args, args.tiles.blocks + state_blocks, device, stream);
  }

  static void explain_call(const FwdProblem& problem, Text& text) {
    Layout const found = layout(problem);
    found.explain(vector_bytes(found.tokens_inner), text);
  }
};

}  // namespace flashvar::causal_conv1d
