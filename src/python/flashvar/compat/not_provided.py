"""The parts of other packages that a stand-in does not have, and what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final, NoReturn

from flashvar.errors import NotProvidedError

_HERE: Final = "flashvar.compat."
_ATTENTION: Final = "flash_attn.flash_attn_func, flashvar.attention"
_LINEAR: Final = "torch.nn.Linear, torch.nn.functional.gelu and .silu, under torch.compile"
_NORMS: Final = "torch.nn.LayerNorm, torch.nn.RMSNorm"
_FA2: Final = "flash_attn.flash_attn_interface, which has FlashAttention 2's functions"
_ENTROPY: Final = "torch.nn.functional.cross_entropy"

# Module -> what to use instead; a line also covers the submodules of its module.
NOT_PROVIDED: Final = {
    "flash_attn.cute": f"{_ATTENTION} (FlashAttention 4's functions return other values)",
    "flash_attn.flash_attention": _ATTENTION,
    "flash_attn.flash_attn_triton": f"{_ATTENTION} with a bias",
    "flash_attn.flash_attn_triton_amd": _ATTENTION,
    "flash_attn.flash_attn_triton_og": _ATTENTION,
    "flash_attn.flash_blocksparse_attention": "torch.nn.attention.flex_attention",
    "flash_attn.flash_blocksparse_attn_interface": "torch.nn.attention.flex_attention",
    "flash_attn.layers.patch_embed": "torch.nn.Conv2d",
    "flash_attn.losses": _ENTROPY,
    "flash_attn.models": 'models of transformers with attn_implementation="flashvar"',
    "flash_attn.modules": f"a module of your own around {_ATTENTION}",
    "flash_attn.ops.activations": "torch.nn.functional.gelu and .silu, under torch.compile",
    "flash_attn.ops.fused_dense": _LINEAR,
    "flash_attn.ops.layer_norm": "torch.nn.LayerNorm",
    "flash_attn.ops.rms_norm": "torch.nn.RMSNorm",
    "flash_attn.ops.triton.cross_entropy": _ENTROPY,
    "flash_attn.ops.triton.k_activations": _LINEAR,
    "flash_attn.ops.triton.layer_norm": _NORMS,
    "flash_attn.ops.triton.linear": _LINEAR,
    "flash_attn.ops.triton.mlp": _LINEAR,
    "flash_attn.utils.benchmark": "torch.utils.benchmark",
    "flash_attn.utils.generation": "generate() of transformers",
    "flash_attn.utils.library": "torch.library.triton_op",
    "flash_attn.utils.pretrained": "from_pretrained() of transformers",
    "flash_attn.utils.testing": "a reference of your own in float64",
    "flash_attn.utils.torch": "torch.amp.custom_fwd and custom_bwd",
    "flash_attn_2_cuda": "_flash_attn_forward and the like of flash_attn.flash_attn_interface",
    "flash_attn_3": _FA2,
    "flash_attn_interface": _FA2,
}
# Name in a module that the replacement has -> what to use instead.
NAMES_NOT_PROVIDED: Final = {
    "flash_attn.bert_padding.IndexFirstAxis": "index_first_axis",
    "flash_attn.bert_padding.IndexFirstAxisResidual": "index_first_axis_residual",
    "flash_attn.bert_padding.IndexPutFirstAxis": "index_put_first_axis",
    "flash_attn.flash_attn_interface.FlashAttnFunc": "flash_attn_func",
    "flash_attn.flash_attn_interface.FlashAttnKVPackedFunc": "flash_attn_kvpacked_func",
    "flash_attn.flash_attn_interface.FlashAttnQKVPackedFunc": "flash_attn_qkvpacked_func",
    "flash_attn.flash_attn_interface.FlashAttnVarlenFunc": "flash_attn_varlen_func",
    "flash_attn.flash_attn_interface.FlashAttnVarlenKVPackedFunc": (
        "flash_attn_varlen_kvpacked_func"
    ),
    "flash_attn.flash_attn_interface.FlashAttnVarlenQKVPackedFunc": (
        "flash_attn_varlen_qkvpacked_func"
    ),
    "flash_attn.flash_attn_interface.flash_attn_gpu": "_flash_attn_forward and the like",
    "flash_attn.flash_attn_interface.flash_attn_unpadded_func": "flash_attn_varlen_func",
    "flash_attn.flash_attn_interface.flash_attn_unpadded_kvpacked_func": (
        "flash_attn_varlen_kvpacked_func"
    ),
    "flash_attn.flash_attn_interface.flash_attn_unpadded_qkvpacked_func": (
        "flash_attn_varlen_qkvpacked_func"
    ),
    "flash_attn.utils.distributed.allreduce_sequence_parallel_grad": "all_reduce",
    "flash_attn.utils.distributed.get_dim_for_local_rank": "torch.tensor_split",
    "flash_attn.utils.distributed.sync_shared_params": "torch.distributed.broadcast",
}


class MissingModuleFinder:
    """A module finder that finds nothing; importing a module of the table is a NotProvidedError.

    Args:
        package: The package that is stood in for, of which every module is refused.
        table: Module -> what to use instead; a line also covers its submodules.
        otherwise: What to use instead of modules of the package that are not in the table.
    """

    def __init__(self, package: str, table: Mapping[str, str], otherwise: str) -> None:
        self._package = package
        self._table = table
        self._otherwise = otherwise

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """None for `importlib.util.find_spec`; NotProvidedError for an import.

        Packages call `importlib.util.find_spec` to find out what is installed, which must not be an
        error. An import raises this instead of "No module named".
        """
        del path, target
        statement = _import_functions(sys._getframe(1))
        if "_find_and_load_unlocked" not in statement:
            return
        # What `from flash_attn import modules` looks for, as our package has its own name.
        name = name.removeprefix(_HERE)
        instead = self._replacement(name)
        if instead is not None:
            error = _refused(self._package, name, instead)
            if "_handle_fromlist" in statement:
                # The name that such errors have. importlib drops an error of the name it looks for.
                error.name = name.rpartition(".")[0]
            raise error

    def _replacement(self, name: str) -> str | None:
        parent = name
        while parent:
            if parent in self._table:
                return self._table[parent]
            parent = parent.rpartition(".")[0]
        return self._otherwise if name.startswith(f"{self._package}.") else None


def refuse_name(module: str, name: str) -> NoReturn:
    """Raise the error for a missing name of a module; called by the module's `__getattr__`."""
    full = f"{module.removeprefix(_HERE)}.{name}"
    if full in NAMES_NOT_PROVIDED:
        raise _refused("flash_attn", full, NAMES_NOT_PROVIDED[full])
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _refused(package: str, name: str, instead: str) -> NotProvidedError:
    return NotProvidedError(
        f"{name} is not in flashvar's stand-in for {package}: use {instead}",
        name=name,
    )


def _import_functions(frame: Any) -> frozenset[str]:
    """The functions of importlib that called the finder; other ones ask for a spec alone."""
    found = set()
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return frozenset(found)
