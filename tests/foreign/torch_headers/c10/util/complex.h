// Stands in for torch's header: the arithmetic of complex numbers that kernels use.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <type_traits>

namespace c10 {

template <class T>
struct alignas(2 * sizeof(T)) complex {
  T real_, imag_;

  complex() = default;
  __host__ __device__ constexpr complex(T real, T imag = T()) : real_(real), imag_(imag) {}

  __host__ __device__ complex& operator+=(complex const& other) {
    real_ += other.real_;
    imag_ += other.imag_;
    return *this;
  }
  __host__ __device__ complex& operator*=(T factor) {
    real_ *= factor;
    imag_ *= factor;
    return *this;
  }

  friend __host__ __device__ complex operator+(complex a, complex const& b) { return a += b; }
  friend __host__ __device__ complex operator-(complex const& a, complex const& b) {
    return {a.real_ - b.real_, a.imag_ - b.imag_};
  }
  friend __host__ __device__ complex operator-(T a, complex const& b) {
    return {a - b.real_, -b.imag_};
  }
  friend __host__ __device__ complex operator-(complex const& a, T b) {
    return {a.real_ - b, a.imag_};
  }
  friend __host__ __device__ complex operator*(complex const& a, complex const& b) {
    return {a.real_ * b.real_ - a.imag_ * b.imag_, a.real_ * b.imag_ + a.imag_ * b.real_};
  }
  friend __host__ __device__ complex operator*(complex a, T b) { return a *= b; }
  friend __host__ __device__ complex operator*(T a, complex b) { return b *= a; }
};

}  // namespace c10

namespace std {

template <class T>
__host__ __device__ c10::complex<T> conj(c10::complex<T> const& number) {
  return {number.real_, -number.imag_};
}

}  // namespace std
