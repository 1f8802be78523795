#include <cstdint>
#include <cstdio>

#include "abi/kernel_table.h"
#include "causal_conv1d.h"

namespace {
#include "build_info.inc"  // constexpr char kBuildInfo[]
}

namespace causalconv1d {
#include "conv_bwd_kernels.inc"
#include "conv_fwd_kernels.inc"
#include "conv_update_kernels.inc"

namespace {

thread_local char message[256] = "";

causalconv1d_status run(const char* op, const Kernel* const* row, const causalconv1d_call& call,
                        uint64_t expected) {
  if (call.params_size != expected) {
    std::snprintf(message, sizeof(message), "%s: expected params of %llu bytes, found %llu", op,
                  static_cast<unsigned long long>(expected),
                  static_cast<unsigned long long>(call.params_size));
    return CAUSALCONV1D_INVALID;
  }
  const auto& params = *static_cast<const ConvParamsBase*>(call.params);
  if (params.width < 2 || params.width > 4) {
    std::snprintf(message, sizeof(message), "%s: expected a width of 2 to 4, found %d", op,
                  params.width);
    return CAUSALCONV1D_INVALID;
  }
  while (*row != nullptr &&
         ((*row)->dtype != call.dtype || (*row)->weight_dtype != call.weight_dtype)) {
    ++row;
  }
  if (*row == nullptr) {
    std::snprintf(message, sizeof(message), "%s: no kernel for dtype %u with weights of dtype %u",
                  op, call.dtype, call.weight_dtype);
    return CAUSALCONV1D_INVALID;
  }
  cudaError_t const error = (*row)->launch(call);
  if (error == cudaSuccess) return CAUSALCONV1D_OK;
  std::snprintf(message, sizeof(message), "%s: %s", op, cudaGetErrorString(error));
  return CAUSALCONV1D_CUDA_ERROR;
}

}  // namespace
}  // namespace causalconv1d

using namespace causalconv1d;

uint32_t causalconv1d_abi_version(void) { return CAUSALCONV1D_ABI_VERSION; }

const char* causalconv1d_build_info(void) { return kBuildInfo; }

const char* causalconv1d_last_error(void) { return message; }

causalconv1d_status causalconv1d_conv_fwd(const causalconv1d_call* call) {
  return run("conv_fwd", kConvFwdKernels, *call, sizeof(ConvParamsBase));
}

causalconv1d_status causalconv1d_conv_bwd(const causalconv1d_call* call) {
  return run("conv_bwd", kConvBwdKernels, *call, sizeof(ConvParamsBwd));
}

causalconv1d_status causalconv1d_conv_update(const causalconv1d_call* call) {
  return run("conv_update", kConvUpdateKernels, *call, sizeof(ConvParamsBase));
}
