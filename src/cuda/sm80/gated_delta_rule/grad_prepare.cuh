// The first kernel of the backward: prepare.cuh with GradRecord.
#pragma once
#include <cstdint>

#include "gated_delta_rule/grad_chunk.h"
#include "sm80/gated_delta_rule/prepare.cuh"

namespace flashvar::sm80::gated_delta_rule {

// The first matrix is X o D, without factors beta.
template <>
struct Solution<GradRecord> {
  static constexpr float kCareful = kCarefulGrowth;
  static constexpr float kLargest = kLargestSolution;
  static __device__ __forceinline__ uint16_t* matrix(GradRecord& record) { return record.solution; }
  static __device__ __forceinline__ uint16_t* low(GradRecord& record) {
    return record.solution_low;
  }
  static __device__ __forceinline__ float row(float) { return 1.f; }
  static __device__ __forceinline__ float column(float) { return 1.f; }
  static __device__ __forceinline__ float diagonal(float) { return 0.f; }
  static __device__ __forceinline__ float size(float element, float minus_beta) {
    float const scaled = element * minus_beta;
    return scaled * scaled;
  }
  static __device__ __forceinline__ float diagonal_size(float) { return 1.f; }
  static __device__ __forceinline__ void write_more(GradRecord& record, int first, float2 beta,
                                                    float2 sums, float2 norm_q, float2 norm_k) {
    put_pair(record.beta, first, beta);
    put_pair(record.sums, first, sums);
    put_pair(record.norm_q, first, norm_q);
    put_pair(record.norm_k, first, norm_k);
  }
};

}  // namespace flashvar::sm80::gated_delta_rule
