#include <cstdint>
#include <cstdio>

#include "abi/kernel_table.h"
#include "selective_scan.h"

namespace {
#include "build_info.inc"  // constexpr char kBuildInfo[]
}

namespace mambassm {
#include "scan_bwd_kernels.inc"
#include "scan_fwd_kernels.inc"

namespace {

thread_local char message[256] = "";

mambassm_status run(const char* op, const Kernel* const* row, const mambassm_call& call,
                    uint64_t expected) {
  if (call.params_size != expected) {
    std::snprintf(message, sizeof(message), "%s: expected params of %llu bytes, found %llu", op,
                  static_cast<unsigned long long>(expected),
                  static_cast<unsigned long long>(call.params_size));
    return MAMBASSM_INVALID;
  }
  while (*row != nullptr &&
         ((*row)->dtype != call.dtype || (*row)->weight_dtype != call.weight_dtype)) {
    ++row;
  }
  if (*row == nullptr) {
    std::snprintf(message, sizeof(message), "%s: no kernel for dtype %u with weights of dtype %u",
                  op, call.dtype, call.weight_dtype);
    return MAMBASSM_INVALID;
  }
  cudaError_t const error = (*row)->launch(call);
  if (error == cudaSuccess) return MAMBASSM_OK;
  std::snprintf(message, sizeof(message), "%s: %s", op, cudaGetErrorString(error));
  return MAMBASSM_CUDA_ERROR;
}

}  // namespace
}  // namespace mambassm

using namespace mambassm;

uint32_t mambassm_abi_version(void) { return MAMBASSM_ABI_VERSION; }

const char* mambassm_build_info(void) { return kBuildInfo; }

const char* mambassm_last_error(void) { return message; }

mambassm_status mambassm_scan_fwd(const mambassm_call* call) {
  return run("scan_fwd", kScanFwdKernels, *call, sizeof(SSMParamsBase));
}

mambassm_status mambassm_scan_bwd(const mambassm_call* call) {
  return run("scan_bwd", kScanBwdKernels, *call, sizeof(SSMParamsBwd));
}
