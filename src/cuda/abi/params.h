// Reading a caller's parameter struct, which may be older or newer than this library's.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "abi/error.h"
#include "abi/flashvar.h"

namespace flashvar {

// Copies what both sides know into `known`. Fields that an older caller lacks are 0, which is what
// they must mean "as before"; fields that only a newer caller knows must be 0. `first_size` is the
// size of the struct's first version.
template <class Params>
flashvar_status read_params(const Params* caller, size_t first_size, Params& known) {
  uint32_t const size = caller == nullptr ? 0 : caller->struct_size;
  if (caller == nullptr || size < first_size || caller->abi_version != FLASHVAR_ABI_VERSION) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "expected parameters of ABI %u (%zu bytes or more), found ABI %u (%u bytes)",
                FLASHVAR_ABI_VERSION, first_size, caller == nullptr ? 0 : caller->abi_version,
                size);
  }
  known = {};
  std::memcpy(&known, caller, std::min(sizeof(Params), size_t{size}));
  auto const* const bytes = reinterpret_cast<const unsigned char*>(caller);
  for (size_t i = sizeof(Params); i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "the caller asks for what this library is too old to know (byte %zu of its "
                  "parameters); install the same version of both",
                  i);
    }
  }
  return FLASHVAR_OK;
}

}  // namespace flashvar
