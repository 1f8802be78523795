// wgmma m64nNk16: d += a b by a warpgroup, asynchronously, with 16-bit inputs and fp32 accumulation
// (sm_90a).
//
// Warp w of the warpgroup holds rows 16 w to 16 w + 15 of d as N / 8 m16n8 accumulator tiles
// (mma_sync.cuh); operand a in registers is laid out likewise. Descriptors name shared-memory tiles
// of 128-byte rows, SWIZZLE_128B, in column blocks of 64 columns, or of 64-byte rows. Between
// wgmma_fence() and wgmma_wait() nothing else may access d, or a in registers.
//
// Operand lists are macros because asm strings cannot be composed otherwise. The file is long
// because each N lists its accumulators.
#pragma once
#include <cstdint>

#include "core/dtype.cuh"

namespace flashvar::ptx {

// Orders earlier register accesses before the following wgmma instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Closes the warpgroup's open group of wgmma instructions.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the kPending newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of `r` across this point (as CUTLASS's
// warpgroup_fence_operand).
template <int kCount>
__device__ __forceinline__ void wgmma_fence_operand(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Descriptor of the tile at shared-memory address `smem`. `col_block_bytes`: distance between
// column blocks (leading byte offset); read for MN-major operands only. The stride byte offset is
// that of eight rows, 1024 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem, uint32_t col_block_bytes) {
  constexpr uint64_t kSwizzle128B = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128B | kEightRows | (uint64_t{(col_block_bytes >> 4) & 0x3fff} << 16) |
         ((smem >> 4) & 0x3fff);
}
// The descriptor of a tile of one column block of 64-byte rows, SWIZZLE_64B.
__device__ __forceinline__ uint64_t wgmma_descriptor_64b(uint32_t smem) {
  constexpr uint64_t kSwizzle64B = uint64_t{2} << 62;
  constexpr uint64_t kEightRows = uint64_t{512 >> 4} << 32;
  return kSwizzle64B | kEightRows | ((smem >> 4) & 0x3fff);
}
// The descriptor of the tile `bytes` further on. The sum cannot carry out of the 14-bit address
// field, which covers 256 KiB: more than shared memory has.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
  uint32_t const low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor & 0xffffffff00000000) | low;
}

template <class Dtype, int kN>
struct Wgmma;

#define FLASHVAR_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHVAR_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHVAR_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHVAR_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHVAR_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHVAR_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHVAR_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHVAR_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHVAR_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASHVAR_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHVAR_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASHVAR_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHVAR_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASHVAR_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASHVAR_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASHVAR_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHVAR_D(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// kA to kG: numbers of the asm operands after the accumulators. ss: a, b, accumulate, trans-a,
// trans-b. rs: the four registers of a, b, accumulate, trans-b. kTransB: b is MN-major (its rows
// are k, as those of V), else K-major (its columns are k, as those of K); kTransA likewise.
#define FLASHVAR_WGMMA(kN_, kDtype, kName, kA, kB, kC, kD, kE, kF, kG, kRegisters, ...)            \
  template <>                                                                                      \
  struct Wgmma<dtype::kDtype, kN_> {                                                               \
    template <bool kTransB, bool kTransA = false>                                                  \
    static __device__ __forceinline__ void ss(float (&d)[kN_ / 2], uint64_t a, uint64_t b,         \
                                              int accumulate) {                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kC                                          \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #kN_ "k16.f32." kName "." kName             \
                   " {" kRegisters "}, " kA ", " kB ", p, 1, 1, " kD ", " kE ";\n}\n"              \
                   : __VA_ARGS__                                                                   \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0)); \
    }                                                                                              \
    template <bool kTransB>                                                                        \
    static __device__ __forceinline__ void rs(float (&d)[kN_ / 2], const uint32_t (&a)[4],         \
                                              uint64_t b, int accumulate) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kF                                          \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #kN_ "k16.f32." kName "." kName             \
                   " {" kRegisters "}, {" kA ", " kB ", " kC ", " kD "}, " kE ", p, 1, 1, " kG     \
                   ";\n}\n"                                                                        \
                   : __VA_ARGS__                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),          \
                     "n"(kTransB ? 1 : 0));                                                        \
    }                                                                                              \
  };
#define FLASHVAR_WGMMA_BOTH(kN_, ...)            \
  FLASHVAR_WGMMA(kN_, bf16, "bf16", __VA_ARGS__) \
  FLASHVAR_WGMMA(kN_, fp16, "f16", __VA_ARGS__)

FLASHVAR_WGMMA_BOTH(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22",
                    FLASHVAR_R0 ", " FLASHVAR_R1, FLASHVAR_D(0), FLASHVAR_D(8))
FLASHVAR_WGMMA_BOTH(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3, FLASHVAR_D(0),
                    FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24))
FLASHVAR_WGMMA_BOTH(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32))
FLASHVAR_WGMMA_BOTH(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4
                                ", " FLASHVAR_R5,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32),
                    FLASHVAR_D(40))
FLASHVAR_WGMMA_BOTH(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4
                                ", " FLASHVAR_R5 ", " FLASHVAR_R6,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32),
                    FLASHVAR_D(40), FLASHVAR_D(48))
FLASHVAR_WGMMA_BOTH(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4
                                ", " FLASHVAR_R5 ", " FLASHVAR_R6 ", " FLASHVAR_R7,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32),
                    FLASHVAR_D(40), FLASHVAR_D(48), FLASHVAR_D(56))
FLASHVAR_WGMMA_BOTH(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4
                                ", " FLASHVAR_R5 ", " FLASHVAR_R6 ", " FLASHVAR_R7 ", " FLASHVAR_R8
                                ", " FLASHVAR_R9,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32),
                    FLASHVAR_D(40), FLASHVAR_D(48), FLASHVAR_D(56), FLASHVAR_D(64), FLASHVAR_D(72))
FLASHVAR_WGMMA_BOTH(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4
                                ", " FLASHVAR_R5 ", " FLASHVAR_R6 ", " FLASHVAR_R7 ", " FLASHVAR_R8
                                ", " FLASHVAR_R9 ", " FLASHVAR_R10,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32),
                    FLASHVAR_D(40), FLASHVAR_D(48), FLASHVAR_D(56), FLASHVAR_D(64), FLASHVAR_D(72),
                    FLASHVAR_D(80))
FLASHVAR_WGMMA_BOTH(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4
                                ", " FLASHVAR_R5 ", " FLASHVAR_R6 ", " FLASHVAR_R7 ", " FLASHVAR_R8
                                ", " FLASHVAR_R9 ", " FLASHVAR_R10 ", " FLASHVAR_R11,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32),
                    FLASHVAR_D(40), FLASHVAR_D(48), FLASHVAR_D(56), FLASHVAR_D(64), FLASHVAR_D(72),
                    FLASHVAR_D(80), FLASHVAR_D(88))
FLASHVAR_WGMMA_BOTH(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134",
                    FLASHVAR_R0 ", " FLASHVAR_R1 ", " FLASHVAR_R2 ", " FLASHVAR_R3 ", " FLASHVAR_R4
                                ", " FLASHVAR_R5 ", " FLASHVAR_R6 ", " FLASHVAR_R7 ", " FLASHVAR_R8
                                ", " FLASHVAR_R9 ", " FLASHVAR_R10 ", " FLASHVAR_R11
                                ", " FLASHVAR_R12 ", " FLASHVAR_R13 ", " FLASHVAR_R14
                                ", " FLASHVAR_R15,
                    FLASHVAR_D(0), FLASHVAR_D(8), FLASHVAR_D(16), FLASHVAR_D(24), FLASHVAR_D(32),
                    FLASHVAR_D(40), FLASHVAR_D(48), FLASHVAR_D(56), FLASHVAR_D(64), FLASHVAR_D(72),
                    FLASHVAR_D(80), FLASHVAR_D(88), FLASHVAR_D(96), FLASHVAR_D(104),
                    FLASHVAR_D(112), FLASHVAR_D(120))

#undef FLASHVAR_WGMMA_BOTH
#undef FLASHVAR_WGMMA
#undef FLASHVAR_D
#undef FLASHVAR_R0
#undef FLASHVAR_R1
#undef FLASHVAR_R2
#undef FLASHVAR_R3
#undef FLASHVAR_R4
#undef FLASHVAR_R5
#undef FLASHVAR_R6
#undef FLASHVAR_R7
#undef FLASHVAR_R8
#undef FLASHVAR_R9
#undef FLASHVAR_R10
#undef FLASHVAR_R11
#undef FLASHVAR_R12
#undef FLASHVAR_R13
#undef FLASHVAR_R14
#undef FLASHVAR_R15

}  // namespace flashvar::ptx
