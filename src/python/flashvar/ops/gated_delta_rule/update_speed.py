"""What `doctor --bench` times of gated_delta_rule_update, beside a copy: it moves states.

Sequences of one token each, whose states are everywhere in a pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from flashvar.cli.speed import Call, Cell
from flashvar.errors import LayoutError
from flashvar.ops.gated_delta_rule.spec import UPDATE

if TYPE_CHECKING:
    import torch

DTYPE: Final = "bf16"
HEAD_DIM: Final = 128
HEADS: Final = 16, 32  # of q and k, of v
_BYTES: Final = {"fp32": 4, "bf16": 2}

TITLE: Final = "Speed of gated_delta_rule_update, TB/s"
NOTE: Final = (
    f"Sequences of a token, {HEADS[0]}/{HEADS[1]} heads, K and V {HEAD_DIM}, {DTYPE}; bytes of "
    "states read and written. kv and vk: the layout of states."
)
PEERS: Final = {"copy": "copy", "fla": "FLA"}


@dataclass(frozen=True)
class UpdateCell(Cell):
    """So many sequences, and what their states are in memory."""

    sequences: int = 1
    state_dtype: str = "fp32"
    state_layout: Literal["kv", "vk"] = "kv"


def _cell(sequences: int, state_dtype: str, layout: Literal["kv", "vk"]) -> UpdateCell:
    name = f"update, {sequences} sequences, states {layout} in {state_dtype}"
    moved = 2.0 * sequences * HEADS[1] * HEAD_DIM**2 * _BYTES[state_dtype]
    return UpdateCell(name, UPDATE, DTYPE, ((HEAD_DIM,),), moved, sequences, state_dtype, layout)


CELLS: Final = (_cell(64, "fp32", "kv"), _cell(256, "fp32", "kv"))
MORE_CELLS: Final = (
    *(_cell(256, "fp32", "vk"), _cell(64, "bf16", "kv")),
    *(_cell(256, "bf16", "kv"), _cell(256, "bf16", "vk")),
)

SMALL_CELLS: Final = (_cell(1, "fp32", "vk"),)


def call(cell: UpdateCell, contender: str, device: torch.device) -> Call:
    """A call of flashvar or of a peer, with its inputs. The copy moves as many bytes."""
    import torch

    from flashvar.ops.dtypes import dtype_of

    if contender == "copy":
        source = torch.empty(int(cell.work) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    few, many = HEADS

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(cell.sequences, 1, *shape, dtype=torch.bfloat16, device=device)

    given: dict[str, Any] = {
        **{"q": made(few, HEAD_DIM), "k": made(few, HEAD_DIM), "v": made(many, HEAD_DIM)},
        "g": -torch.rand(cell.sequences, 1, many, device=device),
        "beta": torch.rand(cell.sequences, 1, many, device=device).bfloat16(),
    }
    shape = (cell.sequences, many, HEAD_DIM, HEAD_DIM)
    states = torch.randn(shape, device=device).to(dtype_of(cell.state_dtype))
    if contender == "fla":
        if (cell.state_layout, cell.state_dtype) != ("kv", "fp32"):
            raise LayoutError(
                "FLA's states are K-major in fp32 here, found "
                f"{cell.state_layout} in {cell.state_dtype}: leave it out of this cell"
            )
        of_fla = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return lambda: of_fla(**given, initial_state=states, **options)
    from flashvar.ops.gated_delta_rule.api import gated_delta_rule

    indices = torch.randperm(cell.sequences, device=device)
    # Not by name, and without no_grad, which nothing here needs: they are no part of the call.
    tensors, layout = tuple(given.values()), cell.state_layout
    return lambda: gated_delta_rule(
        *tensors,
        initial_state=states,
        state_indices=indices,
        state_layout=layout,
        qk_l2norm=True,
    )
