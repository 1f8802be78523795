// The layout of what all ops share, frozen: compiling this file is the test. Fields are added at
// the end of an op's parameters alone, with 0 for "as before" (call.h lets older and newer callers
// in); any other change of a line here, or of an op's *_layout_check.cc, is a new
// FLASHVAR_ABI_VERSION.
#include <cstddef>

#include "abi/flashvar.h"

static_assert(sizeof(flashvar_call) == 40);
static_assert(offsetof(flashvar_call, struct_size) == 0);
static_assert(offsetof(flashvar_call, abi_version) == 4);
static_assert(offsetof(flashvar_call, device) == 8);
static_assert(offsetof(flashvar_call, reserved) == 12);
static_assert(offsetof(flashvar_call, stream) == 16);
static_assert(offsetof(flashvar_call, workspace) == 24);
static_assert(offsetof(flashvar_call, workspace_size) == 32);

static_assert(sizeof(flashvar_tensor) == 32);
static_assert(offsetof(flashvar_tensor, batch_stride) == 8);
static_assert(offsetof(flashvar_tensor, seq_stride) == 16);
static_assert(offsetof(flashvar_tensor, head_stride) == 24);
