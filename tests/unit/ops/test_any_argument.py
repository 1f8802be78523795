"""Anything for any argument of a public function: it is served, or refused in words of ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import flashvar
from flashvar import flash_attn
from flashvar.compat import causal_conv1d, einops_patterns
from flashvar.compat.flash_attn import bert_padding
from flashvar.compat.flash_attn.layers import rotary
from flashvar.errors import FlashvarError
from flashvar.integrations import torch as sdpa
from flashvar.integrations import transformers as transformers
from flashvar.integrations.attend import Attend
from flashvar.integrations.documents import Documents
from flashvar.integrations.xformers import (
    memory_efficient_attention,
    memory_efficient_attention_partial,
    merge_attentions,
)

with warnings.catch_warnings():  # it is a prototype
    warnings.simplefilter("ignore")
    from torch.masked import masked_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*[Nn]ested [Tt]ensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*not implemented in __torch_dispatch__:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

ROWS = torch.randn(2, 5, 2, 8)
HEADS_FIRST = ROWS.transpose(1, 2)
PACKED = torch.randn(7, 2, 8)
OFFSETS = torch.tensor([0, 3, 7], dtype=torch.int32)


def anything() -> dict[str, Any]:
    """What is no argument of most functions, by what it is."""
    sizes = ((), (0,), (1,), (2,), (3,), (2, 3), (7, 2, 8), (2, 5, 2, 7), (0, 5, 2, 8))
    dtypes = (torch.float64, torch.half, torch.int64, torch.bool, torch.complex64)
    sequences = [torch.randn(3, 2, 8), torch.randn(4, 2, 8)]
    return {
        "None": None,
        "words": "x",
        "bytes": b"x",
        "-1": -1,
        "1.5": 1.5,
        "True": True,
        "nan": float("nan"),
        "complex": 1j,
        "list": [1.0],
        "empty list": [],
        "nested list": [[1, 2], [3, 4]],
        "tuple": (1, 2, 3),
        "dict": {"a": 1},
        "class": int,
        "function": len,
        "object": object(),
        "dtype": torch.float32,
        "number of numpy": np.float32(0.5),
        "array": np.zeros((2, 5, 2, 8), np.float32),
        **{f"tensor {size}": torch.randn(size) for size in sizes},
        **{f"{dtype}": torch.ones(2, 5, 2, 8).to(dtype) for dtype in dtypes},
        "offsets that decrease": torch.tensor([0, 9, 3], dtype=torch.int32),
        "offsets beyond": torch.tensor([-1, 3, 99], dtype=torch.int32),
        "six dimensions": torch.randn(1, 1, 2, 5, 2, 8),
        "other batch": torch.randn(3, 5, 2, 8),
        "meta": torch.randn(2, 5, 2, 8, device="meta"),
        "sparse": torch.randn(2, 5, 2, 8).to_sparse(),
        "CSR": torch.eye(3).to_sparse_csr(),
        "mkldnn": torch.eye(3).to_mkldnn(),
        "strided nested": torch.nested.nested_tensor(sequences),
        "jagged nested": torch.nested.nested_tensor(sequences, layout=torch.jagged),
        "masked": masked_tensor(torch.randn(2, 5, 2, 8), torch.ones(2, 5, 2, 8).bool()),
        "strided rows": torch.randn(2, 5, 8, 2).transpose(2, 3),
    }


def attend(q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
    return Attend(**{"flash": True, "backend": "reference", **options})(q, k, v)


def why_not(q: Any, k: Any, v: Any) -> str | None:
    return Attend(flash=True, backend="reference").why_not(q, k, v)


def attention_of_documents(q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
    return Documents.of_lengths([3, 7]).attention(q, k, v, **options)


def activate(backend: Any) -> None:
    with sdpa.activate(backend):
        pass


def rotated(**given: Any) -> Any:
    return rotary.RotaryEmbedding(8)(**given)


def register(name: Any) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    if not isinstance(name, str) or name == "flashvar":  # others are names too, and would stay
        transformers.register(name)


class LowerTriangularMask:
    """As xformers has it."""


class _Lengths:
    seqstart = OFFSETS
    max_seqlen = 4


class BlockDiagonalMask:
    """As xformers has it."""

    q_seqinfo = k_seqinfo = _Lengths


_OPTIONS = {
    "causal": False,
    "scale": None,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "sinks": None,
    "alibi_slopes": None,
    "dropout_p": 0.0,
    "rng_state": None,
    "deterministic": False,
    "return_lse": False,
    "backend": "auto",
}
_FLASH_OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
_PACKING = {
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": OFFSETS,
    "max_seqlen_q": 4,
    "max_seqlen_k": 4,
}


def _three(names: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict.fromkeys(names.split(), tensor)


_XFORMERS = {**_three("query key value", ROWS), "attn_bias": None, "p": 0.0, "scale": None}
_TABLES = {"cos": torch.randn(9, 4), "sin": torch.randn(9, 4)}
_PARTS, _SUMS = [ROWS, ROWS], [torch.randn(2, 2, 5)] * 2
_FIVE = {name: table[:5] for name, table in _TABLES.items()}
# Each function with arguments that it takes.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (
        flashvar.attention,
        {**_three("q k v", ROWS), **_OPTIONS, "bias": None, "layout": "bshd"},
    ),
    "attention with dropout": (
        flashvar.attention,
        {
            **_three("q k v", ROWS),
            "dropout_p": 0.2,
            "rng_state": torch.tensor([1, 2]),
            "return_lse": True,
        },
    ),
    "attention_varlen": (
        flashvar.attention_varlen,
        {**_three("q k v", PACKED), **_PACKING, **_OPTIONS, "seqused_k": None},
    ),
    "flash_attn_func": (flash_attn.flash_attn_func, {**_three("q k v", ROWS), **_FLASH_OPTIONS}),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        {"qkv": torch.randn(2, 5, 3, 2, 8), **_FLASH_OPTIONS},
    ),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        {"q": ROWS, "kv": torch.randn(2, 5, 2, 2, 8)},
    ),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        {**_three("q k v", PACKED), **_PACKING, **_FLASH_OPTIONS},
    ),
    "flash_attn_varlen_func with dropout": (
        flash_attn.flash_attn_varlen_func,
        {**_three("q k v", PACKED), **_PACKING, "dropout_p": 0.3, "return_attn_probs": True},
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        {"qkv": torch.randn(7, 3, 2, 8), "cu_seqlens": OFFSETS, "max_seqlen": 4},
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        {"q": PACKED, "kv": torch.randn(7, 2, 2, 8), **_PACKING},
    ),
    "Attend": (
        attend,
        {
            **_three("q k v", HEADS_FIRST),
            "dropout": 0.0,
            "flash": True,
            "scale": None,
            "backend": "reference",
        },
    ),
    "Attend with dropout": (attend, {**_three("q k v", HEADS_FIRST), "dropout": 0.5}),
    "Attend on the CPU": (attend, {**_three("q k v", HEADS_FIRST), "backend": "auto"}),
    "Attend.why_not": (why_not, _three("q k v", HEADS_FIRST)),
    "Documents.of_ids": (Documents.of_ids, {"ids": torch.tensor([[0, 0, 1, 1, 2]])}),
    "Documents.of_lengths": (Documents.of_lengths, {"lengths": [3, 4], "device": None}),
    "Documents.attention": (
        attention_of_documents,
        {**_three("q k v", ROWS), "causal": True, "scale": None, "window_size": (-1, -1)},
    ),
    "memory_efficient_attention": (
        memory_efficient_attention,
        {**_XFORMERS, "op": None, "output_dtype": None},
    ),
    "memory_efficient_attention of 3 dimensions": (
        memory_efficient_attention,
        {**_three("query key value", ROWS[:, :, 0]), "attn_bias": torch.zeros(2, 5, 5)},
    ),
    "memory_efficient_attention of 5 dimensions": (
        memory_efficient_attention,
        _three("query key value", torch.randn(2, 5, 2, 2, 8)),
    ),
    "memory_efficient_attention of a triangle": (
        memory_efficient_attention,
        {**_XFORMERS, "attn_bias": LowerTriangularMask()},
    ),
    "memory_efficient_attention of blocks": (
        memory_efficient_attention,
        {**_three("query key value", PACKED[None]), "attn_bias": BlockDiagonalMask()},
    ),
    "unpad_input": (
        bert_padding.unpad_input,
        {
            "hidden_states": ROWS,
            "attention_mask": torch.ones(2, 5, dtype=torch.long),
            "unused_mask": None,
        },
    ),
    "unpad_input_for_concatenated_sequences": (
        bert_padding.unpad_input_for_concatenated_sequences,
        {
            "hidden_states": ROWS,
            "attention_mask_in_length": torch.tensor([[2, 3, 0, 0, 0], [5, 0, 0, 0, 0]]),
        },
    ),
    "pad_input": (
        bert_padding.pad_input,
        {"hidden_states": PACKED, "indices": torch.arange(7), "batch": 2, "seqlen": 5},
    ),
    "index_first_axis": (
        bert_padding.index_first_axis,
        {"input": PACKED, "indices": torch.arange(4)},
    ),
    "apply_rotary_emb": (
        rotary.apply_rotary_emb,
        {"x": ROWS, **_TABLES, "interleaved": False, "inplace": False, "seqlen_offsets": 0},
    ),
    "apply_rotary_emb of packed rows": (
        rotary.apply_rotary_emb,
        {"x": PACKED, **_TABLES, "cu_seqlens": OFFSETS, "max_seqlen": 4},
    ),
    "apply_rotary_emb_qkv_": (
        rotary.apply_rotary_emb_qkv_,
        {"qkv": torch.randn(2, 5, 3, 2, 8), **_TABLES, "seqlen_offsets": 0, "num_heads_q": None},
    ),
    "apply_rotary_emb_kv_": (
        rotary.apply_rotary_emb_kv_,
        {"kv": torch.randn(2, 5, 2, 2, 8), **_TABLES, "interleaved": True},
    ),
    "apply_rotary_emb_torch": (rotary.apply_rotary_emb_torch, {"x": ROWS, **_FIVE}),
    "rotate_half": (rotary.rotate_half, {"x": ROWS, "interleaved": False}),
    "RotaryEmbedding": (
        rotary.RotaryEmbedding,
        {"dim": 8, "base": 1e4, "interleaved": False, "scale_base": None, "device": None},
    ),
    "RotaryEmbedding of q, k and v": (
        rotated,
        {"qkv": torch.randn(2, 5, 3, 2, 8), "max_seqlen": None, "num_heads_q": None},
    ),
    "RotaryEmbedding of q beside k and v": (
        rotated,
        {"qkv": ROWS.clone(), "kv": torch.randn(2, 5, 2, 2, 8), "seqlen_offset": 0},
    ),
    "rearrange": (einops_patterns.rearrange, {"tensor": ROWS, "pattern": "b s h d -> (b s) h d"}),
    "rearrange with a length": (
        einops_patterns.rearrange,
        {"tensor": ROWS, "pattern": "b s h (d two) -> two b s h d", "two": 2},
    ),
    "repeat": (
        einops_patterns.repeat,
        {"tensor": ROWS, "pattern": "b s h d -> b s (h g) d", "g": 2},
    ),
    "memory_efficient_attention_partial": (memory_efficient_attention_partial, _XFORMERS),
    "merge_attentions": (
        merge_attentions,
        {"attn_split": _PARTS, "lse_split": _SUMS, "write_lse": True, "output_dtype": None},
    ),
    "merge_attentions of stacked parts": (
        merge_attentions,
        {"attn_split": torch.stack(_PARTS), "lse_split": torch.stack(_SUMS)},
    ),
    "merge_states": (
        flashvar.merge_states,
        {"outs": _PARTS, "lses": _SUMS, "layout": "bshd", "backend": "auto"},
    ),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        {
            "k_cache": torch.randn(2, 9, 2, 8),
            "v_cache": torch.randn(2, 9, 2, 8),
            **_three("q k v", torch.randn(2, 1, 2, 8)),
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
        },
    ),
    "causal_conv1d": (
        flashvar.causal_conv1d,
        {"x": torch.randn(2, 5, 8), "weight": torch.randn(8, 3), "seq_idx": None},
    ),
    "causal_conv1d_fn": (
        causal_conv1d.causal_conv1d_fn,
        {"x": torch.randn(2, 8, 5), "weight": torch.randn(8, 3), "return_final_states": False},
    ),
    "activate": (activate, {"backend": "auto"}),
    "register": (register, {"name": "flashvar"}),
}
ARGUMENTS = [(name, argument) for name, (_, given) in CALLS.items() for argument in given]
# What flashvar does not serve is torch's own to serve or to refuse, in its words.
HANDED_ON = ("Attend", "Attend with dropout", "Attend on the CPU")


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=[" ".join(x) for x in ARGUMENTS])
def test_served_or_refused(name: str, argument: str) -> None:
    call, given = CALLS[name]
    torchs_own: tuple[type[Exception], ...] = ()
    if name in HANDED_ON and argument in "qkv":
        torchs_own = (RuntimeError, TypeError, ValueError)
    wrong = []
    odds = anything()
    tensor = isinstance(given[argument], torch.Tensor) and given[argument].is_floating_point()
    if tensor and argument not in _TABLES:  # an index of a masked tensor is its own error
        odds["masked alike"] = masked_tensor(given[argument], torch.ones_like(given[argument]) > 0)
    for what, odd in odds.items():
        if what == "None" and given[argument] is None:
            continue
        try:
            call(**{**given, argument: odd})
        except FlashvarError as error:
            beats = str(error)
            if ": " not in beats or "found" not in beats:
                wrong.append((what, beats))
        except torchs_own:
            if not isinstance(odd, torch.Tensor):
                raise
        except Exception as error:
            wrong.append((what, repr(error)))
    assert wrong == []


@pytest.mark.parametrize("name", CALLS)
def test_what_it_takes(name: str) -> None:
    call, given = CALLS[name]
    found = [x for x in tree_leaves(call(**given)) if isinstance(x, torch.Tensor)]
    without = ("Attend.why_not", "activate", "register", "RotaryEmbedding")
    assert bool(found) is (name not in without)
    assert all(bool(x.isfinite().all()) for x in found)


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k"])
def test_missing_offsets_are_named(missing: str) -> None:
    call, given = CALLS["flash_attn_varlen_func"]
    with pytest.raises(FlashvarError, match=f"need {missing}, found None"):
        call(**{**given, missing: None})


def test_what_hides_entries_is_named() -> None:
    masked = masked_tensor(ROWS, torch.ones_like(ROWS).bool())
    with pytest.raises(FlashvarError, match=r"implement flashvar.*, found MaskedTensor, Tensor"):
        flashvar.attention(masked, ROWS, ROWS)


def test_blocks_of_a_larger_batch() -> None:
    call, given = CALLS["memory_efficient_attention of blocks"]
    with pytest.raises(FlashvarError, match="batch of 1, found 1, 2, 1"):
        call(**{**given, "key": PACKED[None].expand(2, -1, -1, -1)})


@pytest.mark.parametrize(
    "lengths", [torch.tensor([3, 4]), np.array([3, 4]), (3, 4), range(3, 5)], ids=str
)
def test_lengths_of_any_kind(lengths: Any) -> None:
    assert Documents.of_lengths(lengths).cu_seqlens.tolist() == [0, 3, 7]
