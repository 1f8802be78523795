// Launches the prepare kernel of the forward and of the backward, on every architecture.
#pragma once
#include <cstdint>

#include "core/ceil_div.h"
#include "core/launch.h"
#include "sm80/gated_delta_rule/prepare.cuh"

namespace flashvar::sm80::gated_delta_rule {

// Number of a call's records, including those of surplus chunks, which have no rows.
inline int64_t record_count(const FwdProblem& problem) {
  return problem.rows.tiles(problem.sequences, kChunk) * problem.heads;
}

template <class Config>
cudaError_t launch_prepare(const FwdProblem& problem, int device, cudaStream_t stream) {
  using Record = typename Config::Record;
  auto const group_blocks = static_cast<uint32_t>(ceil_div(problem.group, kHeadsAtOnce));
  PrepareArgs<Record> const args{problem, static_cast<Record*>(problem.workspace), group_blocks};
  LaunchShape const shape{
      problem.rows.tiles(problem.sequences, kChunk) * problem.heads_qk * group_blocks,
      Config::kThreads, Config::kSharedMemory};
  if (shape.blocks == 0) return cudaSuccess;
  return launch_kernel<prepare_kernel<Config>>(args, shape, device, stream);
}

}  // namespace flashvar::sm80::gated_delta_rule
