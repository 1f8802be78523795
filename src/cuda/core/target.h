// The target that a kernel is compiled for, from variants.toml. Tile sizes depend on these
// constants, never on preprocessor symbols.
#pragma once

namespace flashvar {

template <int kArchitecture_, int kSharedMemory_>
struct Target {
  static constexpr int kArchitecture = kArchitecture_;  // 10 * major + minor
  static constexpr int kSharedMemory = kSharedMemory_;  // bytes that one block may have
  // Bytes that CUDA reserves for each block (CUDA C++ Programming Guide, compute capabilities 8.x
  // and newer). An SM has so many more than one block may have.
  static constexpr int kReservedSharedMemory = 1024;

  // Blocks of `shared_memory` bytes that fit an SM.
  static constexpr int blocks_that_fit(int shared_memory) {
    return (kSharedMemory + kReservedSharedMemory) / (shared_memory + kReservedSharedMemory);
  }
};

}  // namespace flashvar
