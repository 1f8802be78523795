// fail(): sets the thread's last error message.
#pragma once
#include "abi/flashvar.h"

namespace flashvar {

// Formats the message that flashvar_last_error() returns on this thread; returns `status`.
[[gnu::format(printf, 2, 3)]] flashvar_status fail(flashvar_status status, const char* format, ...);

}  // namespace flashvar
