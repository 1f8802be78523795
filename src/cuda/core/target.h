// What an instance is compiled for, as variants.toml says it: nothing below asks the preprocessor.
#pragma once

namespace flashvar {

template <int kArchitecture_, int kSharedMemory_>
struct Target {
  static constexpr int kArchitecture = kArchitecture_;  // 10 * major + minor
  static constexpr int kSharedMemory = kSharedMemory_;  // bytes one block may have
};

}  // namespace flashvar
