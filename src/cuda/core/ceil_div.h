// Division that rounds up.
#pragma once
#include <cuda_runtime_api.h>

namespace flashvar {

// The units that `size` takes, the last of which may be partly filled.
template <class Size, class Unit>
__host__ __device__ constexpr auto ceil_div(Size size, Unit unit) {
  return (size + unit - 1) / unit;
}

}  // namespace flashvar
