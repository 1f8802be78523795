// What an instance is compiled for, from variants.toml: tile choices below depend on these
// constants, never on preprocessor symbols.
#pragma once

namespace flashvar {

template <int kArchitecture_, int kSharedMemory_>
struct Target {
  static constexpr int kArchitecture = kArchitecture_;  // 10 * major + minor
  static constexpr int kSharedMemory = kSharedMemory_;  // maximum bytes per block
};

}  // namespace flashvar
