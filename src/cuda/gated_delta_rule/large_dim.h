// Head dims above 128 are large: a thread has up to 128 elements of a state, which leave registers
// for little else. Kernels then pack and multiply operands in another order, or are others.
#pragma once

namespace flashvar::gated_delta_rule {

inline constexpr int kMaxSmallDim = 128;

template <int kDim>
inline constexpr bool kLargeDim = kDim > kMaxSmallDim;

}  // namespace flashvar::gated_delta_rule
