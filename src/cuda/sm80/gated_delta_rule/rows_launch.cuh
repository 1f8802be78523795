// Launches rows_kernel, dQ and dK of the backward, and the kernel of careful chunks.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/target.h"
#include "sm80/gated_delta_rule/grad_rows.cuh"

namespace flashvar::sm80::gated_delta_rule {

// Most persistent blocks: there is memory in the workspace for as many.
inline constexpr int64_t kMaxRowsBlocks = 256;

// The kernel of careful items, which both families launch.
template <class Target, class Dtype, int kDim>
struct CarefulRowsLaunch {
  using Config = RowsConfig<Target, Dtype, kDim, true>;

  static constexpr KernelFactsList<1> facts(const char* row) {
    KernelFactsMaker const maker{row, "mma.sync", "every call"};
    return {
        {maker.make("careful_rows_kernel", Config::kThreads, Config::kSharedMemory, kChunk, kDim)}};
  }

  // `programmatic`: with PDL; the preceding kernel must allow it.
  static cudaError_t launch(const RowsArgs& args, bool programmatic, int device,
                            cudaStream_t stream) {
    int multiprocessors = 0;
    cudaError_t const error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    int64_t const blocks = std::min(int64_t{multiprocessors}, kMaxRowsBlocks);
    LaunchShape const shape{std::min(int64_t{args.items}, blocks), Config::kThreads,
                            Config::kSharedMemory, programmatic};
    return launch_kernel<careful_rows_kernel<Config>>(args, shape, device, stream);
  }
};

// Number of a call's work items, including those of surplus chunks. They fit 31 bits, because the
// prepare kernel has launched at least one block for each.
inline uint32_t row_items(const BwdProblem& problem) {
  return static_cast<uint32_t>(problem.rows.tiles(problem.sequences, kChunk) * problem.heads_qk);
}

// Bytes of the workspace for dQ and dK of parts.
template <class Config>
uint64_t rows_bytes(const BwdProblem& problem) {
  if (Config::kParts == 1) return 0;
  auto const blocks = static_cast<uint64_t>(std::min(int64_t{row_items(problem)}, kMaxRowsBlocks));
  return blocks * Config::kParts * 2 * kChunk * Config::kDim * sizeof(float);
}

// Facts of a family's rows_kernel and of the kernel of careful items.
template <class Config, class Careful>
constexpr KernelFactsList<2> rows_facts(const char* row, const char* family) {
  KernelFactsMaker const maker{row, family, "every call"};
  return join(KernelFactsList<1>{{maker.make("rows_kernel", Config::kThreads, Config::kSharedMemory,
                                             kChunk, Config::kDim)}},
              Careful::facts(row));
}

template <class Target, class Dtype, int kDim>
struct RowsLaunch {
  static constexpr const char* kFamily = "mma.sync";
  using Config = RowsConfig<Target, Dtype, kDim, false>;
  using Careful = CarefulRowsLaunch<Target, Dtype, kDim>;

  static constexpr KernelFactsList<2> facts(const char* row) {
    return rows_facts<Config, Careful>(row, kFamily);
  }

  static uint64_t bytes(const BwdProblem& problem) { return rows_bytes<Config>(problem); }

  // Precondition: the call has chunks.
  static cudaError_t launch(const BwdProblem& problem, const GradWorkspace& workspace, int device,
                            cudaStream_t stream) {
    RowsArgs const args{problem, workspace, row_items(problem)};
    LaunchShape shape{args.items, Config::kThreads, Config::kSharedMemory,
                      Target::kArchitecture >= 90};
    cudaError_t error = cudaSuccess;
    if (Config::kParts > 1) {
      int multiprocessors = 0;
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      shape.blocks = std::min({shape.blocks, int64_t{multiprocessors}, kMaxRowsBlocks});
    }
    if (error == cudaSuccess) {
      error = launch_kernel<rows_kernel<Config>>(args, shape, device, stream);
    }
    return error == cudaSuccess ? Careful::launch(args, false, device, stream) : error;
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
