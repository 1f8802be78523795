// The bias of a warp's scores, staged in shared memory.
//
// While the GEMMs of a step run, each warp copies the bias of its own scores of the next step,
// asynchronously and without registers. No other warp reads it, so that no barrier of several warps
// is needed.
#pragma once
#include <cstdint>
#include <type_traits>

#include "attention/problem.h"
#include "attention/score_modifiers.cuh"
#include "core/dtype.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/vectors.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// The layout of kColumns keys of each query in a stage. A unit is 8 elements: a row of an 8 x 8
// matrix of 16-bit elements, or the fp32 elements that a quad of lanes reads. Units are swizzled
// within lines of 128 bytes, so that units which are read together, of up to 8 consecutive queries,
// lie in different banks.
template <class Element, int kColumns>
struct BiasLayout {
  static constexpr int kElementBytes = sizeof(typename Element::Word);
  static constexpr int kUnitBytes = 8 * kElementBytes;
  static constexpr int kUnits = kColumns / 8;  // of a query
  static constexpr int kLineUnits = 128 / kUnitBytes;
  // The number of queries whose units share a line of 128 bytes; and of different XOR patterns.
  static constexpr int kLineQueries = kLineUnits > kUnits ? kLineUnits / kUnits : 1;
  static constexpr int kPatterns = kLineUnits < 8 / kLineQueries ? kLineUnits : 8 / kLineQueries;

  // Offset in bytes of a unit of a query.
  static __device__ __forceinline__ uint32_t offset(uint32_t query, uint32_t unit) {
    return ((query * kUnits + unit) ^ (query / kLineQueries % kPatterns)) * kUnitBytes;
  }
};

// The stage of one warp: Config::kBiasQueries x Config::kBiasKeys elements of q's dtype or fp32.
template <class Config>
struct BiasStage {
  using Dtype = typename Config::Dtype;
  static constexpr int kQueries = Config::kBiasQueries, kKeys = Config::kBiasKeys;
  uint32_t smem;

  // Starts to copy. Elements outside of the tensor become zeros.
  __device__ __forceinline__ void load(const Problem& problem, uint32_t batch, uint32_t head,
                                       int32_t first_query, int32_t first_key) const {
    __syncwarp();  // all lanes have read the previous elements
    int32_t const alignment = problem.modifiers.bias_alignment;
    auto copy_all = [&](const auto& bias, auto copy) {
      if (first_query + kQueries <= bias.rows && first_key + kKeys <= bias.columns) {
        copy(bias, std::true_type{});
      } else {
        copy(bias, std::false_type{});
      }
    };
    auto by_16 = [&](const auto& bias, auto whole) {
      copy<16, whole.value>(bias, first_query, first_key);
    };
    auto by_4 = [&](const auto& bias, auto whole) {
      copy<4, whole.value>(bias, first_query, first_key);
    };
    if (problem.modifiers.bias_is_fp32) {
      Bias<dtype::fp32> const bias(problem, batch, head);
      alignment == 16 ? copy_all(bias, by_16) : copy_all(bias, by_4);
    } else {
      Bias<Dtype> const bias(problem, batch, head);
      if (alignment == 16) {
        copy_all(bias, by_16);
      } else if (alignment == 4) {
        copy_all(bias, by_4);
      } else {
        copy_elements(bias, first_query, first_key);
      }
    }
    ptx::cp_async_commit();
  }

  // Waits until all copies of load() are complete, of all lanes.
  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait<0>();
    __syncwarp();  // all lanes have waited
  }

  // Reads a lane's elements of fragment kk, in the order of its accumulators. The fragment is the
  // 16 queries (kRowsAreKeys) or the 16 keys from 16 kk on.
  template <bool kRowsAreKeys>
  __device__ __forceinline__ void read(int kk, uint32_t lane, bool is_fp32,
                                       float (&bias)[8]) const {
    if (is_fp32) {
      read_fp32<kRowsAreKeys>(kk, lane, bias);
    } else {
      read_matrices<kRowsAreKeys>(kk, lane, bias);
    }
  }

 private:
  // Copies pieces of kBytes: lanes that are neighbors copy neighboring pieces of a query. kWhole:
  // all elements are in the tensor.
  template <int kBytes, bool kWhole, class Element>
  __device__ __forceinline__ void copy(const Bias<Element>& bias, int32_t first_query,
                                       int32_t first_key) const {
    using Layout = BiasLayout<Element, kKeys>;
    constexpr int kElements = kBytes / Layout::kElementBytes;
    for_each_piece<kElements, kBytes == 16, kWhole>(
        bias, first_query, first_key,
        [&](uint32_t query, uint32_t key, const typename Element::Word* from, int32_t count) {
          ptx::cp_async_part<kBytes>(
              smem + Layout::offset(query, key / 8) + key % 8 * Layout::kElementBytes, from,
              count * Layout::kElementBytes);
        });
  }

  // Copies 16-bit elements of any alignment through registers, for which the warp waits: cp.async
  // copies at least 4 bytes.
  __device__ __forceinline__ void copy_elements(const Bias<Dtype>& bias, int32_t first_query,
                                                int32_t first_key) const {
    for_each_piece<8, false, false>(
        bias, first_query, first_key,
        [&](uint32_t query, uint32_t key, const uint16_t* from, int32_t count) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            auto element = [&](int j) -> uint32_t { return j < count ? from[j] : 0; };
            words[i] = element(2 * i) | element(2 * i + 1) << 16;
          }
          ptx::shared_store(smem + BiasLayout<Dtype, kKeys>::offset(query, key / 8),
                            uint4{words[0], words[1], words[2], words[3]});
        });
  }

  // Calls visit(query, key, from, count) for each of a lane's pieces of kElements: query and key of
  // its first element, counted from those of the stage, its address in the tensor, and how many of
  // its elements the tensor has.
  template <int kElements, bool kUnrolled, bool kWhole, class Element, class Visit>
  __device__ __forceinline__ void for_each_piece(const Bias<Element>& bias, int32_t first_query,
                                                 int32_t first_key, Visit&& visit) const {
    constexpr int kPieces = kKeys / kElements;  // of a query
    constexpr int kLanes = kPieces < 32 ? kPieces : 32;
    constexpr int kStep = 32 / kLanes;  // queries at a time
    constexpr int kUnroll = kUnrolled ? kQueries / kStep : 1;
    uint32_t const lane = ptx::thread_index() % 32;
    int32_t const row = first_query + lane / kLanes;
#pragma unroll
    for (int piece = 0; piece < kPieces; piece += kLanes) {
      uint32_t const key = (piece + lane % kLanes) * kElements;
      int32_t const column = first_key + key;
      int32_t const count = kWhole ? kElements : min(max(bias.columns - column, 0), kElements);
      const auto* from = bias.data + row * bias.row_stride + column;
#pragma unroll kUnroll
      for (int query = 0; query < kQueries; query += kStep) {
        visit(query + lane / kLanes, key, from, kWhole || row + query < bias.rows ? count : 0);
        from += kStep * bias.row_stride;
      }
    }
  }

  template <bool kRowsAreKeys>
  __device__ __forceinline__ void read_matrices(int kk, uint32_t lane, float (&bias)[8]) const {
    // Matrix i holds accumulators 2 i and 2 i + 1 of every lane.
    uint32_t const matrix = lane / 8, row = lane % 8;
    uint32_t words[4];
    if constexpr (kRowsAreKeys) {
      uint32_t const query = 16 * kk + matrix / 2 * 8 + row;
      ptx::ldmatrix_x4_trans(words, smem + BiasLayout<Dtype, kKeys>::offset(query, matrix % 2));
    } else {
      uint32_t const query = matrix % 2 * 8 + row;
      ptx::ldmatrix_x4(words, smem + BiasLayout<Dtype, kKeys>::offset(query, 2 * kk + matrix / 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bias[2 * i] = Dtype::unpack(static_cast<uint16_t>(words[i]));
      bias[2 * i + 1] = Dtype::unpack(static_cast<uint16_t>(words[i] >> 16));
    }
  }

  template <bool kRowsAreKeys>
  __device__ __forceinline__ void read_fp32(int kk, uint32_t lane, float (&bias)[8]) const {
    using Layout = BiasLayout<dtype::fp32, kKeys>;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      int const column = i / 4, half = i / 2 % 2;  // mma tile, and half of its rows
      if constexpr (kRowsAreKeys) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          uint32_t const query = 16 * kk + column * 8 + lane % 4 * 2 + e;
          bias[i + e] = ptx::shared_load(smem + Layout::offset(query, half) + lane / 4 * 4);
        }
      } else {
        float2 const pair = ptx::shared_load2(
            smem + Layout::offset(half * 8 + lane / 4, 2 * kk + column) + lane % 4 * 8);
        bias[i] = pair.x;
        bias[i + 1] = pair.y;
      }
    }
  }
};

}  // namespace flashvar::sm90::attention
