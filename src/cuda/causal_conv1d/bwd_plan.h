// How a backward is computed: its kernel, how its elements are divided among threads, and what its
// workspace holds. Host only.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "causal_conv1d/layout.h"
#include "causal_conv1d/problem.h"
#include "causal_conv1d/tiles.h"
#include "core/ceil_div.h"
#include "core/text.h"

namespace flashvar::causal_conv1d {

// The fewest elements of grad_y of which a copy takes less time than to load one at a time.
inline constexpr int64_t kFewestCopied = 1 << 20;

template <class Dtype>
struct BwdPlan {
  static constexpr int kWordBytes = sizeof(typename Dtype::Word);
  // Elements per thread: fewer of contiguous channels, of which it keeps more values in registers.
  static constexpr int kChannels = 4, kTokens = 16 / kWordBytes;
  static constexpr int kStages = kWordBytes == 2 ? 6 : 4;
  // A group is two warps, with adjacent channels, so that 512 bytes of a 16-bit row are read at
  // about the same time.
  static constexpr int kLanesLog2 = 6;
  static constexpr int kTokenTiles = 64;  // of a block, at most

  Layout layout;
  ChannelTiles channels;
  TokenTiles tokens;
  int64_t parts;        // of the sums
  uint64_t part_bytes;  // of the workspace; the copy of grad_y comes after them
  uint64_t copy_bytes;  // 0: grad_y is read as it is

  static BwdPlan make(const BwdProblem& problem) {
    BwdPlan plan{};
    int64_t const elements = problem.batch * problem.seqlen * problem.dim;
    Operand const grad_x{"grad_x", problem.grad_x}, x{"x", problem.x};
    plan.layout = layout_of(problem, {grad_x, x, {"grad_y", problem.grad_y}});
    Layout const others = layout_of(problem, {grad_x, x});
    // With fewer tokens than a tile of the copy has, most of it would be empty.
    bool const copied = elements >= kFewestCopied && problem.seqlen >= kCopyTile;
    if (copied && others.vectorized && !others.tokens_inner && problem.grad_y.strides[2] != 1) {
      plan.layout = others;
      plan.copy_bytes = elements * kWordBytes;
    }
    if (plan.layout.tokens_inner) {
      int const at_once = plan.layout.vectorized ? kTokens : 1;
      plan.tokens = TokenTiles::make(problem, at_once, plan.layout.misalignment);
      plan.tokens.divide_tokens(kBlocks, kTokenTiles);
      plan.parts = plan.tokens.ranges();
    } else {
      ChannelLimits const limits{kLanesLog2, 32, 256, kStages, kBlocks};
      plan.channels = ChannelTiles::make(problem, plan.layout.vectorized ? kChannels : 1, limits);
      plan.parts = plan.channels.row_blocks(problem);
    }
    constexpr uint64_t kAligned = 256;
    uint64_t const sums = plan.parts * (problem.width + 1) * problem.dim * sizeof(float);
    plan.part_bytes = plan.parts == 1 ? 0 : ceil_div(sums, kAligned) * kAligned;
    return plan;
  }

  // Where the copy of grad_y is.
  void* copy(const BwdProblem& problem) const {
    return reinterpret_cast<char*>(problem.parts) + part_bytes;
  }

  void explain(Text& text) const {
    layout.explain(vector_bytes(layout.tokens_inner), text);
    if (copy_bytes > 0) text.print(", after a copy of grad_y");
  }

 private:
  static int vector_bytes(bool tokens) { return (tokens ? kTokens : kChannels) * kWordBytes; }
  static Layout layout_of(const BwdProblem& problem, std::initializer_list<Operand> operands) {
    return Layout::of(problem, Dtype::kAbi, kWordBytes, vector_bytes, operands);
  }
};

}  // namespace flashvar::causal_conv1d
