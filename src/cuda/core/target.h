// The target that a kernel is compiled for, from variants.toml. Tile sizes depend on these
// constants, never on preprocessor symbols.
#pragma once

namespace flashvar {

template <int kArchitecture_, int kSharedMemory_>
struct Target {
  static constexpr int kArchitecture = kArchitecture_;  // 10 * major + minor
  static constexpr int kSharedMemory = kSharedMemory_;  // bytes that one block may have
};

}  // namespace flashvar
