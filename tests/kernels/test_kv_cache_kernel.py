"""The Triton kernel that writes into a KV cache without a GPU: interpreted, and compiled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_kv_cache import CASES, COPIES, Case
from interpreter import interpreted
from test_triton_compile import stack_bytes

from flashvar.errors import LayoutError
from flashvar.flash_attn import flash_attn_with_kvcache
from flashvar.ops.attention import append, kv_cache
from flashvar.ops.attention.cache import Cache
from flashvar.ops.plans import Plans

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process."""
    script = str(Path(__file__).with_name("interpreted_kv_cache.py"))
    answers: dict[str, str] = json.loads(interpreted(python, "-W", "ignore", script))
    return answers


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[:80])
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


def compiled(
    capability: int, cache: Cache, new: torch.Tensor | None, before: torch.Tensor, **given: Any
) -> Any:
    """The kernel that a launch on such a device would start."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashvar.backends.triton.attention import append as module
    from flashvar.backends.triton.attention.append_kernel import append_kernel as kernel

    asked: dict[str, Any] = {}

    class Asked:
        def __init__(self, _: Any, __: Any, arguments: dict[str, Any]) -> None:
            asked.update(arguments)

        def __call__(self, *tensors: torch.Tensor | None) -> None:
            asked.update(zip(kernel.arg_names, tensors, strict=False))

    of_call = (cache, new, new, before, given.get("begins"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RepeatedLaunch", Asked)
        patch.setattr(module, "_launches", Plans())
        module.prepared(*of_call)(*of_call)
    names = {torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32"}
    signature, constants, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = asked[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{names[value.dtype]}"
            aligned[index,] = [["tt.divisibility", 16]]
        elif value is None or name.isupper() or (value == 1 and "_" in name):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32"
            if "_" in name and value % 16 == 0:
                aligned[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={name: asked[name] for name in ("num_warps", "enable_fp_fusion")},
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", ["in order", "slots", "pages", "no new keys"])
def test_compiles_to_wide_moves_and_spills_nothing(
    layout: str, capability: int, tmp_path: Path
) -> None:
    cache = Cache(*torch.empty(2, 16, 64, 8, 128, dtype=torch.bfloat16))
    before = torch.zeros(4, dtype=torch.int32)
    given: dict[str, Any] = {}
    new: torch.Tensor | None = torch.empty(4, 1, 8, 128, dtype=torch.bfloat16)
    if layout == "slots":
        cache = cache._replace(slots=before.long())
        given["begins"] = before
    elif layout != "in order":
        cache = cache._replace(table=torch.zeros(4, 32, dtype=torch.int32))
    if layout == "no new keys":
        new = None
    kernel = compiled(capability, cache, new, before, **given)
    assert stack_bytes(kernel, tmp_path) == 0
    moved = re.findall(r"((?:ld|st)\.global\S*v4\S*)", kernel.asm["ptx"])
    assert {one[:2] for one in moved} >= (set() if new is None else {"ld", "st"})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Cache]:
    """As on a device, with torch's functions in place of the kernel; lists its launches."""
    from flashvar.backends.triton.attention.append import AppendLaunch

    found: list[Cache] = []

    def launch(_: AppendLaunch, cache: Cache, *given: Any) -> torch.Tensor:
        found.append(cache)
        # Torch does not count what the kernel writes.
        return append.formula(cache._replace(k=cache.k.data, v=cache.v.data), *given)

    # New keys are written by the kernel; copies are made by torch's functions.
    monkeypatch.setattr(Cache, "takes_triton", lambda self, *others: len(others) == 4)
    monkeypatch.setattr(AppendLaunch, "__call__", launch)
    monkeypatch.setattr(kv_cache, "_plans", Plans())
    return found


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["in order", "slots"])
def test_plain_tensors_take_the_kernel(kind: str, launches: list[Cache]) -> None:
    caches, q = (made(3, 8, 2, 16), made(3, 8, 2, 16)), made(3, 1, 2, 16)
    options = {"cache_seqlens": torch.tensor([3, -1, 0])}
    if kind == "slots":
        options["cache_batch_idx"] = torch.tensor([1, -1, 0])
    versions = [one._version for one in caches]
    flash_attn_with_kvcache(q, *caches, q, q, **options)
    assert len(launches) == 1
    assert [one._version > before for one, before in zip(caches, versions, strict=True)] == [
        True
    ] * 2
    flash_attn_with_kvcache(q, *caches, **options)
    assert len(launches) == (1 if kind == "in order" else 2)


def test_no_new_keys_are_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashvar.backends.triton.attention.append import AppendLaunch

    caches, q, none = (made(3, 8, 2, 16), made(3, 8, 2, 16)), made(3, 1, 2, 16), made(3, 0, 2, 16)
    lengths, slots = torch.tensor([3, 7, 1]), torch.tensor([1, 2, 0])
    seen: list[object] = []

    def launch(_: AppendLaunch, cache: Cache, k: object, v: object, *given: Any) -> torch.Tensor:
        seen.extend((k, v))
        return append.formula(cache, None, None, *given)

    monkeypatch.setattr(Cache, "takes_triton", lambda self, *others: len(others) == 4)
    monkeypatch.setattr(AppendLaunch, "__call__", launch)
    monkeypatch.setattr(kv_cache, "_plans", Plans())
    for _ in range(2):
        flash_attn_with_kvcache(
            q, *caches, none, none, cache_seqlens=lengths, cache_batch_idx=slots
        )
    assert seen == [None] * 4


@pytest.mark.parametrize("written", [0, 1], ids=["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_the_kernel_reads_no_memory_that_it_writes(
    name: str, written: int, monkeypatch: pytest.MonkeyPatch, launches: list[Cache]
) -> None:
    from flashvar.backends.triton.attention.append import AppendLaunch

    caches, new = (made(3, 8, 2, 16), made(3, 8, 2, 16)), made(3, 1, 2, 16)
    given = {"k": new, "v": new, name: caches[written][:, 5:6]}
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        AppendLaunch, "__call__", lambda self, cache, k, v, *rest: seen.extend((k, v))
    )
    append.append(Cache(*caches), given["k"], given["v"], torch.zeros(3), None)
    memory = {one.untyped_storage().data_ptr() for one in caches}
    assert not memory & {one.untyped_storage().data_ptr() for one in seen}
    for one, wanted in zip(seen, (given["k"], given["v"]), strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("heads_first", [False, True])
def test_new_keys_that_are_rows_of_the_cache(heads_first: bool, found: dict[str, str]) -> None:
    assert found[f"rows of the cache {heads_first}"] == ""


def test_a_repeated_call_has_its_addresses_checked(
    monkeypatch: pytest.MonkeyPatch, launches: list[Cache]
) -> None:
    """A plan holds sizes and strides; where the tensors are may differ at each call."""
    from flashvar.backends.triton.attention.append import AppendLaunch

    rows, q, lengths = made(9, 8, 2, 16), made(3, 1, 2, 16), torch.tensor([1, 7, 0])
    plans: list[object] = []
    make, launch = kv_cache._make_plan, AppendLaunch.__call__
    monkeypatch.setattr(kv_cache, "_make_plan", lambda given: plans.append(0) or make(given))
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        AppendLaunch, "__call__", lambda *given: seen.extend(given[2:4]) or launch(*given)
    )

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor) -> None:
        flash_attn_with_kvcache(q, k_cache, v_cache, k, q, cache_seqlens=lengths)

    new = made(3, 1, 2, 16)
    call(rows[:3], rows[3:6], new)
    call(rows[6:], rows[3:6], new)
    assert [x.data_ptr() for x in seen] == [new.data_ptr(), q.data_ptr()] * 2
    # New keys in rows of the cache: those of one sequence may be overwritten by another.
    of_cache = rows.flatten()[: new.numel()].view_as(new)
    call(rows[:3], rows[3:6], of_cache)
    assert not rows.data_ptr() <= seen[-2].data_ptr() < rows.data_ptr() + rows.nbytes
    with pytest.raises(LayoutError, match="same addresses"):
        call(rows[:3], rows[2:5], new)
    assert len(plans) == 1
    assert len(launches) == 3


def test_what_the_kernel_does_not_take() -> None:
    x = torch.empty(2)
    assert not Cache(x, x).takes_triton()

    class OnDevice:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")

    assert not Cache(OnDevice(), x).takes_triton()  # type: ignore[arg-type]


@pytest.mark.parametrize("copy", COPIES, ids=lambda copy: copy[0])
def test_copies(copy: tuple[str, dict[str, Any]], found: dict[str, str]) -> None:
    assert found[f"copy {copy[0]}"] == ""


def test_copies_of_what_is_missing_are_nan(found: dict[str, str]) -> None:
    assert found["missing"] == ""
