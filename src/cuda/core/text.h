// Text: formats into a caller's char buffer of fixed size. Host only.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace flashvar {

class Text {
 public:
  Text(char* buffer, uint64_t size) : next_(buffer), left_(size) {
    if (size > 0) *buffer = '\0';
  }

  // Appends, printf style. What does not fit is cut off; the text always ends with 0.
  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    int const length = std::vsnprintf(next_, left_, format, arguments);
    va_end(arguments);
    uint64_t const written = length < 0 || left_ == 0                    ? 0
                             : static_cast<uint64_t>(length) < left_ - 1 ? length
                                                                         : left_ - 1;
    next_ += written;
    left_ -= written;
  }

 private:
  char* next_;
  uint64_t left_;  // bytes from next_ on, the terminating 0 included
};

}  // namespace flashvar
