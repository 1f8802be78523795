// Layout "bdt", tokens contiguous: how a thread reads, processes and stores its tokens of a tile.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "causal_conv1d/tile_table.cuh"
#include "core/vec.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pin.cuh"
#include "ptx/shared_pointer.cuh"

namespace flashvar::causal_conv1d {

// Reads a thread's elements of consecutive tiles, and the kPast before them: 0 where those are of
// another sequence. Tiles are loaded kAhead ahead. Several elements at once are copied by cp.async
// into slots of shared memory, from where lanes also read those before their own; the kernel
// commits a group for each tile that it loads. Single elements are loaded into registers.
// TileTable: the type whose marks these are.
template <class Dtype, int kPast, int kElements, int kAhead, class TileTable>
class TokenReader {
  using Word = typename Dtype::Word;
  static constexpr bool kSingle = kElements == 1;
  static constexpr int kSlots = kAhead + 1;
  static_assert(kSingle || (kSlots & (kSlots - 1)) == 0, "numbers are taken modulo kSlots");
  // Elements before a thread's own that one access reads: kPast, rounded up to a size of accesses.
  static constexpr int kPower = kPast == 3 ? 4 : kPast, kMinAccess = 4 / sizeof(Word);
  static constexpr int kBefore = kSingle ? 1 : kPower > kMinAccess ? kPower : kMinAccess;
  using Own = Vec<Dtype, kElements>;
  using Before = Vec<Dtype, kBefore>;
  static constexpr int kPerSlot = kSingle ? 1 : kThreads, kWords = kSingle ? 1 : 4;

 public:
  // Tiles that an iteration of the kernel's loop processes.
  static constexpr int kStages = kSingle ? kAhead : 1;
  // Groups of copies that may be in flight when a tile is read. The elements before those of lane 0
  // are in the next tile in the backward.
  static constexpr int kPending = TileTable::kBackward && kPast > 0 ? kAhead - 2 : kAhead - 1;
  struct alignas(16) Shared {
    uint32_t words[kSlots * kPerSlot * kWords];
  };

  // `stride`: of tokens, used with single elements.
  __device__ __forceinline__ TokenReader(Shared& shared, const TokenWork& at, int64_t stride)
      : own_slots_(shared.words + (kSingle ? 0 : ptx::pin_by_shuffle(threadIdx.x) * kWords)),
        before_slots_(shared.words + (kSingle
                                          ? 0
                                          : (threadIdx.x + (at.lane == 0 ? at.lanes : 0)) * kWords -
                                                Before::kBytes / 4)),
        before_slot_(at.lane > 0            ? slot(0)
                     : TileTable::kBackward ? slot(1)
                                            : slot(-1)),
        stride_(stride) {}

  // Starts the load of the thread's elements of a tile; none if not `loads`.
  __device__ __forceinline__ void copy(int number, const Word* from, bool loads) {
    ptx::cp_async_16(own_slots_ + slot(number), from, loads);
  }
  // Starts the load if the tile's `marks` say so. `stage`: index of the tile in its iteration.
  __device__ __forceinline__ void load(int stage, int number, const Word* from, uint32_t marks) {
    if constexpr (kSingle) {
      bool const exists = (marks & TileTable::kNone) == 0;
      own_[stage].template load<true>(from, exists);
      // Marks of starts after element -back, up to the thread's first.
      uint32_t starts = TileTable::kAtFirst;
#pragma unroll
      for (int back = 1; back <= kPast; ++back) {
        before_[stage][kPast - back].template load<true>(from - back * stride_,
                                                         exists && (marks & starts) == 0);
        starts |= starts >> 1;
      }
    } else {
      copy(number, from, (marks & TileTable::kLoads) != 0);
    }
  }

  // Goes past a tile, read or not.
  __device__ __forceinline__ void skip() {
    before_slot_ = (before_slot_ + kPerSlot) % (kSlots * kPerSlot);
  }
  // The elements before the thread's own, then its own. Called for each tile in turn, by whole
  // warps, when all of their copies of it are complete.
  __device__ __forceinline__ void read(int stage, int number, uint32_t marks,
                                       float (&values)[kPast + kElements]) {
    Own vec;
    float before[kBefore], own[kElements];
    if constexpr (kSingle) {
      vec = own_[stage];
    } else {
      static_assert(sizeof(vec.words) == sizeof(uint4));
      uint4 const words = own_slots_[slot(number)];
      memcpy(vec.words, &words, sizeof(words));
      if constexpr (kPast > 0) {
        Before vec_before{};
        if ((marks & (TileTable::kNone | TileTable::kAtFirst)) == 0) {
          BeforeBits const bits = before_slots_[before_slot_ * (16 / Before::kBytes)];
          memcpy(vec_before.words, &bits, sizeof(bits));
        }
        skip();
        vec_before.unpack(before);
      }
    }
#pragma unroll
    for (int k = 0; k < kPast; ++k) {
      if constexpr (kSingle) before_[stage][k].unpack(before);
      values[k] = ptx::pin(before[kSingle ? 0 : kBefore - kPast + k]);
    }
    vec.unpack(own);
#pragma unroll
    for (int e = 0; e < kElements; ++e) values[kPast + e] = ptx::pin(own[e]);
  }

 private:
  using BeforeBits =
      std::conditional_t<Before::kBytes == 16, uint4,
                         std::conditional_t<Before::kBytes == 8, uint64_t, uint32_t>>;
  // Index of a tile's slot, in units of 16 bytes.
  static __device__ __forceinline__ int slot(int number) {
    return static_cast<uint32_t>(number) % kSlots * kPerSlot;
  }

  ptx::SharedPointer<uint4> own_slots_;          // the thread's elements of the first slot
  ptx::SharedPointer<BeforeBits> before_slots_;  // the elements before it, in that slot
  // Slot of those elements: the current tile's or, for lane 0, that of the tile before it in
  // tokens.
  uint32_t before_slot_;
  int64_t stride_;
  Own own_[kSingle ? kStages : 1];
  Before before_[kSingle ? kStages : 1][kPast > 0 ? kPast : 1];
};

// The values of the elements after a thread's own: from the next lane of this tile, or from the
// next tile, whose first values are in `next_tile`. `next_lane`: the next lane, as an index in the
// warp.
template <int kPast, int kElements>
__device__ __forceinline__ void take_next(const float (&own)[kElements],
                                          const float (&next_tile)[kElements == 1 ? 1 : kPast],
                                          const TokenWork& at, int next_lane,
                                          float (&values)[kPast]) {
#pragma unroll
  for (int i = 0; i < kPast; ++i) {
    if constexpr (kElements > 1) {
      float const sent = at.lane == 0 ? next_tile[i] : own[i];
      values[i] = __shfl_sync(0xffffffffu, sent, next_lane);
    } else {
      float const sent = at.lane <= i ? next_tile[0] : own[0];
      values[i] = __shfl_sync(0xffffffffu, sent, (at.lane + i + 1) & (at.lanes - 1), at.lanes);
    }
  }
}

// Loads those of a thread's elements that are tokens of its row.
template <class V>
__device__ __forceinline__ V load_row_elements(const RowElements& of_row,
                                               const typename V::Word* from) {
  V vec;
  if (of_row.are_all_of<V>()) {
    vec.template load<true>(from, 1);
    return vec;
  }
  typename V::Word words[V::kElements];
#pragma unroll
  for (int e = 0; e < V::kElements; ++e) {
    words[e] = of_row.contain(e) ? from[e] : typename V::Word{0};
  }
  memcpy(vec.words, words, V::kBytes);
  return vec;
}

// Loads the last tokens of a row in the thread that has them, if its Vec is not whole. Only
// whole ones are loaded ahead, because the rest could be beyond the tensor.
template <class V, int kPast>
__device__ __forceinline__ void load_last(const Tensor& tensor, const TokenCoordinate& at,
                                          int64_t channel, const RowElements& of_row,
                                          float (&values)[kPast + V::kElements]) {
  if (of_row.end == V::kElements) return;
  auto const* const from = static_cast<const typename V::Word*>(tensor.data) +
                           offset(tensor, at.batch, at.token, channel);
  float own[V::kElements];
  load_row_elements<V>(of_row, from).unpack(own);
#pragma unroll
  for (int e = 0; e < V::kElements; ++e) values[kPast + e] = own[e];
}

// Stores those of a thread's elements that are tokens of its row.
template <class V>
__device__ __forceinline__ void store_row_elements(const V& vec, const RowElements& of_row,
                                                   typename V::Word* to) {
  if (of_row.are_all_of<V>()) {
    vec.template store<true>(to, 1);
    return;
  }
  typename V::Word words[V::kElements];
  memcpy(words, vec.words, V::kBytes);
#pragma unroll
  for (int e = 0; e < V::kElements; ++e) {
    if (of_row.contain(e)) to[e] = words[e];
  }
}

// For warps that go token by token: calls f(e, past, newest) for each element. The past elements
// are of its own sequence only; before the sequence's start they are those of its state, or 0.
// `values`: the elements before the thread's own, then its own.
template <int kPast, int kElements, class TileTable, class F>
__device__ __forceinline__ void for_each_token(const Problem& problem, const TileTable& table,
                                               const TokenWork& at, int number, uint32_t marks,
                                               const float (&values)[kPast + kElements], F f) {
  marks &= (1u << (kPast + kElements)) - 2;
  if (problem.state.data == nullptr) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      float past[kPast];
#pragma unroll
      for (int back = 1; back <= kPast; ++back) {
        // Marks of starts after element e - back, up to e.
        uint32_t const starts = ((1u << back) - 1) << (kPast + e - back + 1);
        past[kPast - back] = (marks & starts) == 0 ? values[kPast + e - back] : 0.f;
      }
      f(e, past, values[kPast + e]);
    }
    return;
  }
  // With states, elements are processed from one start to the next.
  uint32_t start = 0;              // mark of the start with which this pass begins; 0: none
  uint32_t later_starts = marks;   // marks of those after it
  float state_tokens[kPast] = {};  // the tokens before the start, of its sequence's state
  int first = 0;                   // element with which this pass begins
#pragma unroll 1
  while (true) {
    int const end =
        later_starts == 0 ? kElements : max(__ffs(static_cast<int>(later_starts)) - 1 - kPast, 0);
    float past[kPast] = {};
#pragma unroll
    for (int i = 0; i < kPast + kElements; ++i) {
#pragma unroll
      for (int k = 0; k < kPast; ++k) past[k] = (start >> i & 1) != 0 ? state_tokens[k] : past[k];
      int const e = i - kPast;
      if (e >= 0 && first <= e && e < end) f(e, past, values[i]);
#pragma unroll
      for (int k = 0; k + 1 < kPast; ++k) past[k] = past[k + 1];
      past[kPast - 1] = values[i];
    }
    if (later_starts == 0) return;
    start = later_starts & -later_starts;
    later_starts -= start;
    first = end;
    TokenCoordinate const coordinate = table.thread_coordinate(number);
    int64_t const begin = coordinate.token - kPast + __ffs(static_cast<int>(start)) - 1;
    Sequence const sequence = table.sequence(problem, coordinate.batch, begin);
#pragma unroll
    for (int k = 0; k < kPast; ++k)
      state_tokens[k] = state_token(problem, sequence, at.channel, kPast - k);
  }
}

}  // namespace flashvar::causal_conv1d
