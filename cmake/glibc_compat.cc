// Names that the libstdc++.a of a newer machine expects from its glibc and that glibc 2.28 lacks,
// built from what it has. Hidden, and linked into a binary only where something asks for one of
// them.

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define FLASHVAR_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// glibc 2.32: true while the process has one thread. False is always right, only slower: libstdc++
// then uses atomic reference counts.
FLASHVAR_HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;

// glibc 2.36. libstdc++ uses it for std::random_device.
ssize_t getrandom(void* buffer, size_t length, unsigned flags);
FLASHVAR_HIDDEN uint32_t arc4random() {
  uint32_t word;
  if (getrandom(&word, sizeof word, 0) != sizeof word) abort();
  return word;
}

// glibc 2.33 exports these; before, they were inline calls of the __x ones with the layout's
// version.
#if defined(__x86_64__)
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif
int __xstat(int version, const char* path, void* result);
int __lxstat(int version, const char* path, void* result);
int __fxstat(int version, int file, void* result);
int __fxstat64(int version, int file, void* result);
FLASHVAR_HIDDEN int stat(const char* path, void* result) {
  return __xstat(kStatVersion, path, result);
}
FLASHVAR_HIDDEN int lstat(const char* path, void* result) {
  return __lxstat(kStatVersion, path, result);
}
FLASHVAR_HIDDEN int fstat(int file, void* result) { return __fxstat(kStatVersion, file, result); }
FLASHVAR_HIDDEN int fstat64(int file, void* result) {
  return __fxstat64(kStatVersion, file, result);
}

// glibc 2.38: the C23 readers, which also take "0b" prefixes. Headers of that age rename strtol and
// its kin to them; the __asm__ names reach the old ones under those headers too.
long plain_strtol(const char*, char**, int) __asm__("strtol");
long long plain_strtoll(const char*, char**, int) __asm__("strtoll");
unsigned long plain_strtoul(const char*, char**, int) __asm__("strtoul");
unsigned long long plain_strtoull(const char*, char**, int) __asm__("strtoull");
FLASHVAR_HIDDEN long __isoc23_strtol(const char* text, char** end, int base) {
  return plain_strtol(text, end, base);
}
FLASHVAR_HIDDEN long long __isoc23_strtoll(const char* text, char** end, int base) {
  return plain_strtoll(text, end, base);
}
FLASHVAR_HIDDEN unsigned long __isoc23_strtoul(const char* text, char** end, int base) {
  return plain_strtoul(text, end, base);
}
FLASHVAR_HIDDEN unsigned long long __isoc23_strtoull(const char* text, char** end, int base) {
  return plain_strtoull(text, end, base);
}
}
