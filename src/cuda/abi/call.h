// The steps of the C functions of all ops: they read a caller's parameters, which may be of an
// older or newer version than this library's, check them, and launch, size the workspace or
// explain.
//
// `Function` is a function of an op, such as <op>_fwd, as a struct with
//   Params, Kernel               its parameter struct, and the row type of its kernel table
//   kName                        its name in messages
//   kFirstSize                   bytes of Params in its first version
//   prepare(params, kernel)      checks the parameters, finds the kernel that supports them
//   is_empty(params)             whether there is nothing to write
//   required(params)             the pointers of a launch that is not empty: an array of Pointer
//   problem(params)              the call as launchers see it
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi/device_guard.h"
#include "abi/error.h"
#include "abi/flashvar.h"
#include "core/text.h"

namespace flashvar {

// Rejects a reserved field that is not 0: a newer library may give it a meaning. `owner`: what has
// the field, such as "problem".
inline flashvar_status check_reserved(const char* owner, uint32_t reserved) {
  if (reserved == 0) return FLASHVAR_OK;
  return fail(FLASHVAR_INVALID_ARGUMENT,
              "%s.reserved must be 0, found %u: zero the struct before it is filled", owner,
              reserved);
}

// Rejects bits of `flags` that the header of the op does not define. `known`: those that it does.
inline flashvar_status check_flags(uint32_t flags, uint32_t known) {
  if ((flags & ~known) == 0) return FLASHVAR_OK;
  return fail(FLASHVAR_INVALID_ARGUMENT,
              "flags must be some of 0x%x, found 0x%x: clear the others, or install the same "
              "version of both",
              known, flags);
}

// Copies the fields that caller and library both know into `known`. Fields that an older caller
// lacks become 0, which must mean "as before"; fields that only a newer caller knows must be 0.
// `first_size`: bytes of the struct in its first version.
template <class Params>
flashvar_status read_params(const Params* caller, size_t first_size, Params& known) {
  static_assert(offsetof(Params, call) == 0, "parameters start with a flashvar_call");
  if (caller == nullptr) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "params must point to the op's parameters, found NULL: pass their address");
  }
  uint32_t const size = caller->call.struct_size;
  if (size < first_size || caller->call.abi_version != FLASHVAR_ABI_VERSION) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "expected parameters of ABI %u (%zu bytes or more), found ABI %u (%u bytes): "
                "install the same version of both",
                FLASHVAR_ABI_VERSION, first_size, caller->call.abi_version, size);
  }
  flashvar_status const status = check_reserved("flashvar_call", caller->call.reserved);
  if (status != FLASHVAR_OK) return status;
  known = {};
  std::memcpy(&known, caller, std::min(sizeof(Params), size_t{size}));
  auto const* const bytes = reinterpret_cast<const unsigned char*>(caller);
  for (size_t i = sizeof(Params); i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(
          FLASHVAR_INVALID_ARGUMENT,
          "fields that this library is too old to know must be 0, found %u in byte %zu of the "
          "parameters: install the same version of both",
          bytes[i], i);
    }
  }
  return FLASHVAR_OK;
}

// A pointer of the parameters, by the name of its field, and whether the launch reads or writes
// through it: not where the tensor has no elements.
struct Pointer {
  const char* name;
  const void* address;
  bool needed = true;
};

template <class Pointers>
flashvar_status check_pointers(const char* function, const Pointers& required) {
  for (const Pointer& one : required) {
    if (one.needed && one.address == nullptr) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "%s needs the address of %s, found NULL: set it to memory of the call's device",
                  function, one.name);
    }
  }
  return FLASHVAR_OK;
}

inline flashvar_status check_workspace(const char* function, const flashvar_call& call,
                                       uint64_t wanted) {
  constexpr uintptr_t kAlignment = 256;  // bytes, as flashvar_call promises
  bool const is_there = wanted == 0 || call.workspace != nullptr;
  if (is_there && call.workspace_size >= wanted &&
      reinterpret_cast<uintptr_t>(call.workspace) % kAlignment == 0) {
    return FLASHVAR_OK;
  }
  return fail(FLASHVAR_INVALID_ARGUMENT,
              "workspace must have %llu bytes, aligned to %llu, found %llu bytes at %p; "
              "flashvar_%s_workspace says how many",
              static_cast<unsigned long long>(wanted), static_cast<unsigned long long>(kAlignment),
              static_cast<unsigned long long>(call.workspace_size), call.workspace, function);
}

// The kernel of a dtype, for functions whose kernels differ in nothing else. `table` ends with
// null.
template <class Kernel>
flashvar_status find_kernel_of_dtype(const char* function, const Kernel* const* table,
                                     uint32_t dtype, const Kernel*& found) {
  for (const Kernel* const* row = table; *row != nullptr; ++row) {
    found = *row;
    if (found->dtype == dtype) return FLASHVAR_OK;
  }
  return fail(FLASHVAR_NO_KERNEL, "this binary holds no %s kernel for dtype %u", function, dtype);
}

// The parameters of a call as this library knows them, and the kernel that supports them.
template <class Function>
struct Prepared {
  typename Function::Params params;
  const typename Function::Kernel* kernel = nullptr;
  flashvar_status status;

  explicit Prepared(const typename Function::Params* caller)
      : status(read_params(caller, Function::kFirstSize, params)) {
    if (status == FLASHVAR_OK) status = Function::prepare(params, kernel);
  }
};

// flashvar_<function>: launches on the call's device and stream.
template <class Function>
flashvar_status launch(const typename Function::Params* caller) {
  Prepared<Function> const call(caller);
  if (call.status != FLASHVAR_OK || Function::is_empty(call.params)) return call.status;
  const flashvar_call& head = call.params.call;
  flashvar_status status = check_pointers(Function::kName, Function::required(call.params));
  if (status != FLASHVAR_OK) return status;
  auto const problem = Function::problem(call.params);
  status = check_workspace(Function::kName, head, call.kernel->launcher.workspace(problem));
  if (status != FLASHVAR_OK) return status;
  DeviceGuard const guard(head.device);
  if (guard.status() != FLASHVAR_OK) return guard.status();
  cudaError_t const error =
      call.kernel->launcher.launch(problem, head.device, static_cast<cudaStream_t>(head.stream));
  if (error == cudaSuccess) return FLASHVAR_OK;
  cudaGetLastError();  // clears the error: the next caller must not see it
  return fail(FLASHVAR_CUDA_ERROR, "%s did not launch on device %d: %s (%d)", Function::kName,
              head.device, cudaGetErrorString(error), error);
}

// flashvar_<function>_workspace.
template <class Function>
flashvar_status workspace(const typename Function::Params* caller, uint64_t* size) {
  Prepared<Function> const call(caller);
  if (call.status != FLASHVAR_OK) return call.status;
  if (size == nullptr) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "size must point to where the bytes of workspace are written, found NULL: pass the "
                "address of a uint64_t");
  }
  *size = Function::is_empty(call.params)
              ? 0
              : call.kernel->launcher.workspace(Function::problem(call.params));
  return FLASHVAR_OK;
}

// flashvar_<function>_explain.
template <class Function>
flashvar_status explain(const typename Function::Params* caller, char* buffer, uint64_t size) {
  Prepared<Function> const call(caller);
  if (call.status != FLASHVAR_OK) return call.status;
  if (buffer == nullptr && size > 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "text must point to %llu bytes, found NULL: pass a buffer, or size 0",
                static_cast<unsigned long long>(size));
  }
  Text text(buffer, size);
  call.kernel->launcher.explain(Function::problem(call.params), text);
  return FLASHVAR_OK;
}

}  // namespace flashvar

// Defines the three C functions of the function <name>, whose steps are those of
// flashvar::<Function>. The op's header declares them. A macro, because each has an exported name
// of its own.
#define FLASHVAR_DEFINE_C_FUNCTIONS(name, Function)                                             \
  flashvar_status flashvar_##name(const flashvar_##name##_params* params) {                     \
    return flashvar::launch<flashvar::Function>(params);                                        \
  }                                                                                             \
  flashvar_status flashvar_##name##_workspace(const flashvar_##name##_params* params,           \
                                              uint64_t* size) {                                 \
    return flashvar::workspace<flashvar::Function>(params, size);                               \
  }                                                                                             \
  flashvar_status flashvar_##name##_explain(const flashvar_##name##_params* params, char* text, \
                                            uint64_t size) {                                    \
    return flashvar::explain<flashvar::Function>(params, text, size);                           \
  }
