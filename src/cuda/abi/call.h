// What the C functions of all ops share: reading a caller's parameters, which may be of an older or
// newer version than this library's, checking the workspace, launching.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi/device_guard.h"
#include "abi/error.h"
#include "abi/flashvar.h"

namespace flashvar {

// Copies the fields that caller and library both know into `known`. Fields that an older caller
// lacks become 0, which must mean "as before"; fields that only a newer caller knows must be 0.
// `first_size`: bytes of the struct in its first version.
template <class Params>
flashvar_status read_params(const Params* caller, size_t first_size, Params& known) {
  static_assert(offsetof(Params, call) == 0, "parameters start with a flashvar_call");
  uint32_t const size = caller == nullptr ? 0 : caller->call.struct_size;
  if (caller == nullptr || size < first_size || caller->call.abi_version != FLASHVAR_ABI_VERSION) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "expected parameters of ABI %u (%zu bytes or more), found ABI %u (%u bytes)",
                FLASHVAR_ABI_VERSION, first_size, caller == nullptr ? 0 : caller->call.abi_version,
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

inline flashvar_status check_workspace(const char* op, const flashvar_call& call, uint64_t wanted) {
  constexpr uintptr_t kAlignment = 256;  // bytes, as flashvar_call promises
  if (call.workspace_size >= wanted &&
      reinterpret_cast<uintptr_t>(call.workspace) % kAlignment == 0) {
    return FLASHVAR_OK;
  }
  return fail(FLASHVAR_INVALID_ARGUMENT,
              "workspace must have %llu bytes, aligned to %llu, found %llu bytes at %p; "
              "flashvar_%s_workspace says how many",
              static_cast<unsigned long long>(wanted), static_cast<unsigned long long>(kAlignment),
              static_cast<unsigned long long>(call.workspace_size), call.workspace, op);
}

// Checks the workspace and launches on the call's device and stream.
template <class Launcher, class Problem>
flashvar_status launch(const char* op, const flashvar_call& call, const Launcher& launcher,
                       const Problem& problem) {
  flashvar_status const status = check_workspace(op, call, launcher.workspace(problem));
  if (status != FLASHVAR_OK) return status;
  DeviceGuard const guard(call.device);
  if (guard.status() != FLASHVAR_OK) return guard.status();
  cudaError_t const error =
      launcher.launch(problem, call.device, static_cast<cudaStream_t>(call.stream));
  if (error == cudaSuccess) return FLASHVAR_OK;
  cudaGetLastError();  // clears the error: the next caller must not see it
  return fail(FLASHVAR_CUDA_ERROR, "%s did not launch on device %d: %s (%d)", op, call.device,
              cudaGetErrorString(error), error);
}

}  // namespace flashvar
