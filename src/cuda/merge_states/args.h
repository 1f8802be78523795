// Arguments of the merge_states kernels: rows in the order of memory, parts as addresses, and how a
// block's threads share its rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#include "merge_states/problem.h"

namespace flashvar::merge_states {

inline constexpr int kThreads = 256;
inline constexpr int kTileRows = 256;     // most rows of a block
inline constexpr int kGrownRows = 128;    // a tile grows from row_step() to at most so many rows
inline constexpr int kWindow = 2048;      // weights in shared memory: of all rows and some parts
inline constexpr int kRowsAtOnce = 2;     // rows that a thread of the forward has in flight
inline constexpr int kBwdRowsAtOnce = 2;  // likewise of the backward
inline constexpr int kPartsAtOnce = 2;    // parts of each of these rows, likewise in flight
inline constexpr int kLsesPerLane = 4;    // with more parts, more lanes share the sum of a row
inline constexpr int kPartsPerGroup = 8;  // with more parts, more groups share a row
inline constexpr int kMaxGroups = 8;      // most groups that share the parts of a row
inline constexpr int64_t kBlocks = 1024;  // tiles grow only where so many blocks, several per SM,
                                          // remain

// Elements from row to row: rows are [outer, middle, inner], the batch outermost.
struct RowStrides {
  int64_t outer, middle, inner;
};

// One tensor [outer, middle, inner, elements].
template <class Element>
struct Rows {
  Element* data;
  RowStrides strides;
};

template <class Element>
struct PartRows {
  const Element* first;
  int64_t part_stride;
  RowStrides strides;
  bool stacked;
  const Element* addresses[kMaxAddresses];  // where not stacked

  __device__ __forceinline__ const Element* part(int index) const {
    return stacked ? first + index * part_stride : addresses[index];
  }
};

// How a block's threads share its rows. `lanes` threads read the columns of a row; `groups` groups
// of threads share its parts; the block processes as many rows at a time as that leaves threads
// for. Lanes and groups are powers of two and depend on head_dim and parts alone, so a row's bits
// do not depend on the other rows.
struct Split {
  int32_t lanes_log2;  // at most 5: the lanes of a row are of one warp
  int32_t groups_log2;
  int32_t tile_rows;
  int32_t sum_lanes_log2;  // threads that find the sum of a row, at most 5

  __host__ __device__ int32_t lanes() const { return 1 << lanes_log2; }
  __host__ __device__ int32_t groups() const { return 1 << groups_log2; }
  __host__ __device__ int32_t row_step() const { return kThreads >> (lanes_log2 + groups_log2); }
  __host__ __device__ int32_t window() const { return kWindow / tile_rows; }  // parts
};

template <class Word>
struct Args {
  int64_t row_count;
  uint32_t middle, inner;  // sizes
  int32_t parts;
  int32_t head_dim;
  Split split;
  RowStrides lse_strides;  // of tensors [batch, heads, seqlen]
  PartRows<Word> outs;
  PartRows<float> lses;
};

template <class Word>
struct FwdArgs : Args<Word> {
  Rows<Word> out;
  float* lse;
};

template <class Word>
struct BwdArgs : Args<Word> {
  Rows<const Word> grad_out;
  Rows<Word> grad_outs;
  int64_t grad_outs_stride;
  uint64_t skipped_outs;  // bit i: grad_outs has no part for part i, which is below 64
  const float* grad_lse;
  float* grad_lses;

  // Whether the gradient of a part's out is written, and its part of grad_outs.
  __device__ __forceinline__ bool writes(int part) const {
    return grad_outs.data != nullptr && (part >= 64 || (skipped_outs >> part & 1) == 0);
  }
  __device__ __forceinline__ Word* grad_of(int part) const {
    uint64_t const before = part >= 64 ? skipped_outs : skipped_outs & ((uint64_t{1} << part) - 1);
    return grad_outs.data + (part - __popcll(before)) * grad_outs_stride;
  }
};

static_assert(kThreads <= kTileRows);  // row_step()
// 4 KiB of arguments is what every driver takes.
static_assert(sizeof(FwdArgs<float>) <= 4096 && sizeof(BwdArgs<float>) <= 4096);

// Makes arguments of a problem. Rows are counted in the order in which `written` has them in
// memory.
class ArgsMaker {
 public:
  ArgsMaker(const Problem& problem, const Tensor& written)
      : problem_(problem),
        heads_inner_(written.head_stride <= written.seq_stride || problem.seqlen == 1) {}

  template <class Word>
  void fill(Args<Word>& args, int elements) const {
    args.row_count = problem_.rows();
    args.middle = static_cast<uint32_t>(problem_.seqlen);
    args.inner = problem_.heads;
    if (!heads_inner_) std::swap(args.middle, args.inner);
    args.parts = problem_.parts;
    args.head_dim = problem_.head_dim;
    args.split = split(elements);
    args.lse_strides = strides({nullptr, problem_.heads * problem_.seqlen, 1, problem_.seqlen});
    fill(args.outs, problem_.outs);
    fill(args.lses, problem_.lses);
  }

  template <class Element>
  Rows<Element> rows(const Tensor& tensor) const {
    return {static_cast<Element*>(tensor.data), strides(tensor)};
  }

 private:
  RowStrides strides(const Tensor& tensor) const {
    return heads_inner_ ? RowStrides{tensor.batch_stride, tensor.seq_stride, tensor.head_stride}
                        : RowStrides{tensor.batch_stride, tensor.head_stride, tensor.seq_stride};
  }

  template <class Element>
  void fill(PartRows<Element>& rows, const Parts& parts) const {
    rows.first = static_cast<const Element*>(parts.first.data);
    rows.part_stride = parts.stride;
    rows.strides = strides(parts.first);
    rows.stacked = parts.addresses == nullptr;
    if (rows.stacked) return;
    for (int i = 0; i < problem_.parts; ++i) {
      rows.addresses[i] = static_cast<const Element*>(parts.addresses[i]);
    }
  }

  // `elements`: of a Vec. Tiles grow as long as the call has at least kBlocks of them, and one
  // window holds the weights of all parts.
  Split split(int elements) const {
    Split split{};
    while (split.lanes_log2 < 5 && elements << split.lanes_log2 < problem_.head_dim) {
      ++split.lanes_log2;
    }
    while (split.groups() < kMaxGroups && split.groups() * kPartsPerGroup < problem_.parts &&
           split.row_step() > 1) {
      ++split.groups_log2;
    }
    split.tile_rows = split.row_step();
    while (2 * split.tile_rows <= kGrownRows && 2 * split.tile_rows * problem_.parts <= kWindow &&
           problem_.rows() / (2 * split.tile_rows) >= kBlocks) {
      split.tile_rows *= 2;
    }
    while (split.sum_lanes_log2 < 5 && kLsesPerLane << split.sum_lanes_log2 < problem_.parts) {
      ++split.sum_lanes_log2;
    }
    return split;
  }

  const Problem& problem_;
  bool heads_inner_;
};

}  // namespace flashvar::merge_states
