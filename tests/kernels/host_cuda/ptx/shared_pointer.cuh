// Stands for src/cuda/ptx/shared_pointer.cuh: a plain pointer.
#pragma once
#include <cstring>

namespace flashvar::ptx {

template <class Element>
class SharedPointer {
 public:
  explicit SharedPointer(const void* generic) : pointer_(static_cast<const Element*>(generic)) {}

  Element operator[](int index) const {
    Element element;
    std::memcpy(&element, *this + index, sizeof(element));
    return element;
  }
  const Element* operator+(int index) const { return pointer_ + index; }
  void advance(int elements) { pointer_ += elements; }

 private:
  const Element* pointer_;
};

}  // namespace flashvar::ptx
