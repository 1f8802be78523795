// Launches the forward: prepare (the records of all chunks), then the chains; in segments, where
// chains over whole sequences would leave much of the device idle.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/ceil_div.h"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "gated_delta_rule/kernel_table.h"
#include "gated_delta_rule/large_dim.h"
#include "gated_delta_rule/segment_scan.cuh"
#include "sm80/gated_delta_rule/fwd_large_dim.cuh"
#include "sm80/gated_delta_rule/prepare_launch.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype, int kHeadDim>
struct FwdLaunch {
  static constexpr int kDim = kHeadDim;
  static_assert(kDim % 64 == 0, "whole column blocks");
  using Prepare = PrepareConfig<Dtype, kDim>;
  template <bool kOutput>
  using ConfigOf =
      std::conditional_t<kLargeDim<kDim>, LargeDimFwdConfig<Target, Dtype, kDim, kOutput>,
                         FwdConfig<Target, Dtype, kDim, kOutput>>;
  using Config = ConfigOf<true>;
  using SegmentConfig = ConfigOf<false>;
  using Scan = ScanConfig<kDim>;
  // Whether sequences are divided into segments.
  static constexpr bool kDivides = kDim <= kMaxScanDim;

  static constexpr GatedDeltaRuleFwdKernel row() {
    return {Dtype::kAbi, kHeadDim, {&workspace, &launch, &explain_call}};
  }

  static constexpr auto facts(const char* row) {
    constexpr const char* kSegments = "few heads and long sequences";
    KernelFactsMaker const maker{row, "mma.sync", "every call"};
    KernelFactsMaker const segment{row, "mma.sync", kSegments}, scan{row, "simt", kSegments};
    KernelFactsList<2> const always{
        {maker.make("fwd_kernel", Config::kThreads, Config::kSharedMemory, kChunk,
                    Config::kColumns),
         maker.make("prepare_kernel", Prepare::kThreads, Prepare::kSharedMemory, kChunk)}};
    if constexpr (kDivides) {
      return join(always,
                  KernelFactsList<2>{
                      {segment.make("segment_kernel", SegmentConfig::kThreads,
                                    SegmentConfig::kSharedMemory, kChunk, SegmentConfig::kColumns),
                       scan.make("scan_kernel", Scan::kThreads, 0, Scan::kColumns)}});
    } else {
      return always;
    }
  }

 private:
  // In the order of ChainCosts' members. 108 is the number of SMs of an A100: a constant, so that
  // results do not depend on the device. Times are measured on 9.0 and used for every architecture:
  // only their ratios matter. A block has 64 columns, so that 128 take two blocks.
  static constexpr ChainCosts kCosts{108, 2600, 5200, 4000, 3000, 10000, false};

  static uint64_t record_bytes(const FwdProblem& problem) {
    return record_count(problem) * sizeof(ChunkRecord);
  }

  static Segments segments_of(const FwdProblem& problem) {
    return kDivides ? choose_segments(problem, kCosts) : Segments{0};
  }

  static FwdArgs make_args(const FwdProblem& problem) {
    Segments const segments = segments_of(problem);
    return {
        problem,
        static_cast<const ChunkRecord*>(problem.workspace),
        ceil_div(problem.head_dim_v, Config::kColumns),
        segments,
        static_cast<uint32_t>(segments.boundaries(problem)),
        {problem, segments, kDim, static_cast<char*>(problem.workspace) + record_bytes(problem)}};
  }

  static uint64_t workspace(const FwdProblem& problem) {
    return record_bytes(problem) + make_args(problem).between.bytes;
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    cudaError_t error = launch_prepare<Prepare>(problem, device, stream);
    FwdArgs const args = make_args(problem);
    if constexpr (kDivides) {
      if (error == cudaSuccess && args.boundaries > 0) {
        error = launch_segments(args, device, stream);
      }
    }
    if (error != cudaSuccess) return error;
    LaunchShape const shape{
        (args.boundaries + problem.sequences) * problem.heads * args.column_tiles, Config::kThreads,
        Config::kSharedMemory};
    return launch_kernel<fwd_kernel<Config>>(args, shape, device, stream);
  }

  static cudaError_t launch_segments(FwdArgs args, int device, cudaStream_t stream) {
    const FwdProblem& problem = args.problem;
    int64_t const chains = int64_t{args.boundaries} * problem.heads;
    args.column_tiles += ceil_div(problem.head_dim, Config::kColumns);
    LaunchShape const shape{chains * args.column_tiles, SegmentConfig::kThreads,
                            SegmentConfig::kSharedMemory};
    cudaError_t const error =
        launch_kernel<segment_kernel<SegmentConfig>>(args, shape, device, stream);
    if (error != cudaSuccess) return error;
    ScanArgs const scan{problem, args.segments, args.between,
                        ceil_div(problem.head_dim_v, Scan::kColumns)};
    LaunchShape const scan_shape{chains * scan.column_tiles, Scan::kThreads, 0};
    return launch_kernel<scan_kernel<Scan>>(scan, scan_shape, device, stream);
  }

  static void explain_call(const FwdProblem& problem, Text& text) {
    text.print("mma.sync: chunks of %d tokens, %d columns of v at a time", kChunk,
               Config::kColumns);
    int32_t const rows = segments_of(problem).rows;
    if (rows > 0) text.print(", segments of %d tokens of a sequence at the same time", rows);
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
