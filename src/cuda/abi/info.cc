// The library's ABI version and build info, with which the loader checks that it opened
// what it meant to.
#include "abi/flashvar.h"

namespace {
#include "build_info.inc"  // constexpr char kBuildInfo[]
}

uint32_t flashvar_abi_version(void) { return FLASHVAR_ABI_VERSION; }

const char* flashvar_build_info(void) { return kBuildInfo; }
