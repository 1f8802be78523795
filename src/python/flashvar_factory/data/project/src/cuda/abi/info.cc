#include "abi/vecadd.h"

namespace {
#include "build_info.inc"  // constexpr char kBuildInfo[]
}

uint32_t vecadd_abi_version(void) { return VECADD_ABI_VERSION; }

const char* vecadd_build_info(void) { return kBuildInfo; }
