"""Attention, forward: flashvar's backends beside torch's own kernels, on the same tensors.

Rate = operations of the result / median time, in TFLOP/s. `difference_to_reference` is the relative
distance (Frobenius norm) of a contender's output from the first one's: it tells that the same
function was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases
from benchmarks.report import BenchmarkError, Options, Report, Row, chosen, reason
from benchmarks.timing import Timing, measure

Call: TypeAlias = Callable[[], torch.Tensor]
# Makes the call of one contender for q, k, v as [batch, seqlen, heads, head_dim] and the causal
# flag. What the call returns has the shape of q.
Contender: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Call]

REFERENCE: Final = "sdpa-flash"
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SEED: Final = 20


def flashvar(backend: Literal["cuda", "triton"]) -> Contender:
    """`flashvar.attention` with one backend named, so that nothing else can answer."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        from flashvar import attention

        return lambda: attention(q, k, v, causal=causal, backend=backend)

    return prepare


def heads_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same memory seen as [batch, heads, seqlen, head_dim], as torch's functions read it."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def sdpa(backend: SDPBackend) -> Contender:
    """`scaled_dot_product_attention` held to one backend."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        queries, keys, values = heads_first(q, k, v)

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(queries, keys, values, is_causal=causal)
            return out.transpose(1, 2)

        return call

    return prepare


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """Compiled `flex_attention`; the block mask is made once and not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # each cell is compiled for its own shape
    compiled = torch.compile(flex_attention, dynamic=False)
    queries, keys, values = heads_first(q, k, v)
    seqlen = q.shape[1]
    mask = None
    if causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device=str(q.device)
        )

    def call() -> torch.Tensor:
        out: torch.Tensor = compiled(queries, keys, values, block_mask=mask)
        return out.transpose(1, 2)

    return call


CONTENDERS: Final[dict[str, Contender]] = {
    REFERENCE: sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    "flashvar-cuda": flashvar("cuda"),
    "flashvar-triton": flashvar("triton"),
}
DEFAULT: Final = (REFERENCE, "sdpa-cudnn", "flashvar-cuda", "flashvar-triton")


def run(options: Options) -> Report:
    """Times the chosen cells on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown cell or contender.
    """
    contenders = options.contenders or DEFAULT
    for name in contenders:
        if name not in CONTENDERS:
            raise BenchmarkError(
                f"--contender must be one of {', '.join(CONTENDERS)}, got {name!r}: correct it"
            )
    cells = {cell.name: cell for cell in cases.attention()}
    names = chosen(list(cells), options.only)
    rows = [row for name in names for row in _cell(cells[name], contenders, options.seconds)]
    return Report(
        rows=rows,
        columns=("cell (TFLOP/s)", *contenders, "cuda / flash", "cuda / best"),
        lines=[_line(name, rows, contenders) for name in names],
    )


def ratios(rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """Each rate over the reference's (`to_reference`) and over the best peer's (`to_best`)."""
    peers = [rate for name, rate in rates.items() if not name.startswith("flashvar-")]
    result: dict[str, dict[str, float]] = {name: {} for name in rates}
    for name, rate in rates.items():
        if REFERENCE in rates:
            result[name]["to_reference"] = rate / rates[REFERENCE]
        if peers:
            result[name]["to_best"] = rate / max(peers)
    return result


def _cell(cell: cases.Cell, contenders: Sequence[str], seconds: float) -> list[Row]:
    generator = torch.Generator("cuda").manual_seed(_SEED)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    q, k, v = (
        torch.randn(shape, dtype=DTYPES[cell.dtype], device="cuda", generator=generator)
        for _ in range(3)
    )
    calls: dict[str, Call] = {}
    outputs: dict[str, torch.Tensor] = {}
    skipped: dict[str, str] = {}
    for name in contenders:
        try:
            call = CONTENDERS[name](q, k, v, cell.causal)
            outputs[name] = call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # a peer that cannot serve this cell is a result, not a failure
            skipped[name] = reason(error)
    distances = _distances(outputs)
    outputs.clear()
    measured = measure(calls, seconds=seconds) if calls else None
    timings = measured.timings if measured else {}
    rates = {name: cell.operations / timing.median_ms / 1e9 for name, timing in timings.items()}
    compared = ratios(rates)
    rows: list[Row] = []
    for name in contenders:
        row: Row = {"cell": cell.name, "contender": name, **_describe(cell)}
        if name in timings:
            row |= _describe_timing(timings[name])
            row |= {"tflops": rates[name], "difference_to_reference": distances[name]}
            row |= compared[name]
            row |= dict(measured.clocks) if measured else {}
        else:
            row["skipped"] = skipped[name]
        rows.append(row)
    return rows


def _distances(outputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative distance of each output from the first one."""
    if not outputs:
        return {}
    expected = next(iter(outputs.values())).float()
    norm = expected.norm()
    return {
        name: float((output.float() - expected).norm() / norm) for name, output in outputs.items()
    }


def _describe(cell: cases.Cell) -> Row:
    return {
        "direction": cell.direction,
        "dtype": cell.dtype,
        "batch": cell.batch,
        "seqlen": cell.seqlen,
        "heads": cell.heads,
        "head_dim": cell.head_dim,
        "causal": cell.causal,
    }


def _describe_timing(timing: Timing) -> Row:
    return {
        "median_ms": timing.median_ms,
        "low_ms": timing.low_ms,
        "high_ms": timing.high_ms,
        "rounds": timing.rounds,
    }


def _line(cell: str, rows: Sequence[Row], contenders: Sequence[str]) -> tuple[str, ...]:
    by_name = {row["contender"]: row for row in rows if row["cell"] == cell}
    cuda = by_name.get("flashvar-cuda", {})
    return (
        cell,
        *(_number(by_name[name].get("tflops"), ".0f") for name in contenders),
        _number(cuda.get("to_reference"), ".2f"),
        _number(cuda.get("to_best"), ".2f"),
    )


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, float) else "-"
