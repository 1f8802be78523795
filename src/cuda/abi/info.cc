// What this binary is, for a loader that must not trust file names.
#include "abi/flashvar.h"

namespace {
#include "build_info.inc"  // constexpr char kBuildInfo[]
}

uint32_t flashvar_abi_version(void) { return FLASHVAR_ABI_VERSION; }

const char* flashvar_build_info(void) { return kBuildInfo; }
