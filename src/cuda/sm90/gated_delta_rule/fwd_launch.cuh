// Launches the forward: prepare (the records of all chunks), then the chains; in segments, where
// chains over whole sequences would leave much of the device idle.
#pragma once
#include <cstdint>

#include "core/ceil_div.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "gated_delta_rule/large_dim.h"
#include "gated_delta_rule/segment_scan.cuh"
#include "sm80/gated_delta_rule/prepare_launch.cuh"
#include "sm90/gated_delta_rule/chunk_maps.h"
#include "sm90/gated_delta_rule/fwd.cuh"
#include "sm90/gated_delta_rule/segments.cuh"

namespace flashvar::sm90::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
struct FwdLaunch {
  static constexpr int kDim = kHeadDim;
  static_assert(kDim % 64 == 0, "whole column blocks");
  // Large head dims: one state warpgroup per block, and no segments.
  static constexpr bool kLarge = kLargeDim<kDim>;
  static_assert(kLarge || kDim <= kMaxScanDim, "calls in segments scan");
  static constexpr int kMostWarpgroups = kLarge ? 1 : 2;
  using Prepare = sm80::gated_delta_rule::PrepareConfig<Dtype, kDim>;
  template <int kWarpgroups>
  using Config = FwdConfig<Target, Dtype, kDim, kWarpgroups>;
  using SegmentConfig = FwdConfig<Target, Dtype, kDim, 2, false>;
  using Scan = ScanConfig<kDim>;
  static constexpr int kSegmentThreads = SegmentConfig::kThreads;
  static constexpr int kSegmentMemory = SegmentConfig::kSharedMemory > Config<1>::kSharedMemory
                                            ? SegmentConfig::kSharedMemory
                                            : Config<1>::kSharedMemory;

  static constexpr GatedDeltaRuleFwdKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr auto facts(const char* row) {
    constexpr const char* kSegments = "few heads and long sequences";
    KernelFactsMaker const chain{row, "wgmma", "every call"};
    KernelFactsMaker const prepare{row, "mma.sync", "every call"};
    KernelFactsMaker const segment{row, "wgmma", kSegments}, scan{row, "simt", kSegments};
    auto const prepare_facts =
        prepare.make("prepare_kernel", Prepare::kThreads, Prepare::kSharedMemory, kChunk);
    if constexpr (kLarge) {
      return KernelFactsList<2>{{chain.make("fwd_kernel", Config<1>::kThreads,
                                            Config<1>::kSharedMemory, kChunk, Config<1>::kColumns),
                                 prepare_facts}};
    } else {
      return KernelFactsList<5>{{chain.make("fwd_kernel", Config<2>::kThreads,
                                            Config<2>::kSharedMemory, kChunk, Config<2>::kColumns),
                                 chain.make("fwd_kernel, few heads", Config<1>::kThreads,
                                            Config<1>::kSharedMemory, kChunk, Config<1>::kColumns),
                                 prepare_facts,
                                 segment.make("segment_kernel", kSegmentThreads, kSegmentMemory,
                                              kChunk, SegmentConfig::kColumns),
                                 scan.make("scan_kernel", Scan::kThreads, 0, Scan::kColumns)}};
    }
  }

 private:
  // In the order of ChainCosts' members; times measured on an H200, which has 132 SMs.
  static constexpr ChainCosts kCosts{132, 1350, 2050, 1310, 2500, 6000, true};

  static uint64_t record_bytes(const FwdProblem& problem) {
    return sm80::gated_delta_rule::record_count(problem) * sizeof(ChunkRecord);
  }

  static Segments segments_of(const FwdProblem& problem) {
    return kLarge ? Segments{0} : choose_segments(problem, kCosts);
  }

  static FwdArgs make_args(const FwdProblem& problem) {
    FwdArgs args{};
    args.problem = problem;
    args.records = static_cast<const ChunkRecord*>(problem.workspace);
    args.segments = segments_of(problem);
    args.between = {problem, args.segments, kDim,
                    static_cast<char*>(problem.workspace) + record_bytes(problem)};
    return args;
  }

  static uint64_t workspace(const FwdProblem& problem) {
    return record_bytes(problem) + make_args(problem).between.bytes;
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = sm80::gated_delta_rule::launch_prepare<Prepare>(problem, device, stream);
    }
    FwdArgs args = make_args(problem);
    if (error == cudaSuccess) error = encode_maps(args);
    if (error != cudaSuccess) return error;
    if constexpr (kLarge) {
      return launch_chains<Config<1>>(args, problem.sequences * problem.heads, device, stream);
    } else {
      int64_t const boundaries = args.segments.boundaries(problem);
      if (boundaries > 0) error = launch_segments(args, boundaries, device, stream);
      if (error != cudaSuccess) return error;
      args.starts_at_boundary = boundaries > 0;
      int64_t const chains =
          (args.starts_at_boundary ? boundaries : problem.sequences) * problem.heads;
      return chains * ceil_div(problem.head_dim_v, Config<1>::kColumns) <= multiprocessors
                 ? launch_chains<Config<1>>(args, chains, device, stream)
                 : launch_chains<Config<2>>(args, chains, device, stream);
    }
  }

  static cudaError_t encode_maps(FwdArgs& args) {
    const FwdProblem& problem = args.problem;
    ChunkMaps<Dtype> const maps{problem};
    cudaError_t const error = maps.keys({{args.q, problem.q}, {args.k, problem.k}});
    return error == cudaSuccess ? maps.values({{args.v, problem.v}}) : error;
  }

  // Passes 1 and 2. Pass 1 may start while prepare writes the last records (PDL).
  static cudaError_t launch_segments(FwdArgs& args, int64_t boundaries, int device,
                                     cudaStream_t stream) {
    const FwdProblem& problem = args.problem;
    int64_t const chains = boundaries * problem.heads;
    args.column_tiles = ceil_div(problem.head_dim_v, Config<1>::kColumns);
    args.inner_tiles = ceil_div(problem.head_dim_v, SegmentConfig::kColumns) +
                       ceil_div(problem.head_dim, SegmentConfig::kColumns);
    int64_t const first_blocks = problem.sequences * problem.heads * args.column_tiles;
    if (first_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    args.first_blocks = static_cast<uint32_t>(first_blocks);
    LaunchShape const shape{first_blocks + chains * args.inner_tiles, kSegmentThreads,
                            kSegmentMemory, true};
    cudaError_t const error =
        launch_kernel<segment_kernel<Config<1>, SegmentConfig>>(args, shape, device, stream);
    if (error != cudaSuccess) return error;
    ScanArgs const scan{problem, args.segments, args.between,
                        ceil_div(problem.head_dim_v, Scan::kColumns)};
    LaunchShape const scan_shape{chains * scan.column_tiles, Scan::kThreads, 0, true};
    return launch_kernel<scan_kernel<Scan>>(scan, scan_shape, device, stream);
  }

  template <class C>
  static cudaError_t launch_chains(FwdArgs& args, int64_t chains, int device, cudaStream_t stream) {
    args.column_tiles = ceil_div(args.problem.head_dim_v, C::kColumns);
    LaunchShape shape{chains * args.column_tiles, C::kThreads, C::kSharedMemory};
    // PDL needs a preceding kernel of this call: prepare is not launched without records.
    shape.programmatic = sm80::gated_delta_rule::record_count(args.problem) > 0;
    return launch_kernel<fwd_kernel<C>>(args, shape, device, stream);
  }

  static void explain_call(const FwdProblem& problem, Text& text) {
    text.print("wgmma: chunks of %d tokens, %d columns of v at a time", kChunk,
               Config<kMostWarpgroups>::kColumns);
    if (!kLarge) text.print(", or %d where that fills the device", Config<1>::kColumns);
    int32_t const rows = segments_of(problem).rows;
    if (rows > 0) text.print(", segments of %d tokens of a sequence at the same time", rows);
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
