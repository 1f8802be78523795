"""Names that the C library and CUDA declare globally: no namespace of a project can have them."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from flashvar_factory.build import source

# `float4`, `uchar1`: CUDA's vectors.
_VECTORS: Final = re.compile(r"(u?(char|short|int|long|longlong)|float|double)[1-4]")
# Functions, types and macros in the headers of the C library and of CUDA that are not among the
# symbols of glibc 2.28. Compilers refuse each as the name of a namespace.
_OTHERS: Final = """
all alloca any arc4random ballot clock64 cospi cospif cuda dadd dfmal dim3 dmul double2int double2ll
double2uint double2ull dsqrtl dsub erfcinv erfcinvf erfcx erfcxf erfinv erfinvf errno f32fmaf32x
f32fmaf64 f32fmaf64x f32sqrtf32x f32sqrtf64 f32sqrtf64x f32xfmaf64 f32xfmaf64x f32xsqrtf64
f32xsqrtf64x f64fmaf64x f64sqrtf64x fdivide fdividef ffma ffmal float2double fmaximum fmaximumf
fmaximumf32 fmaximumf32x fmaximumf64 fmaximumf64x fmaximuml fminimum fminimumf fminimumf32
fminimumf32x fminimumf64 fminimumf64x fminimuml fpclassify fsqrt fsqrtl getcpu h2ceil h2cos h2exp
h2exp10 h2exp2 h2floor h2log h2log10 h2log2 h2rcp h2rint h2rsqrt h2sin h2sqrt h2tanh h2trunc half
half2 hceil hcos hexp hexp10 hexp2 hfloor hlog hlog10 hlog2 hrcp hrint hrsqrt hsin hsqrt htanh
htrunc int2double iscanonical iseqsig isfinite isgreater isgreaterequal isless islessequal
islessgreater isnormal issignaling isunordered iszero itimerspec lconv linux ll2double llmax llmin
main max min norm norm3d norm3df norm4d norm4df normcdf normcdff normcdfinv normcdfinvf normf
obstack offsetof rcbrt rcbrtf rhypot rhypotf rnorm rnorm3d rnorm3df rnorm4d rnorm4df rnormf rsqrt
rsqrtf sigevent signbit sincospi sincospif sinpi sinpif timespec timeval timex tm uint uint2double
ull2double ullmax ullmin ulong umax umin unix ushort
"""


def is_taken(word: str) -> bool:
    """Whether the C library or CUDA declares `word` globally."""
    return word in _OTHERS.split() or word in _c_library() or _VECTORS.fullmatch(word) is not None


@cache
def _c_library() -> frozenset[str]:
    """The symbols that libraries are linked against."""
    files = (source.HOME / source.CMAKE).glob("glibc-*.syms")
    texts = (path.read_text(encoding="utf-8") for path in files)
    return frozenset(name for text in texts for name in re.findall(r"^(\w+) ", text, re.MULTILINE))
