// Freezes the layout of what all ops share: compiling this file is the test. New fields go to the
// end of a function's parameters, with 0 for "as before" (read_params in call.h then serves older
// and newer callers). Any other change of a line here, or in an op's *_layout_check.cc, needs a new
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

static_assert(sizeof(flashvar_state) == 40);
static_assert(offsetof(flashvar_state, data) == 0);
static_assert(offsetof(flashvar_state, sequence_stride) == 8);
static_assert(offsetof(flashvar_state, head_stride) == 16);
static_assert(offsetof(flashvar_state, k_stride) == 24);
static_assert(offsetof(flashvar_state, v_stride) == 32);
