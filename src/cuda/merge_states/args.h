// What the kernels of merge_states are launched with: rows in the order of memory, parts as
// addresses, and how a block is shared out.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#include "merge_states/problem.h"

namespace flashvar::merge_states {

inline constexpr int kThreads = 256;
inline constexpr int kBatch = 2;         // parts that a thread loads at once
inline constexpr int kPartsPerTeam = 4;  // at least, before another team shares a row
inline constexpr int kMaxGroups = 8;     // teams that share the parts of a row

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

// Threads of a block: teams of `lanes` threads, each at one row; `groups` teams share the parts of
// a row. Both depend on head_dim and parts alone, so a row's bits do not depend on the others.
struct Teams {
  int32_t lanes;
  int32_t groups;

  __host__ __device__ int32_t rows() const { return kThreads / lanes / groups; }
};

template <class Word>
struct Args {
  int64_t row_count;
  uint32_t middle, inner;  // sizes
  int32_t parts;
  int32_t head_dim;
  Teams teams;
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
  uint64_t skipped_outs;  // bit i: part i, below 64, has no place in grad_outs
  const float* grad_lse;
  float* grad_lses;

  // Whether the gradient of a part's out is written, and where its place in grad_outs is.
  __device__ __forceinline__ bool writes(int part) const {
    return grad_outs.data != nullptr && (part >= 64 || (skipped_outs >> part & 1) == 0);
  }
  __device__ __forceinline__ Word* grad_of(int part) const {
    uint64_t const before = part >= 64 ? skipped_outs : skipped_outs & ((uint64_t{1} << part) - 1);
    return grad_outs.data + (part - __popcll(before)) * grad_outs_stride;
  }
};

// 4 KiB is what every driver takes.
static_assert(sizeof(FwdArgs<float>) <= 4096 && sizeof(BwdArgs<float>) <= 4096);

// Makes arguments of a problem. Rows are counted in the order in which `written` has them in
// memory.
class ArgsMaker {
 public:
  ArgsMaker(const Problem& problem, const Tensor& written)
      : problem_(problem),
        heads_inner_(written.head_stride <= written.seq_stride || problem.seqlen == 1) {}

  template <class Word>
  void fill(Args<Word>& args, int elements, bool power_of_two) const {
    args.row_count = problem_.rows();
    args.middle = static_cast<uint32_t>(problem_.seqlen);
    args.inner = problem_.heads;
    if (!heads_inner_) std::swap(args.middle, args.inner);
    args.parts = problem_.parts;
    args.head_dim = problem_.head_dim;
    args.teams = teams(elements, power_of_two);
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

  // `elements`: of a chunk. Teams that reduce by shuffles are a power of two within a warp.
  Teams teams(int elements, bool power_of_two) const {
    int const chunks = std::max((problem_.head_dim + elements - 1) / elements, 1);
    int lanes = std::min(chunks, kThreads);
    if (power_of_two) {
      lanes = 1;
      while (lanes < std::min(chunks, 32)) lanes *= 2;
    }
    int const wanted = (problem_.parts + kPartsPerTeam - 1) / kPartsPerTeam;
    return {lanes, std::min({wanted, kThreads / lanes, kMaxGroups})};
  }

  const Problem& problem_;
  bool heads_inner_;
};

}  // namespace flashvar::merge_states
