"""Which family of kernels a call takes: the rule, its words, and that the sources say the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import simulated as sim

from flashvar import families
from flashvar.families import MMA_SYNC, WGMMA, Rows
from flashvar.manifest import KernelRow

SOURCES = Path(__file__).parents[2] / "src" / "cuda"
FAMILY = "sm90/attention/"
ALIGNED = Rows("q", 0x7F00, 4096, 128, 64)


def kernel(op: str, dtype: str = "bf16", family: str = "sm90", **dims: int) -> KernelRow:
    return replace(sim.kernel(op, dtype=dtype, **(dims or {"head_dim": 64})), family=family)


FORWARD, BACKWARD = kernel("attention_fwd"), kernel("attention_bwd")


@pytest.mark.parametrize(
    ("kind", "rows", "special", "family", "words"),
    [
        (FORWARD, ALIGNED, (), WGMMA, "every row starts on 16 bytes"),
        (FORWARD, ALIGNED, ("a bias",), WGMMA, "every row"),
        (BACKWARD, ALIGNED, (), WGMMA, "every row"),
        (
            FORWARD,
            replace(ALIGNED, address=0x7F02),
            (),
            MMA_SYNC,
            "q: its address is 2 bytes",
        ),
        (FORWARD, replace(ALIGNED, heads=65), (), MMA_SYNC, "q: its heads stride, 65, is no mult"),
        (FORWARD, replace(ALIGNED, sequence=68), (), MMA_SYNC, "its sequence stride, 68"),
        (FORWARD, replace(ALIGNED, batch=4), (), MMA_SYNC, "TMA cannot address rows of q"),
        (BACKWARD, ALIGNED, ("dropout",), WGMMA, "every row"),
        (BACKWARD, ALIGNED, (families.PACKED,), WGMMA, "every row"),
        (BACKWARD, ALIGNED, (families.PACKED, families.SHORT), MMA_SYNC, "fewer than 32 queries"),
        (BACKWARD, ALIGNED, ("dropout", "a bias"), MMA_SYNC, "backward does not serve a bias"),
        (kernel("attention_bwd", "fp16"), ALIGNED, (), WGMMA, "every row"),
        (kernel("attention_bwd", head_dim=96), ALIGNED, (), WGMMA, "every row"),
        (kernel("attention_bwd", head_dim=128, head_dim_v=64), ALIGNED, (), WGMMA, "every row"),
        (kernel("attention_fwd", family="sm80"), ALIGNED, (), MMA_SYNC, "16 bytes at a time"),
        (
            kernel("attention_fwd", family="sm80"),
            replace(ALIGNED, heads=65),
            (),
            MMA_SYNC,
            "in smaller pieces, for q: its heads stride",
        ),
    ],
)
def test_choice(
    kind: KernelRow, rows: Rows, special: tuple[str, ...], family: str, words: str
) -> None:
    found = families.choose(kind, [replace(ALIGNED, name="k"), rows], special)
    assert found.family == family
    assert words in found.reason


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD, kernel("attention_bwd", "fp16")])
def test_rules_lead_with_the_choice_of_a_plain_call(kind: KernelRow) -> None:
    first = families.rules(kind)[0].family
    assert first == families.choose(kind, [ALIGNED], ()).family


def read(name: str) -> str:
    return " ".join((SOURCES / name).read_text(encoding="utf-8").split())


def test_the_forward_of_the_sources_asks_for_the_same() -> None:
    body = re.search(
        r"static bool supports\(.*?\{ return (.*?); \}", read(f"{FAMILY}fwd_wgmma_launch.cuh")
    )
    assert body is not None
    assert body[1] == "problem.rows_are_aligned() && tensor_map_encoder() != nullptr"


# What `supports_shape` may ask, and what it leaves to the other family; () for what is always so.
ASKED = {
    "!problem.deterministic": (families.DETERMINISTIC,),
    "!problem.has_modifiers()": families.FEATURES,
    "problem.modifiers.bias.data == nullptr": (families.BIAS,),
    "problem.queries.offsets == nullptr": (families.PACKED,),
    "problem.keys.offsets == nullptr": (families.PACKED,),
    "problem.seqused_k == nullptr": (families.PACKED,),
    "!are_short(problem.queries, problem.batch)": (families.SHORT,),
    "problem.queries.seqlen > 0": (),
    "problem.keys.seqlen > 0": (),
}


def test_the_backward_of_the_sources_asks_for_the_same() -> None:
    body = re.search(
        r"static bool supports_shape\(.*?\{ return (.*?); \}", read(f"{FAMILY}bwd_wgmma_launch.cuh")
    )
    assert body is not None
    asked = body[1].split(" && ")
    assert [one for one in asked if one not in ASKED] == [], "teach flashvar/families.py to say it"
    assert f"kFewestRows = {families.FEWEST_ROWS};" in read(f"{FAMILY}bwd_wgmma_launch.cuh")
    left = frozenset(name for one in asked for name in ASKED[one])
    assert {"attention_bwd": left} == families.LEFT
