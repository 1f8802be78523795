// Launch facts of compiled kernels (threads, shared memory, tile sizes) as records in the ELF
// section .flashvar.kernels, from which the manifest writer reads them without loading the library.
// One record per device function that a row of a kernel table launches, and one more for each of
// its variants whose threads, shared memory or tile may differ. The first record is that of the
// main kernel of plain calls.
#pragma once
#include <cstdint>

namespace flashvar {

struct KernelFacts {
  char row[64];  // name of the kernel table's row; all strings end with 0
  // Name of the device function; after a comma which variant of it, or for which of the calls of
  // `when` it is launched, if not for all.
  char kernel[32];
  char family[16];        // "wgmma", "mma.sync" or "simt": of the main kernel that it runs with
  char when[160];         // which calls launch the row's kernels of this family
  int32_t threads;        // per block
  int32_t shared_memory;  // dynamic, bytes per block
  int32_t tile[4];        // block sizes in the op's own order; 0 where unused
};

static_assert(sizeof(KernelFacts) == 296, "the manifest writer reads records of 296 bytes");

template <int kCount>
struct KernelFactsList {
  KernelFacts records[kCount];
};

// Called where a text is too long for its field. It is not constexpr, so that the record then does
// not compile.
void text_is_too_long();

// Makes the records of one row and one family.
struct KernelFactsMaker {
  const char* row;
  const char* family;
  const char* when;

  constexpr KernelFacts make(const char* kernel, int threads, int shared_memory, int tile0,
                             int tile1 = 0) const {
    KernelFacts facts{{}, {}, {}, {}, threads, shared_memory, {tile0, tile1, 0, 0}};
    copy(facts.row, row);
    copy(facts.kernel, kernel);
    copy(facts.family, family);
    copy(facts.when, when);
    return facts;
  }

 private:
  template <int kSize>
  static constexpr void copy(char (&to)[kSize], const char* from) {
    for (int i = 0; from[i] != '\0'; ++i) {
      if (i == kSize - 1) return text_is_too_long();
      to[i] = from[i];
    }
  }
};

template <int kFirst, int kSecond>
constexpr KernelFactsList<kFirst + kSecond> join(const KernelFactsList<kFirst>& first,
                                                 const KernelFactsList<kSecond>& second) {
  KernelFactsList<kFirst + kSecond> both{};
  for (int i = 0; i < kFirst; ++i) both.records[i] = first.records[i];
  for (int i = 0; i < kSecond; ++i) both.records[kFirst + i] = second.records[i];
  return both;
}

}  // namespace flashvar
