// Stands for src/cuda/ptx/shared_pointer.cuh: a plain pointer.
#pragma once

namespace flashvar::ptx {

template <class Element>
class SharedPointer {
 public:
  explicit SharedPointer(const Element* generic) : pointer_(generic) {}

  Element operator[](int index) const { return pointer_[index]; }
  void advance(int elements) { pointer_ += elements; }

 private:
  const Element* pointer_;
};

}  // namespace flashvar::ptx
