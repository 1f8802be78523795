// Tensor maps of a call's tensors, whose boxes are one column block of a chunk's rows. Host only.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/problem.h"
#include "sm90/clipped_map.h"

namespace flashvar::sm90::gated_delta_rule {

// A tensor, and the map to encode for it.
struct ChunkMap {
  CUtensorMap& map;
  const flashvar::gated_delta_rule::Tensor& tensor;
};

template <class Dtype>
struct ChunkMaps {
  const flashvar::gated_delta_rule::Problem& problem;

  // Encodes the maps of tensors shaped like k.
  cudaError_t keys(std::initializer_list<ChunkMap> maps) const {
    return encode(maps, problem.heads_qk, problem.head_dim);
  }
  // Encodes the maps of tensors shaped like v.
  cudaError_t values(std::initializer_list<ChunkMap> maps) const {
    return encode(maps, problem.heads, problem.head_dim_v);
  }

 private:
  // Without rows kernels load nothing, and no map is encoded.
  cudaError_t encode(std::initializer_list<ChunkMap> maps, int64_t heads, int64_t dim) const {
    if (problem.rows.seqlen <= 0) return cudaSuccess;
    int64_t const batch = problem.rows.offsets == nullptr ? problem.sequences : 1;
    for (const ChunkMap& one : maps) {
      cudaError_t const error =
          encode_clipped_map(one.map, tensor_map_type<Dtype>(), one.tensor, problem.rows.seqlen,
                             heads, batch, dim, flashvar::gated_delta_rule::kChunk);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }
};

}  // namespace flashvar::sm90::gated_delta_rule
