// The thread's last error message.
#pragma once
#include "abi/flashvar.h"

namespace flashvar {

// Keeps the message for flashvar_last_error() and returns `status`.
[[gnu::format(printf, 2, 3)]] flashvar_status fail(flashvar_status status, const char* format, ...);

}  // namespace flashvar
