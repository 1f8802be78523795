"""The benchmark of attention, rehearsed on the CPU: contenders that run, and why others do not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from math import isnan
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pooled_work
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashvar.ops.attention import plan as attention_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module, with tensors on the CPU and a clock that says 1, 2, ... ms."""
    attention, contender = (
        import_module(f"benchmarks.{name}") for name in ("attention", "contender")
    )
    timing = import_module("benchmarks.timing")

    def measure(calls: dict[str, Callable[[], object]], *, seconds: float) -> Any:
        for call in calls.values():
            call()
        timings = {name: timing.Timing(i + 1.0, 1, 2, 7) for i, name in enumerate(calls)}
        return timing.Measurement(timings, {"sm_mhz": 1980.0})

    inputs = contender.inputs
    monkeypatch.setattr(attention, "inputs", lambda cell, _: inputs(cell, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(attention, "measure", measure)
    return attention


def cell(**changes: Any) -> Any:
    common = {"name": "small", "direction": "forward", "dtype": "bf16", "batch": 2, "seqlen": 16}
    sizes = {"heads": 4, "heads_kv": 2, "head_dim": 16, "causal": True}
    return import_module("benchmarks.cases").Cell(**{**common, **sizes, **changes})


def test_a_whole_run(on_cpu: ModuleType) -> None:
    contenders = (
        *("sdpa-flash", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer"),
        *("xformers", "sageattention", "flashvar-reference"),
    )
    cells = [cell(name=f"small-{d}", direction=d) for d in ("forward", "backward")]
    options = import_module("benchmarks.report").Options(contenders=contenders)
    report = on_cpu.report(cells, options)
    rows = {(row["cell"], row["contender"]): row for row in report.rows}
    assert len(rows) == 16
    for direction in ("forward", "backward"):
        ours = rows[f"small-{direction}", "flashvar-reference"]
        assert ours["median_ms"] == 2.0
        assert ours["to_reference"] == ours["to_best"] == 0.5
        assert 0 < ours["difference_to_reference"] < 0.02
        assert ours["sm_mhz"] == 1980.0
        assert rows[f"small-{direction}", "flash-attn-4"]["skipped"] == (
            "ImportError: flash-attn-4 is not installed"
        )
    assert rows["small-forward", "flash-attn-3"]["skipped"] == "ImportError: vllm is not installed"
    for contender in ("flash-attn-3", "flashinfer", "xformers", "sageattention"):
        assert "no backward" in rows["small-backward", contender]["skipped"]
    # Who never ran has a note in the place of a column.
    assert report.columns[1:3] == ("sdpa-flash", "flashvar-reference")
    assert len(report.notes()) == 10


def test_a_matrix_product_is_timed_beside(
    on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cpu, "_product", lambda: lambda: ())
    options = import_module("benchmarks.report").Options(contenders=("flashvar-reference",))
    (row,) = on_cpu.report([cell(product=True)], options).rows
    # The clock says 2 ms for it, which is the second.
    assert row["product_tflops"] == pytest.approx(2 * 8192**3 / 2e9)
    assert row["median_ms"] == 1.0


def test_shapes_are_compared_with_plain_calls(
    on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = import_module("benchmarks.shapes")
    monkeypatch.setattr(shapes, "measure", on_cpu.measure)
    packed = cell(lengths=(16, 8), heads_kv=4)
    pair = {"packed": packed, "padded": cell(heads_kv=4)}
    monkeypatch.setattr(shapes.cases, "shapes", lambda: [("documents", pair)])
    options = import_module("benchmarks.report").Options(
        contenders=("flashvar-reference", "sdpa-efficient")
    )
    report = shapes.run(options)
    ours, padded, theirs, _ = report.rows
    assert (ours["shape"], padded["shape"]) == ("packed", "padded")
    # The clock says 1 ms and 2 ms; the packed call has 256 + 64 of 512 pairs to compute.
    assert ours["faster"] == 2.0
    assert ours["to_plain"] == pytest.approx(2 * (256 + 64) / 512)
    assert "FlashAttention-2 alone" in theirs["skipped"]
    assert report.lines == [("documents", "1.250 (2.00x)", "-")]


@pytest.mark.parametrize("kind", ["softcap", "alibi", "dropout", "bias", "deterministic"])
def test_a_feature_is_timed_by_those_who_have_it(
    kind: str, on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = import_module("benchmarks.shapes")
    monkeypatch.setattr(shapes, "measure", on_cpu.measure)
    pair = {kind: cell(feature=kind, direction="backward"), "without": cell(direction="backward")}
    monkeypatch.setattr(shapes.cases, "shapes", lambda: [(kind, pair)])
    options = import_module("benchmarks.report").Options(
        contenders=("flashvar-reference", "sdpa-efficient")
    )
    special, plain, theirs, _ = shapes.run(options).rows
    assert special["shape"] == kind
    assert special["to_plain"] == pytest.approx(plain["median_ms"] / special["median_ms"])
    assert theirs["skipped"] == f"ValueError: is not timed with {kind}"


def test_two_binaries_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = import_module("benchmarks.contenders")
    one, other = (
        contenders.named([f"flashvar-sm{xy}"])[f"flashvar-sm{xy}"].around for xy in (12, 34)
    )
    monkeypatch.delenv("FLASHVAR_FORCE_ARCH", raising=False)
    theirs = attention_plan._plans
    with one():
        assert os.environ["FLASHVAR_FORCE_ARCH"] == "sm_12"
        kept: dict[Any, Any] = attention_plan._plans
        kept["a"] = "decided for one"
    with other():
        assert os.environ["FLASHVAR_FORCE_ARCH"] == "sm_34"
        assert not attention_plan._plans
    with pytest.raises(ZeroDivisionError), other():
        1 / 0  # noqa: B018
    assert attention_plan._plans is theirs
    assert "FLASHVAR_FORCE_ARCH" not in os.environ
    with one():
        assert attention_plan._plans is kept


def test_an_unknown_contender_is_refused() -> None:
    contenders = import_module("benchmarks.contenders")
    error = import_module("benchmarks.report").BenchmarkError
    for name in ("flash", "flashvar-smXY", "flashvar-cpu"):
        with pytest.raises(error, match=name):
            contenders.named([name])


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """An installed distribution of this module."""
    module = ModuleType(name)
    vars(module).update(functions)
    for parent in [name.rpartition(".")[0] or name, name]:
        monkeypatch.setitem(sys.modules, parent, module)
    monkeypatch.setattr(import_module("benchmarks.peers"), "version", lambda name: "1.0")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    views = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(*views, is_causal=causal, enable_gqa=True).transpose(1, 2)


class Prefill:
    """FlashInfer's, as far as the benchmark uses it."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, queries: torch.Tensor, keys: torch.Tensor, *sizes: int, **options: Any) -> None:
        assert sizes == (4, 2, 16)
        assert options["q_data_type"] is torch.bfloat16
        self.offsets, self.causal = queries.tolist(), options["causal"]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert self.offsets == [0, 16, 32]
        q, k, v = (x.view(2, 16, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, self.causal).reshape(32, 4, 16)


@pytest.mark.parametrize(
    ("contender", "module", "functions"),
    [
        ("flash-attn", "flash_attn", {"flash_attn_func": attend}),
        (
            "flash-attn-4",
            "flash_attn.cute",
            {"flash_attn_func": lambda q, k, v, causal: (attend(q, k, v, causal), None)},
        ),
        ("flashinfer", "flashinfer", {"BatchPrefillWithRaggedKVCacheWrapper": Prefill}),
    ],
    ids=["flash-attn", "flash-attn-4", "flashinfer"],
)
def test_a_peer_that_is_installed_runs(
    contender: str,
    module: str,
    functions: dict[str, object],
    on_cpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, module, **functions)
    options = import_module("benchmarks.report").Options(contenders=("sdpa-flash", contender))
    rows = on_cpu.report([cell()], options).rows
    assert rows[1].get("skipped") is None
    assert rows[1]["difference_to_reference"] < 0.02


class Masked:
    """xformers' masks, as far as the benchmark uses them."""

    def __init__(self, lengths: tuple[int, ...] = (), causal: bool = True) -> None:
        self.lengths, self.causal = lengths, causal

    @classmethod
    def from_seqlens(cls, lengths: tuple[int, ...], *, device: torch.device) -> Masked:
        return cls(lengths, causal=False)

    def make_causal(self) -> Masked:
        return Masked(self.lengths)


def memory_efficient_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_bias: Masked | None
) -> torch.Tensor:
    if q.dim() == 5:  # grouped heads, as xformers wants them: the same shape, and copies of k and v
        assert q.shape[2:] == k.shape[2:] == v.shape[2:]
        assert k.stride(3) == v.stride(3) == 0
        given = (one.flatten(2, 3) for one in (q, k, v))
        return memory_efficient_attention(*given, attn_bias=attn_bias).view(q.shape)
    mask = attn_bias or Masked(causal=False)
    lengths = list(mask.lengths) or [q.shape[1]]
    parts = zip(*(one.split(lengths, 1) for one in (q, k, v)), strict=True)
    return torch.cat([attend(*part, mask.causal) for part in parts], 1)


XFORMERS = {
    "memory_efficient_attention": memory_efficient_attention,
    "LowerTriangularMask": Masked,
    "fmha": SimpleNamespace(BlockDiagonalMask=Masked),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"causal": True, "heads": 6},
        {"causal": True, "heads_kv": 4, "direction": "backward"},
        {"causal": False, "lengths": (16, 8)},
        {"causal": True, "lengths": (16, 8)},
        {"causal": True, "lengths": (16, 8), "heads_kv": 4, "direction": "backward"},
    ],
    ids=["full", "causal", "backward", "packed", "packed-causal", "packed-backward"],
)
def test_xformers_gets_what_it_documents(
    changes: dict[str, Any], on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "xformers.ops", **XFORMERS)
    contenders = ("flashvar-reference", "xformers")
    options = import_module("benchmarks.report").Options(contenders=contenders)
    _, theirs = on_cpu.report([cell(**changes)], options).rows
    assert theirs.get("skipped") is None
    assert theirs["difference_to_reference"] < 0.02


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, from which xformers and flash_attn are imported, and then forgotten."""
    tops = ("xformers", "flash_attn")
    for name in [name for name in sys.modules if name.split(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in tops]:
        del sys.modules[name]


@pytest.mark.parametrize("held", [False, True], ids=["found", "loaded"])
def test_xformers_does_not_see_the_flash_attn_of_others(
    held: bool, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 alone brings a flash_attn, which xformers would take for flash-attn."""
    (packages / "flash_attn" / "cute").mkdir(parents=True)
    (packages / "flash_attn" / "cute" / "__init__.py").touch()
    (packages / "xformers").mkdir()
    (packages / "xformers" / "__init__.py").touch()
    asks = "from importlib.util import find_spec\nsees = find_spec('flash_attn') is not None\n"
    (packages / "xformers" / "ops.py").write_text(f"{asks}LowerTriangularMask = list\n")
    before = import_module("flash_attn") if held else None
    peers = import_module("benchmarks.peers")
    installed = {"xformers"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(peers, "version", version)
    peers.xformers(cell(), torch.device("cpu"))
    assert not sys.modules["xformers.ops"].sees
    assert sys.modules.get("flash_attn") is before
    assert import_module("flash_attn.cute")
    # flash-attn itself is what xformers is to find.
    installed.add("flash-attn")
    del sys.modules["xformers.ops"]
    peers.xformers(cell(), torch.device("cpu"))
    assert sys.modules["xformers.ops"].sees


def rounded(x: torch.Tensor) -> torch.Tensor:
    return (x * 8).round() / 8


def sageattn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tensor_layout: str, is_causal: bool
) -> torch.Tensor:
    """Approximate, and it writes to k, as SageAttention does."""
    assert tensor_layout == "NHD"
    out = attend(rounded(q), rounded(k), v, is_causal)
    k.mul_(-1)
    return out


def sageattn_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: Any, is_causal: bool
) -> torch.Tensor:
    offsets, offsets_k, *longest = sizes
    assert (offsets.tolist(), longest) == (offsets_k.tolist(), [16, 16])
    lengths = offsets.diff().tolist()
    parts = zip(*(one.unsqueeze(0).split(lengths, 1) for one in (q, k, v)), strict=True)
    out = torch.cat([attend(*part, is_causal)[0] for part in parts])
    k.mul_(-1)
    return out


@pytest.fixture
def _sageattention(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"sageattn": sageattn, "sageattn_varlen": sageattn_varlen}
    stand_in(monkeypatch, "sageattention", **functions)


@pytest.mark.usefixtures("_sageattention")
def test_who_is_approximate_is_marked_and_no_best_peer(on_cpu: ModuleType) -> None:
    # The clock says 1 ms for the first, 2 ms for the second.
    contenders = ("sageattention", "sdpa-flash", "flashvar-reference")
    options = import_module("benchmarks.report").Options(contenders=contenders)
    report = on_cpu.report([cell()], options)
    theirs, reference, ours = report.rows
    assert (theirs["approximate"], theirs["to_best"]) == (True, 2.0)
    assert 0.01 < theirs["difference_to_reference"] < 0.2
    assert reference["difference_to_reference"] == 0.0
    assert ours["to_best"] == pytest.approx(2 / 3)
    assert "approximate" not in {*reference, *ours}
    # What it wrote to its k, no other has read.
    assert ours["difference_to_reference"] < 0.01
    assert report.columns[1] == "sageattention (approximate)"
    tables = report.last_tables().splitlines()
    assert len([line for line in tables if "sageattention (approximate)" in line]) == 2
    assert tables[-1].split() == [
        *("sageattention", "(approximate)"),
        *(f"{theirs['difference_to_reference']:.4f}",) * 2,
        "1",
    ]


@pytest.mark.usefixtures("_sageattention")
def test_who_is_approximate_is_no_reference(on_cpu: ModuleType) -> None:
    options = import_module("benchmarks.report").Options(contenders=("sageattention",))
    (row,) = on_cpu.report([cell()], options).rows
    assert isnan(row["difference_to_reference"])
    assert "to_best" not in row


@pytest.mark.usefixtures("_sageattention")
@pytest.mark.parametrize("lengths", [(), (16, 8)], ids=["dense", "packed"])
def test_sageattention_writes_to_one_copy_of_k(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_call = cell(lengths=lengths)
    forward = import_module("benchmarks.peers").sageattention(of_call, torch.device("cpu"))
    rows = (sum(lengths),) if lengths else (of_call.batch, of_call.seqlen)
    q, k, v = (torch.randn(*rows, heads, of_call.head_dim) for heads in (4, 2, 2))
    before = k.clone()
    copies = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: copies.append(x) or clone(x))
    for _ in range(2):
        forward(q, k, v)
    assert len(copies) == 1  # a copy in each call would be timed
    assert torch.equal(k, before)


@pytest.mark.usefixtures("_sageattention")
def test_another_sageattention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = import_module("benchmarks.peers")
    monkeypatch.setattr(peers, "version", lambda name: "2.2.0")
    with pytest.raises(ValueError, match=r"expected version 1, .* found 2\.2\.0"):
        peers.sageattention(cell(), torch.device("cpu"))


def test_every_package_is_a_contender_by_default() -> None:
    others = {"xformers", "sageattention", "flash-attn-4", "flash-attn-3", "flashinfer"}
    assert others <= {*import_module("benchmarks.attention").DEFAULT}


@pytest.mark.usefixtures("_sageattention")
def test_packed_sequences_of_sageattention(on_cpu: ModuleType) -> None:
    contenders = ("flashvar-reference", "sageattention")
    options = import_module("benchmarks.report").Options(contenders=contenders)
    _, theirs = on_cpu.report([cell(lengths=(16, 8))], options).rows
    assert theirs["difference_to_reference"] < 0.02


def test_a_pool_prepares_together_and_measures_in_order() -> None:
    worker_pool = import_module("benchmarks.worker_pool")
    work = (pooled_work.prepare, pooled_work.measure, pooled_work.lost)
    rows = worker_pool.run(["a", "b", "c", "deadly", "d", "broken"], 3, *work)
    assert [row["case"] for row in rows] == ["a", "b", "c", "deadly", "d", "broken"]
    assert [row.get("ready") for row in rows] == ["a deadly", "b d", None, None, "b d", None]
    assert rows[1]["process"] == rows[4]["process"] != rows[0]["process"]
    assert "terminated abruptly" in rows[3]["skipped"]
    # One that cannot be prepared takes the others of its process with it, and says why.
    assert rows[2]["skipped"] == rows[5]["skipped"] == "ValueError: it cannot be prepared"


def test_processes_fill_caches_and_leave_errors_to_who_measures(tmp_path: Path) -> None:
    worker_pool = import_module("benchmarks.worker_pool")
    paths = [str(tmp_path / name) for name in ("a", "b", "missing/c", "d", "e")]
    worker_pool.fill(paths, 3, pooled_work.touch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "d", "e"]


def test_an_interrupt_keeps_what_was_measured() -> None:
    worker_pool = import_module("benchmarks.worker_pool")

    def measure(name: str) -> list[dict[str, Any]]:
        if name == "b":
            raise KeyboardInterrupt
        return [{"case": name}]

    rows = worker_pool.run(["a", "b", "c"], 0, lambda names: None, measure, pooled_work.lost)
    assert rows[0] == {"case": "a"}
    assert [row["case"] for row in rows[1:]] == ["b", "c"]
    assert all("the run was interrupted" in row["skipped"] for row in rows[1:])


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, as it does in a program: workers of pytest-xdist ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_ends_the_processes(tmp_path: Path) -> None:
    worker_pool = import_module("benchmarks.worker_pool")
    work = (pooled_work.prepare, pooled_work.measure, pooled_work.lost)
    slow = f"slow {tmp_path / 'ended'}"
    rows = worker_pool.run(["a", slow, "c"], 3, *work)
    assert rows[0]["ready"] == "a"
    assert [row["case"] for row in rows[1:]] == [slow, "c"]
    assert all("the run was interrupted" in row["skipped"] for row in rows[1:])
    assert list(tmp_path.iterdir()) == []


def test_shares_are_dealt_in_turn() -> None:
    shares = import_module("benchmarks.worker_pool").shares
    assert shares(list("abcdefg"), 3) == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert shares(["a"], 16) == [["a"]]
