"""The op of compiled graphs for a KV cache that is not in order, and which calls Triton takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashvar.errors import BackendUnavailableError, DtypeError, InvalidInputError, ShapeError
from flashvar.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flashvar.ops.attention import choice, paged
from flashvar.ops.attention.problem import Options
from flashvar.ops.attention.torch_library import attention_paged
from flashvar.ops.plans import Plans


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(kind: str, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Those of the op, for two sequences."""
    torch.manual_seed(0)
    places = (6, 4, 2) if kind == "pages" else (3, 12, 2)
    k, v = (torch.randn(*places, dim).to(dtype) for dim in (16, 8))
    slots, table = ints(2, 0), None
    if kind == "pages":
        slots, table = None, ints([5, 0, 2], [1, 4, 3])
    begins = ints(3, 0) if kind == "slots after padding" else None
    ends = ints(9, 12)
    lengths = ends if begins is None else ends - begins
    slopes = torch.rand(4) if kind == "pages" else None
    q = torch.randn(2, 3, 4, 16).to(dtype)
    options = True, None, 5, -1, 2.0, None, None
    return [q, k, v, slots, table, ends, begins, slopes, None, 0, lengths, *options]


KINDS = ("pages", "slots", "slots after padding")


@pytest.mark.parametrize("kind", KINDS)
def test_the_op_computes_what_the_function_does(kind: str) -> None:
    given = arguments(kind)
    q, k, v, slots, table, ends, begins, slopes = given[:8]
    out, lse = attention_paged(*given)
    wanted, of_sums = flash_attn_with_kvcache(
        *(q, k, v),
        cache_seqlens=ends,
        cache_batch_idx=slots,
        cache_leftpad=begins,
        block_table=table,
        causal=True,
        window_size=(5, -1),
        softcap=2.0,
        alibi_slopes=slopes,
        return_softmax_lse=True,
    )
    assert torch.equal(out, wanted)
    assert torch.equal(lse, of_sums)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(attention_paged, tuple(arguments(kind, torch.float32)), test_utils=tests)


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (0, torch.zeros(2, 3, 5, 16), ShapeError),  # 5 heads of q on 2 of k
        (0, torch.zeros(2, 3, 4, 24), ShapeError),
        (0, torch.zeros(2, 3, 4, 16).half(), DtypeError),
    ],
)
def test_a_traced_call_is_checked(index: int, value: torch.Tensor, error: type[Exception]) -> None:
    given = arguments("pages", torch.float32)
    given[index] = value
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(error),
    ):
        attention_paged(*[mode.from_tensor(x) if torch.is_tensor(x) else x for x in given])


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("layout", ["gaps", "transposed"])
def test_a_cache_whose_rows_are_not_contiguous_is_copied(
    index: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments("pages", torch.float32)
    wanted = attention_paged(*given)
    if layout == "gaps":
        given[index] = torch.stack((given[index], given[index]), -1)[..., 0]
    else:
        given[index] = given[index].mT.contiguous().mT
    monkeypatch.setattr(paged, "_takes_triton", lambda q, problem: True)
    assert paged._make(paged.Paged(*given[:10]), Options()) is None
    for found, one in zip(attention_paged(*given), wanted, strict=True):
        assert torch.equal(found, one)
    torch.library.opcheck(attention_paged, tuple(given), test_utils="test_faketensor")


@pytest.mark.parametrize("columns", [0, 3])
def test_a_cache_without_pages(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments("pages", torch.float32)
    given[1], given[2] = given[1][:0], given[2][:0]
    given[4], given[5], given[10] = given[4][:, :columns], given[5] * 0, given[10] * 0
    monkeypatch.setattr(paged, "_takes_triton", lambda q, problem: True)
    assert paged._make(paged.Paged(*given[:10]), Options()) is None
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if torch.is_tensor(x) else x for x in given]
        out, _ = attention_paged(*fakes)
    assert out.shape == (2, 3, 4, 8)


def test_a_copy_has_max_seqlen_k_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, read = [], paged.Cache.read

    def recorded(cache: paged.Cache, *given: Any) -> Any:
        rooms.append(given[-1])
        return read(cache, *given)

    monkeypatch.setattr(paged.Cache, "read", recorded)
    given = arguments("pages")
    given[5], given[10] = given[5] - 4, given[10] - 4
    for longest in (None, 9, 100):
        attention_paged(*given[:-1], longest)
    assert rooms == [12, 9, 12]


@pytest.mark.parametrize("cut", [0, 3])
def test_head_dims_that_are_no_multiple_of_8_are_copied(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(paged, "_takes_triton", lambda q, problem: asked.append(problem))
    given = arguments("pages", torch.float32)
    given[:3] = (x[..., : x.shape[-1] - cut] for x in given[:3])
    assert paged._make(paged.Paged(*given[:10]), Options()) is None
    assert len(asked) == (cut == 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[paged.Paged]:
    """The calls for which a launch was made, as on a GPU; all of them then copy their keys."""
    calls: list[paged.Paged] = []
    monkeypatch.setattr(paged, "may_be_in_place", lambda q: True)
    monkeypatch.setattr("flashvar.ops.attention.kv_cache.may_be_in_place", lambda q: True)
    monkeypatch.setattr(paged, "_launches", Plans())
    monkeypatch.setattr(paged, "_make", lambda call, options: calls.append(call))
    return calls


def packed(
    seqlen_k: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Three packed queries of one sequence on pages."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(sizes) for sizes in ((3, 4, 16), (6, 4, 2, 16), (6, 4, 2, 8)))
    offsets = ints(0, 3), ints(0, seqlen_k)
    return flash_attn_varlen_func(
        *(q.to(dtype), k, v, *offsets, 3, seqlen_k),
        block_table=ints([5, 0, 2]),
        return_attn_probs=True,
        **options,
    )


def test_launches_are_made_once_where_many_calls_alternate(made: list[paged.Paged]) -> None:
    for _ in range(2):
        for queries in range(1, 8):
            given = arguments("pages")
            call = paged.Paged(*given[:10])._replace(q=given[0][:, :1].expand(-1, queries, -1, -1))
            for _ in range(2):
                paged.launch_of(call, Options())
    assert len(made) == 7


def test_a_launch_serves_all_lengths(made: list[paged.Paged]) -> None:
    for seqlen_k in range(3, 9):
        packed(seqlen_k)
    assert len(made) == 1


def test_packed_queries_in_the_dtype_of_autocast(made: list[paged.Paged]) -> None:
    """Pages in another dtype are cast, which needs a copy."""
    with torch.autocast("cpu", torch.bfloat16):
        out = packed(5, torch.bfloat16)[0]
    assert out.dtype == torch.bfloat16
    assert not made


@pytest.mark.parametrize(
    ("strict", "longest", "takes"), [("0", 2, True), ("1", 2, False), ("0", 0, False)]
)
def test_packed_queries_whose_offsets_must_be_read(
    strict: str, longest: int, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies check offsets if that is asked for, and compute queries beyond a bound of 0."""
    q, k, v, _, table, ends = arguments("pages", torch.float32)[:6]
    call = paged.Paged(q[0], k, v, None, table, ends, None, None, ints(0, 2, 3), 0)
    asked: list[object] = []
    monkeypatch.setattr(paged, "_takes_triton", lambda q, problem: asked.append(problem))
    monkeypatch.setenv("FLASHVAR_STRICT", strict)
    assert paged._make(call, Options(max_seqlen_q=longest)) is None
    assert bool(asked) == takes


@pytest.mark.parametrize(("queries", "takes"), [(256, True), (257, False)])
def test_many_queries_are_copied(
    queries: int, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(paged, "_takes_triton", lambda q, problem: asked.append(problem))
    given = arguments("pages", torch.float32)
    monkeypatch.setattr(paged, "MOST_ROWS", 512)
    q = given[0][:, :1].expand(-1, queries, -1, -1)
    assert paged._make(paged.Paged(q, *given[1:10]), Options()) is None
    assert bool(asked) == takes


def test_tensors_on_two_devices_are_copied() -> None:
    given = arguments("pages", torch.float32)
    given[7] = given[7].to("meta")
    assert paged._make(paged.Paged(*given[:10]), Options()) is None


def test_a_launch_depends_on_how_many_keys_are_new(made: list[paged.Paged]) -> None:
    call = paged.Paged(*arguments("pages")[:10])
    for new in (0, 3):
        paged.launch_of(call._replace(new=new), Options())
    assert len(made) == 2


def test_a_negated_view_is_copied(made: list[paged.Paged]) -> None:
    call = paged.Paged(*arguments("pages")[:10])
    assert paged.launch_of(call._replace(q=torch._neg_view(call.q)), Options()) is None
    assert not made


@pytest.mark.parametrize("option", ["causal", "softmax_scale", "softcap"])
def test_a_launch_depends_on_the_options(option: str, made: list[paged.Paged]) -> None:
    packed(5)
    packed(5, **{option: 0.5})
    assert len(made) == 2


@pytest.mark.parametrize("softcap", [[1.0], True])
def test_invalid_options_are_refused_after_valid_ones(
    softcap: Any, made: list[paged.Paged]
) -> None:
    packed(5, softcap=1.0)
    with pytest.raises(InvalidInputError, match="softcap must be"):
        packed(5, softcap=softcap)


def test_tensors_on_the_cpu_are_copied() -> None:
    call = paged.Paged(*arguments("pages")[:10])
    assert paged.launch_of(call, Options()) is None


@pytest.mark.parametrize(
    ("backend", "explicit", "has_triton", "takes"),
    [
        ("triton", False, True, True),
        ("triton", True, True, True),
        ("cuda", False, True, True),
        ("cuda", False, False, False),
        ("cuda", True, True, False),  # the user has named it
        ("reference", False, True, False),
        ("reference", True, True, False),
    ],
)
def test_triton_runs_a_call_unless_another_backend_is_named(
    backend: str, explicit: bool, has_triton: bool, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(function: str, x: torch.Tensor, asked: str, problem: object) -> Any:
        if asked == "auto":
            return SimpleNamespace(backend=backend, explicit=explicit), None
        assert asked == "triton"
        if not has_triton:
            raise BackendUnavailableError("triton is not there")
        return SimpleNamespace(backend=asked, explicit=True), None

    for module in (paged, choice):
        monkeypatch.setattr(module, "choose_backend", choose)
    assert paged._takes_triton(torch.empty(0), None) == takes  # type: ignore[arg-type]
    # It excludes Triton from calls that name no backend.
    monkeypatch.setenv("FLASHVAR_FORCE_ARCH", "sm_89")
    forced = takes and backend == "triton"
    assert paged._takes_triton(torch.empty(0), None) == forced  # type: ignore[arg-type]
