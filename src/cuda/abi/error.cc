// Keeps the message of the last failure, one per thread.
#include "abi/error.h"

#include <cstdarg>
#include <cstdio>

namespace {
thread_local char message[1024] = "";
}

namespace flashvar {

flashvar_status fail(flashvar_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace flashvar

const char* flashvar_last_error(void) { return message; }
