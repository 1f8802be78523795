// Tensor maps of a call's tensors, in boxes of a chunk's rows. Host only.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/problem.h"
#include "sm90/clipped_map.h"

namespace flashvar::sm90::gated_delta_rule {

template <class Dtype>
struct ChunkMaps {
  const flashvar::gated_delta_rule::Problem& problem;

  // Where there are no rows nothing is loaded, and no map is encoded.
  cudaError_t encode(CUtensorMap& map, const flashvar::gated_delta_rule::Tensor& tensor,
                     int64_t heads, int64_t dim) const {
    if (problem.rows.seqlen <= 0) return cudaSuccess;
    int64_t const batch = problem.rows.offsets == nullptr ? problem.sequences : 1;
    return encode_clipped_map(map, tensor_map_type<Dtype>(), tensor, problem.rows.seqlen, heads,
                              batch, dim, flashvar::gated_delta_rule::kChunk);
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
