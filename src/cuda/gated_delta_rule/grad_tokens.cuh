// The backward's chains for chunks of large growth: token by token, in fp32.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chain_parts.cuh"
#include "ptx/vectors.cuh"

namespace flashvar::gated_delta_rule {

// Element of a 16-bit tile's row that belongs to accumulator row g + 8 half of the lane.
template <class Dtype>
__device__ __forceinline__ float load_value(uint32_t tile, int token, int half) {
  Lane const lane(ptx::thread_index());
  int const column = 16 * lane.warp + lane.g + 8 * half;
  return Dtype::unpack(ptx::shared_load_unordered<uint16_t>(element_address(tile, token, column)));
}

// The state's element that multiplies element i of a row of q or k, for the state's row
// g + 8 half.
template <int kElements>
__device__ __forceinline__ float& element_of(float (&state)[kElements], int i, int half) {
  return state[i / 2 * 4 + 2 * half + i % 2];
}

__device__ __forceinline__ GateCoordinate coordinate_of(const Work& work, int32_t row) {
  return {work.batch, int64_t{work.span.first} + row, work.head};
}

// Carries the state through a chunk. put(token, half, r) receives the token's residual R, in all
// lanes of a quad; 0 beyond the sequence.
template <class Dtype, int kDim, class Put>
__device__ __forceinline__ void residuals_by_tokens(const FwdProblem& problem, const Work& work,
                                                    float (&state)[kDim / 2], uint32_t tile_k,
                                                    uint32_t tile_v, int32_t row, Put put) {
  int32_t const count = min(work.span.count - row, kChunk);
#pragma unroll 1
  for (int token = 0; token < count; ++token) {
    Lane const lane(ptx::thread_index());  // read again: keeps no register across the main loop
    GateCoordinate const coordinate = coordinate_of(work, row + token);
    float const decay = exp2_approx(decay_log(problem, coordinate) * kLog2E);
    float const norm = norm_of<Dtype, kDim>(problem, lane, tile_k, token);
    float const factor = beta_of(problem, coordinate) * norm;
    float predicted[2] = {}, residual[2];  // predicted: S^T k
    for_each_row_element<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        element_of(state, i, half) *= decay;
        predicted[half] = fmaf(element_of(state, i, half), x, predicted[half]);
      }
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      residual[half] = load_value<Dtype>(tile_v, token, half) - norm * quad_sum(predicted[half]);
      put(token, half, residual[half]);
    }
    for_each_row_element<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& value = element_of(state, i, half);
        value = fmaf(factor * residual[half], x, value);
      }
    });
  }
#pragma unroll 1
  for (int token = count; token < kChunk; ++token) {
    put(token, 0, 0.f);
    put(token, 1, 0.f);
  }
}

// Carries the state's gradient through a chunk, last token first. put(token, half, x) receives an
// element of the token's dV, in all lanes of a quad, which have read dOut's element by then.
template <class Dtype, int kDim, class Put>
__device__ __forceinline__ void gradients_by_tokens(const FwdProblem& problem, const Work& work,
                                                    float (&grad)[kDim / 2], uint32_t tile_k,
                                                    uint32_t tile_q, uint32_t tile_grad_out,
                                                    int32_t row, Put put) {
#pragma unroll 1
  for (int token = min(work.span.count - row, kChunk) - 1; token >= 0; --token) {
    Lane const lane(ptx::thread_index());  // read again: keeps no register across the main loop
    GateCoordinate const coordinate = coordinate_of(work, row + token);
    float const decay = exp2_approx(decay_log(problem, coordinate) * kLog2E);
    float const norm = norm_of<Dtype, kDim>(problem, lane, tile_k, token);
    float const factor = problem.scale * norm_of<Dtype, kDim>(problem, lane, tile_q, token);
    float given[2], product[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      given[half] = factor * load_value<Dtype>(tile_grad_out, token, half);
    }
    for_each_row_element<Dtype, kDim>(lane, tile_q, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& value = element_of(grad, i, half);
        value = fmaf(given[half], x, value);
      }
    });
    for_each_row_element<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        product[half] = fmaf(element_of(grad, i, half), x, product[half]);
      }
    });
    float const beta = beta_of(problem, coordinate);
    __syncwarp();  // all lanes of the quad have read dOut's elements, which put() may overwrite
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      product[half] = beta * norm * quad_sum(product[half]);
      put(token, half, product[half]);
    }
    for_each_row_element<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& value = element_of(grad, i, half);
        value = decay * fmaf(-norm * product[half], x, value);
      }
    });
  }
}

}  // namespace flashvar::gated_delta_rule
