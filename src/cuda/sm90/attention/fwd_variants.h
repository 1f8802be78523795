// Which kernel of the wgmma family computes a forward: that for few rows, or the variant of
// fwd_kernel with the shortest estimated time, or kLines where its rows are worth moving. Host
// only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/key_splits.h"
#include "attention/pack_gqa.h"
#include "core/ceil_div.h"
#include "sm90/attention/fwd_config.cuh"
#include "sm90/attention/fwd_few_config.cuh"
#include "sm90/attention/fwd_few_splits.h"
#include "sm90/attention/line_shift.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// Problems are simplified().
template <class Target, class Dtype, int kHeadDim, int kHeadDimV>
struct FwdVariants {
  template <FwdVariant kVariant>
  using Config = FwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kVariant>;
  using General = Config<FwdVariant::kGeneral>;
  using Medium = Config<FwdVariant::kMedium>;
  using Small = Config<FwdVariant::kSmall>;
  using SmallWide = Config<FwdVariant::kSmallWide>;
  using Split = Config<FwdVariant::kSplit>;
  using SmallSplit = Config<FwdVariant::kSmallSplit>;
  using Lines = Config<FwdVariant::kLines>;
  using Modifiers = Config<FwdVariant::kModifiers>;
  using SmallModifiers = Config<FwdVariant::kSmallModifiers>;
  template <int kRows>
  using Few = FewConfig<Target, Dtype, kHeadDim, kHeadDimV, kRows>;
  static constexpr int kSmallRows = 64;  // queries of a small tile
  static constexpr SplitChoice kWhole{1, 0};
  static constexpr bool has_tile(FwdVariant variant) {
    return fwd_tile(variant, kHeadDim, kHeadDimV).variant == variant;
  }
  static constexpr bool kHasSmaller = has_tile(FwdVariant::kSmall);
  // Up to head dim 64 a row has one column block, which need not be moved.
  static constexpr bool kHasLines =
      has_tile(FwdVariant::kLines) && std::max(kHeadDim, kHeadDimV) > 64;
  static_assert(kHasSmaller == has_tile(FwdVariant::kMedium) &&
                kHasSmaller == has_tile(FwdVariant::kSmallWide) &&
                kHasSmaller == has_tile(FwdVariant::kSmallSplit) &&
                kHasSmaller == has_tile(FwdVariant::kSmallModifiers));
  // An SM runs two or three small tiles at a time, or one larger one.
  static constexpr PackGqaTile kPackGqaTile =
      kHasSmaller ? PackGqaTile{kSmallRows, 128, 3, 128} : PackGqaTile{128, 128, 1, 128};

  // The problem as kernels compute it.
  static FwdProblem simplified(const FwdProblem& call) {
    int32_t const row_shift = few_row_shift(call);
    return row_shift > 0 ? pack_gqa(call, row_shift)
                         : flashvar::attention::simplified(call, kPackGqaTile);
  }

  // Calls `use` with the configuration of the call's kernel and with its splits: FewSplits for few
  // rows, else SplitChoice.
  template <class Use>
  static auto with_config(const FwdProblem& problem, Use&& use) {
    int32_t const rows = problem.queries.seqlen;
    if (!problem.has_modifiers()) {
      if (rows <= Few<8>::kBlockQ) return with_few<8>(problem, use);
      if (rows <= Few<16>::kBlockQ) return with_few<16>(problem, use);
      if (rows <= Few<32>::kBlockQ) return with_few<32>(problem, use);
    }
    return with_large(problem, use);
  }

  // For calls of at most kRows rows.
  template <int kRows, class Use>
  static auto with_few(const FwdProblem& problem, Use&& use) {
    FewSplits const splits = FewSplits::choose<Few<kRows>>(problem);
    if constexpr (kHasLines) {
      // Only where neither kernel stores splits: the size of the workspace must not depend on
      // where rows start.
      if (!splits.has_merge() && !needs_merge(problem) && moves_to_lines(problem)) {
        return use(Lines{}, kWhole);
      }
    }
    return takes_few<kRows>(problem) ? use(Few<kRows>{}, splits) : with_large(problem, use);
  }

  // With the kernels whose tiles have 64 rows or more.
  template <class Use>
  static auto with_large(const FwdProblem& problem, Use&& use) {
    if constexpr (kHasSmaller) {
      if (problem.has_modifiers()) {
        return !reads_keys_again(problem) &&
                       time_whole<SmallModifiers>(problem) < time_whole<Modifiers>(problem)
                   ? use(SmallModifiers{}, kWhole)
                   : use(Modifiers{}, kWhole);
      }
      bool const is_medium = prefers_medium(problem);
      int64_t const larger = is_medium ? time_whole<Medium>(problem) : time_whole<General>(problem);
      int64_t const small = reads_keys_again(problem) ? INT64_MAX : time_whole<Small>(problem);
      int64_t const small_wide =
          considers_small_wide(problem) ? time_whole<SmallWide>(problem) : INT64_MAX;
      int64_t const split_tiles =
          considers_split_tiles(problem) ? time_whole<Split>(problem) : INT64_MAX;
      int64_t const whole = std::min({small, small_wide, larger, split_tiles});
      // Few rows take small tiles, and large ones only where small ones would have one split.
      bool const fits_small = problem.queries.seqlen <= kSmallRows;
      if (fits_small && prefers_split<SmallSplit>(problem, whole)) {
        return use(SmallSplit{}, choose_splits<SmallSplit>(problem));
      }
      if (prefers_split<Split>(problem, whole)) return use(Split{}, choose_splits<Split>(problem));
      if constexpr (kHasLines) {
        if (moves_to_lines(problem)) return use(Lines{}, kWhole);
      }
      if (split_tiles == whole) return use(Split{}, kWhole);
      if (std::min(small, small_wide) < larger) {
        return small <= small_wide ? use(Small{}, kWhole) : use(SmallWide{}, kWhole);
      }
      return is_medium ? use(Medium{}, kWhole) : use(General{}, kWhole);
    } else {
      if (problem.has_modifiers()) return use(Modifiers{}, kWhole);
      return prefers_split<Split>(problem, time_whole<General>(problem))
                 ? use(Split{}, choose_splits<Split>(problem))
                 : use(General{}, kWhole);
    }
  }

  // The row_shift (KeySplits) of PackGQA of several queries per sequence, where fwd_few_kernel then
  // computes the call; 0: none. That kernel stores rows of packed heads itself; row_shift_of()
  // counts a merge. Up to 8 rows heads are always packed. Up to 32, which take longer, they are
  // packed if the tiles of all heads are more than the SMs, or if row_shift_of() says so. A varlen
  // sequence counts as the longest. The splits of varlen sequences must be a cluster: too few for
  // very many keys of one to three tiles.
  static constexpr int64_t kTilesOfACluster = 4, kKeysOfACluster = 8192;
  static int32_t few_row_shift(FwdProblem call) {
    constexpr int32_t kMost = Few<32>::kBlockQ;
    int32_t const queries = call.queries.seqlen;
    if (queries < 2 || queries > kMost || call.group == 1 || call.group > kMost ||
        call.has_modifiers()) {
      return 0;
    }
    int32_t shift = 1;
    while (1 << shift < call.group) ++shift;
    int32_t const rows = queries << shift;
    if (rows > kMost) return 0;
    int64_t const tiles = call.batch * call.heads_q / call.group;
    bool const varlen = call.queries.offsets != nullptr;
    if (varlen && tiles < kTilesOfACluster && visible_keys(call, kMost) > kKeysOfACluster) return 0;
    bool const many = call.batch * call.heads_q > kMultiprocessors;
    if (rows <= Few<8>::kBlockQ || many) return shift;
    call.queries.offsets = nullptr;
    return row_shift_of(call, kPackGqaTile);
  }

  // Whether the kernel for few rows computes a call of few rows. Each of its blocks has one tile,
  // so with more tiles than run at a time the other kernels are faster, except where they need
  // fwd_merge_kernel, and for up to 16 rows above head dim 128, where they have no small tiles.
  // More than 16 rows must be those of packed heads, in no more tiles than there are SMs: elsewhere
  // the others are as fast.
  template <int kRows>
  static bool takes_few(const FwdProblem& problem) {
    if (needs_merge(problem)) return true;
    int64_t const tiles = problem.batch * problem.heads_q;
    if (kRows > 16) return problem.splits.group_rows > 1 && tiles <= kMultiprocessors;
    return !kHasSmaller || tiles <= Few<kRows>::kBlocksPerSM * kMultiprocessors;
  }

  // Rather than kGeneral. Larger tiles have more rows beyond the last query, more hidden keys under
  // a mask, and may leave more SMs idle in the last round.
  static bool prefers_medium(const FwdProblem& problem) {
    if (problem.window_left != kUnbounded) return true;
    // The lengths of packed sequences are not known here. Medium tiles lose little on long ones,
    // except at these head dims.
    constexpr bool kLoses = 64 < kHeadDim && kHeadDim <= 112;
    bool const packed = problem.queries.offsets != nullptr;
    if (packed && problem.window_right != kUnbounded && !kLoses) return true;
    return time_whole<Medium>(problem) <= time_whole<General>(problem);
  }

  static constexpr int64_t kManyKeys = 1024;  // so many that loading them limits few queries

  // Whether several small tiles would load the many keys that one larger tile loads once: from
  // memory, where no other tile has use for them. Packed sequences may be that short.
  static bool reads_keys_again(const FwdProblem& problem) {
    int32_t const queries = problem.queries.seqlen;
    bool const few = queries <= std::max(Medium::kBlockQ, General::kBlockQ);
    return queries > kSmallRows && (few || problem.queries.offsets != nullptr) &&
           visible_keys(problem, kSmallRows) > kManyKeys;
  }

  // Whether kSmallWide may compute a call: of known numbers of keys, all visible, or all in one
  // step. Calls of one tile wait for their keys, however many of them a step has.
  static bool considers_small_wide(const FwdProblem& problem) {
    bool const unmasked = problem.window_left == kUnbounded && problem.window_right == kUnbounded;
    return problem.queries.seqlen > kSmallRows && !problem.has_foreign_tail() &&
           !reads_keys_again(problem) && (unmasked || problem.keys.seqlen <= SmallWide::kBlockKV);
  }

  // Whether tiles of kSplit may compute a call of few queries in one split: up to head dim 64 no
  // other variant has tiles of 128 rows.
  static bool considers_split_tiles(const FwdProblem& problem) {
    return Split::kStoresWhole && problem.queries.offsets == nullptr && reads_keys_again(problem);
  }

  // Whether a call of one split and few queries takes kLines, of which an SM runs one block, where
  // that is worth it: no two tiles share keys, there are many keys (four times as many where the
  // number in use is not known here), and the last round leaves few SMs idle.
  static bool moves_to_lines(const FwdProblem& problem) {
    int64_t const keys = visible_keys(problem, kSmallRows);
    int64_t const tiles = problem.queries.tiles(problem.batch, kSmallRows) * problem.heads_q;
    int64_t const slots = ceil_div(tiles, kMultiprocessors) * kMultiprocessors;
    return problem.queries.seqlen <= kSmallRows && problem.group == 1 &&
           keys >= (problem.has_foreign_tail() ? 4 * kManyKeys : kManyKeys) &&
           10 * tiles >= 9 * slots &&
           (moves<Lines::kHeadDim>(problem, problem.k, problem.head_dim) ||
            moves<Lines::kHeadDimV>(problem, problem.v, problem.head_dim_v));
  }

  // Whether LineShift moves the rows of a quarter of all heads or more.
  template <int kColumns>
  static bool moves(const FwdProblem& problem, const Tensor& tensor, int32_t head_dim) {
    if (head_dim <= 64) return false;  // one column block
    LineShift const shift = LineShift::make(tensor, head_dim, kColumns);
    int32_t moved = 0;
    for (int32_t head = 0; head < problem.heads_q; ++head) moved += shift.of(0, head) > 0;
    return 4 * moved >= problem.heads_q;
  }

  // `whole`: time with one split.
  template <class C>
  static bool prefers_split(const FwdProblem& problem, int64_t whole) {
    SplitChoice const choice = choose_splits<C>(problem);
    return needs_merge(problem) ||
           (choice.count > 1 && choice.time * area<C>() * C::kTile.cost < whole);
  }

  // Whether rows of K or V are an odd multiple of 16 bytes. Small tiles, which load them most
  // often, then take a fifth longer.
  static bool has_slow_rows(const FwdProblem& problem) {
    return problem.head_dim % 16 != 0 || problem.head_dim_v % 16 != 0;
  }

  // With up to so many keys in the last block, which comes first, the running maximum is so low
  // that the next block rescales (LazySoftmax): it takes as long as two.
  static constexpr int64_t kFewKeys = 8;

  template <class C>
  static bool rescales(const FwdProblem& problem) {
    int64_t const last = problem.keys.seqlen % C::kBlockKV;
    return problem.window_right == kUnbounded && !problem.has_foreign_tail() && last > 0 &&
           last <= kFewKeys && problem.keys.seqlen > C::kBlockKV;
  }

  // Estimated times. Unit: 1/200 of the time for one score (query x key) in a tile of cost 100.
  // Those of several splits are SplitChoice's, whose start is 2 steps, the default of `start`. That
  // of one split:
  template <class C>
  static int64_t time_whole(const FwdProblem& problem) {
    TileWork const work = TileWork::make(problem, C::kBlockQ, C::kBlockKV);
    // Lower bound: the latencies of a CTA that is alone on its SM are not overlapped. Not applied
    // to calls of one tile whose V may have a tail that must be zeroed: there larger tiles lose
    // time too, with warpgroups without rows (fwd_consume).
    bool const one_tile = problem.queries.seqlen <= kSmallRows;
    int64_t const alone = !one_tile                    ? C::kTile.cost_alone
                          : problem.has_foreign_tail() ? 0
                                                       : C::kTile.cost_one_tile;
    int64_t const cost =
        work.causal && C::kTile.cost_causal > 0 ? C::kTile.cost_causal : C::kTile.cost;
    int64_t const tiles_per_sm = ceil_div(work.tiles, kMultiprocessors);
    // `start`, `longest` and `mean` are in tenths of a step.
    int64_t const start = C::kTile.start + (rescales<C>(problem) ? 10 : 0);
    int64_t const longest = 10 * work.most + start;
    // In one wave the longest tile decides. In more, tiles with much work come first, so that SMs
    // end together.
    int64_t const mean = tiles_per_sm <= C::kBlocksPerSM ? longest : 10 * work.mean + start;
    // Small tiles with slow rows take six fifths of the time. 25 is 5 for fifths, times 10 for
    // tenths of a step, by 2 for percent in a unit of 1/200.
    int64_t const fifths = C::kBlockQ == kSmallRows && !one_tile && has_slow_rows(problem) ? 6 : 5;
    return fifths * area<C>() * std::max(longest * alone, tiles_per_sm * mean * cost) / 25;
  }

  // Scores of a step.
  template <class C>
  static constexpr int64_t area() {
    return int64_t{C::kBlockQ} * C::kBlockKV;
  }

  template <class C>
  static SplitChoice choose_splits(const FwdProblem& problem) {
    return SplitChoice::make(problem, C::kBlockQ, C::kBlockKV, C::kBlocksPerSM,
                             C::kSplits ? kMaxSplits : 1);
  }
};

}  // namespace flashvar::sm90::attention
