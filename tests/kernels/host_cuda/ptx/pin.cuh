// Stands for src/cuda/ptx/pin.cuh: values as they are.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

template <class Value>
Value pin_by_shuffle(Value value) {
  return value;
}
inline float pin(float value) { return value; }
inline uint32_t pin(uint32_t value) { return value; }

}  // namespace flashvar::ptx
