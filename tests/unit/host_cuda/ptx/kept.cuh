// Stands for src/cuda/ptx/kept.cuh: values as they are.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

template <class Value>
Value held(Value value) {
  return value;
}
inline float kept(float value) { return value; }
inline uint32_t kept(uint32_t value) { return value; }

}  // namespace flashvar::ptx
