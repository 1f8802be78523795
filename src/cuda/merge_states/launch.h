// Shared parts of the launchers of both directions. Host only.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "core/ceil_div.h"
#include "core/launch.h"
#include "core/target.h"
#include "core/text.h"
#include "merge_states/args.h"

namespace flashvar::merge_states {

// A tensor, or the parts that are one argument of the op, by the name that messages give it.
struct NamedTensor {
  const char* name;
  const Tensor& tensor;
  int64_t part_stride = 0;
  const void* const* addresses = nullptr;
};

inline NamedTensor named(const char* name, const Parts& parts) {
  return {name, parts.first, parts.stride, parts.addresses};
}

// Why 16-byte accesses do not fit: the tensor and what of it, or null where they do.
struct Unaligned {
  const char* tensor;
  const char* what;
};

// `bytes`: of an element.
inline Unaligned find_unaligned(const Problem& problem, int64_t bytes,
                                std::initializer_list<NamedTensor> tensors) {
  if (problem.head_dim * bytes % 16 != 0) return {"outs", "the length of a row"};
  for (const NamedTensor& one : tensors) {
    if (one.tensor.data == nullptr && one.addresses == nullptr) continue;  // not accessed
    uintptr_t addresses =
        one.addresses == nullptr ? reinterpret_cast<uintptr_t>(one.tensor.data) : 0;
    for (int i = 0; one.addresses != nullptr && i < problem.parts; ++i) {
      addresses |= reinterpret_cast<uintptr_t>(one.addresses[i]);
    }
    if (addresses % 16 != 0) return {one.name, "an address"};
    int64_t const strides =
        one.part_stride | one.tensor.batch_stride | one.tensor.seq_stride | one.tensor.head_stride;
    if (strides * bytes % 16 != 0) return {one.name, "a stride"};
  }
  return {nullptr, nullptr};
}

inline void explain(const Unaligned& found, Text& text) {
  if (found.tensor == nullptr) {
    text.print("simt: rows are read 16 bytes at a time");
  } else {
    text.print("simt: rows are read element by element, for %s of %s is no multiple of 16 bytes",
               found.what, found.tensor);
  }
}

template <auto* kKernel, class Target, class Args>
cudaError_t launch_rows(const Args& args, int device, cudaStream_t stream) {
  int64_t const rows = args.split.tile_rows;
  LaunchShape const shape{ceil_div(args.row_count, rows), kThreads, 0, Target::kArchitecture >= 90};
  return launch_kernel<kKernel>(args, shape, device, stream);
}

}  // namespace flashvar::merge_states
