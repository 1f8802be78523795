// Pointer into shared memory whose address is pinned to a register. Otherwise the compiler
// recomputes the address from the block's base before each access.
#pragma once
#include <cstdint>

#include "ptx/smem_address.cuh"

namespace flashvar::ptx {

template <class Element>
class SharedPointer {
  static_assert(sizeof(Element) == 4 || sizeof(Element) == 8 || sizeof(Element) == 16);

 public:
  // `generic`: the address of an Element in shared memory, aligned to its size.
  __device__ __forceinline__ explicit SharedPointer(const void* generic)
      : address_(smem_address(generic)) {
    asm volatile("" : "+r"(address_));
  }

  __device__ __forceinline__ Element operator[](int index) const {
    uint32_t const address = *this + index;
    Element element;
    if constexpr (sizeof(Element) == 4) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(element) : "r"(address) : "memory");
    } else if constexpr (sizeof(Element) == 8) {
      asm volatile("ld.shared.b64 %0, [%1];" : "=l"(element) : "r"(address) : "memory");
    } else {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(element.x), "=r"(element.y), "=r"(element.z), "=r"(element.w)
                   : "r"(address)
                   : "memory");
    }
    return element;
  }
  // The shared-space address of an element.
  __device__ __forceinline__ uint32_t operator+(int index) const {
    return address_ + index * static_cast<uint32_t>(sizeof(Element));
  }

  __device__ __forceinline__ void advance(int elements) {
    address_ += elements * static_cast<uint32_t>(sizeof(Element));
  }

 private:
  uint32_t address_;
};

}  // namespace flashvar::ptx
