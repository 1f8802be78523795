// Stands for src/cuda/core/dynamic_shared.cuh: blocks run one after the other.
#pragma once

namespace flashvar {

template <class Shared>
Shared& dynamic_shared() {
  static Shared shared;
  return shared;
}

}  // namespace flashvar
