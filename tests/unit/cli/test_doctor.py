from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import fakes
import pytest
from installed import put_binary

from flashvar._version import __version__
from flashvar.binaries import install_commands, registry
from flashvar.binaries.registry import Inventory
from flashvar.cli import diagnosis, doctor_page, main, page_text
from flashvar.cli.diagnosis import Report, examine
from flashvar.machine.system import Device, System
from flashvar.ops import specs
from flashvar.ops.gated_delta_rule import spec as gated_delta_rule
from flashvar.selection.request import Overrides

ALL = fakes.inventory("80", "86", "89", "90a")
NOTHING = fakes.inventory()
# Requests about one device where ALL is installed.
EACH = len(fakes.OPS) * len(fakes.HEAD_DIMS) * 2 + len(fakes.of_other_ops())


def report(
    system: System, inventory: Inventory = ALL, overrides: Overrides | None = None
) -> Report:
    return examine(system, inventory, overrides or Overrides())


def rendered(found: Report, width: int | None = None) -> str:
    return page_text.render(doctor_page.page(found), width)


@pytest.mark.parametrize(
    ("system", "inventory", "healthy", "conclusion"),
    [
        pytest.param(fakes.system(fakes.H100), ALL, True, "Compiled kernels run", id="H100"),
        pytest.param(
            fakes.system(fakes.GB200), ALL, True, "Triton runs every kind of call", id="GB200"
        ),
        pytest.param(
            fakes.system(fakes.H100), NOTHING, True, "Triton runs every kind of call", id="bare"
        ),
        pytest.param(fakes.system(), ALL, False, "torch sees no CUDA device", id="no GPU"),
        pytest.param(
            fakes.system(driver_cuda=None), ALL, False, "no NVIDIA driver is found", id="no driver"
        ),
        pytest.param(
            fakes.system(visible_devices=""), ALL, False, "VISIBLE_DEVICES is ''", id="hidden"
        ),
        pytest.param(
            fakes.system(problem="the driver is too old"), ALL, False, "too old", id="problem"
        ),
        pytest.param(
            System(problem="torch cannot be imported: it is cut short"),
            ALL,
            False,
            "No call runs: torch cannot be imported: it is cut short.",
            id="no torch",
        ),
        pytest.param(
            fakes.system(fakes.GB200, triton=None), ALL, False, "No backend", id="nothing runs"
        ),
        pytest.param(
            fakes.system(fakes.H100, fakes.GB200),
            ALL,
            True,
            f"cuda {EACH}, triton {EACH}",
            id="two devices",
        ),
    ],
)
def test_conclusion_and_health(
    system: System, inventory: Inventory, healthy: bool, conclusion: str
) -> None:
    found = report(system, inventory)
    assert found.healthy is healthy
    assert conclusion in found.conclusion
    assert rendered(found).splitlines()[0] == f"flashvar {__version__}: {found.conclusion}"


def test_asks_about_everything_installed_and_the_usual() -> None:
    kernels = (fakes.kernel(dtype="bf16", head_dim=96), fakes.kernel("rms_norm", dtype="fp16"))
    inventory = Inventory((fakes.binary("80", kernels=kernels),))
    found = report(fakes.system(fakes.A100), inventory)
    asked = [one.request for one in found.decisions]
    ours = {(one.function, one.dtype, *one.axes) for one in asked if one.spec.name == "attention"}
    usual = set(product(fakes.OPS, ("bf16", "fp16"), ((64, 64), (128, 128))))
    assert ours == usual | {("attention_fwd", "bf16", (96, 96))}
    # What a newer binary holds beside them is shown, and nothing can be asked about it.
    assert {one.function for one in asked} == {name for one in specs() for name in one.functions}
    assert "rms_norm fp16, not known to this flashvar" in rendered(found)


@pytest.mark.parametrize(
    ("system", "inventory", "fixes"),
    [
        pytest.param(
            fakes.system(fakes.L40S),
            NOTHING,
            (install_commands.install("sm89"),),
            id="missing wheel",
        ),
        pytest.param(
            fakes.system(fakes.L40S, driver_cuda=(12, 8)),
            ALL,
            ("update the NVIDIA driver to 580 or newer",),
            id="old driver",
        ),
        pytest.param(
            fakes.system(fakes.GB200, triton=None), ALL, ("pip install triton",), id="no triton"
        ),
        pytest.param(fakes.system(fakes.H100, triton=None), ALL, (), id="nothing better"),
        pytest.param(fakes.system(fakes.GB200), ALL, (), id="no wheel exists"),
        pytest.param(
            fakes.system(visible_devices="7"), ALL, ("unset CUDA_VISIBLE_DEVICES",), id="hidden"
        ),
        pytest.param(
            fakes.system(fakes.H100, visible_devices="0"), ALL, (), id="chosen on purpose"
        ),
    ],
)
def test_fixes_are_those_that_would_change_what_runs(
    system: System, inventory: Inventory, fixes: tuple[str, ...]
) -> None:
    assert report(system, inventory).fixes == fixes


def test_text_of_a_machine_with_two_devices() -> None:
    inventory = replace(fakes.inventory("89"), rejected=(fakes.REPLACED,))
    text = rendered(report(fakes.system(fakes.L40S, fakes.GB200), inventory))
    assert text.startswith(
        f"flashvar {__version__}: Of {2 * EACH} kinds of calls: cuda {EACH}, triton {EACH}.\n"
    )
    what_runs = text.partition("\nWhat runs\n")[2].partition("\n\n")[0]
    of_ops = re.split(r"\n(?=  cuda:)", what_runs)
    of_attention = [one for one in of_ops if re.match(r"  cuda:\d  attention", one)]
    assert "\n".join(of_attention).splitlines() == [
        "  cuda:0  attention_fwd, attention_bwd bf16, fp16, head dims 32, 64, 128, 256: cuda sm_89",
        "      cuda sm_89  chosen     runs it",
        "      cuda sm_89  no         wheel b: replaced by wheel a",
        "      triton      available  runs it, compiled at the first call",
        '      reference   no         runs CUDA tensors only when named: backend="reference"',
        "  cuda:1  attention_fwd, attention_bwd bf16, fp16, head dims 32, 64, 128, 256: triton",
        "      cuda sm_100  no      flashvar has no wheel for it, only for "
        "sm_80, sm_86, sm_89, sm_90",
        "      cuda sm_89   no      runs on compute capability 8.9 and later 8.x; this GPU is 10.0",
        "      cuda sm_89   no      wheel b: replaced by wheel a",
        "      triton       chosen  runs it, compiled at the first call",
        '      reference    no      runs CUDA tensors only when named: backend="reference"',
    ]


def test_directions_that_run_on_different_backends_stand_apart() -> None:
    forward = fakes.manifest("89", head_dims=(64, 128), ops=("attention_fwd",)).kernels
    pair = fakes.kernel("attention_fwd", dtype="bf16", head_dim=192, head_dim_v=128)
    inventory = Inventory((fakes.binary("89", kernels=(*forward, pair), version="0.1.0+part"),))
    text = rendered(report(fakes.system(fakes.L40S), inventory))
    assert "  attention_fwd bf16, fp16, head dims 64, 128, 192x128\n" in text
    heads = [line for line in text.splitlines() if line.startswith("  cuda:0  attention")]
    assert heads == [
        "  cuda:0  attention_fwd bf16, fp16, head dims 64, 128, 192x128: cuda sm_89",
        "  cuda:0  attention_bwd bf16, fp16, head dims 64, 128: triton",
    ]
    reason = "cuda sm_89  no      holds no kernel for attention_bwd"
    assert f"{reason} -> nox -s build-dev -- arch=sm_89 hdim=64,128,192x128\n" in text


def test_text_names_every_binary_and_every_refusal() -> None:
    inventory = replace(fakes.inventory("80", "89"), rejected=(fakes.REPLACED,))
    text = rendered(report(fakes.system(fakes.L40S), inventory))
    binaries = text.partition("\nBinaries\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in binaries] == ["kind", "sm_80", "sm_89", "sm_89"]
    assert "head dims 32, 64, 128, 256" in binaries[1]
    assert " ".join(binaries[3].split()) == "sm_89 wheel b rejected: replaced by wheel a"


def test_text_shows_what_the_user_insists_on() -> None:
    overrides = Overrides("cuda", "sm_80")
    text = rendered(report(fakes.system(fakes.L40S), ALL, overrides))
    assert "  backend       cuda\n" in text
    assert "  forced to     sm_80\n" in text


@pytest.mark.parametrize(
    ("system", "inventory"),
    [(fakes.system(fakes.L40S), NOTHING), (fakes.system(fakes.L40S, driver_cuda=(12, 8)), ALL)],
    ids=["missing wheel", "old driver"],
)
def test_the_fix_comes_last(system: System, inventory: Inventory) -> None:
    found = report(system, inventory)
    assert rendered(found).splitlines()[-1] == f"  {found.fixes[-1]}"


def test_text_says_which_family_of_kernels_a_binary_takes() -> None:
    manifest = fakes.manifest("90a")
    rows = tuple(replace(row, launches=fakes.TWO_FAMILIES) for row in manifest.kernels)
    inventory = Inventory((fakes.binary("90a", kernels=rows),))
    found = report(fakes.system(fakes.H100), inventory)
    inside = rendered(found).partition("\nInside the binary\n")[2].splitlines()
    assert inside[:3] == [
        "  cuda sm_90  attention_fwd bf16, fp16, head dims 32, 64, 128, 256",
        "      wgmma     rows start on 16 bytes",
        "      mma.sync  every other call",
    ]
    kinds = {
        (one["function"], one["dtype"], one["axes"].get("head_dim")): [
            rule["family"] for rule in one["families"]
        ]
        for one in json.loads(found.to_json())["requests"]
    }
    assert kinds["attention_fwd", "fp16", "32"] == ["wgmma", "mma.sync"]
    assert kinds["attention_bwd", "bf16", "64"] == ["wgmma", "mma.sync"]
    assert kinds["attention_bwd", "fp16", "32"] == ["wgmma", "mma.sync"]
    assert "Inside the binary" not in rendered(report(fakes.system(fakes.L40S)))


def test_json_holds_the_whole_trace() -> None:
    found = report(fakes.system(fakes.L40S), fakes.inventory("80"))
    document = json.loads(found.to_json())
    assert document["healthy"] is True
    assert document["system"]["devices"][0]["capability"] == [8, 9]
    assert [one["kind"] for one in document["binaries"]] == ["sm_80"]
    first = document["requests"][0]
    assert (first["device"], first["chosen"], first["backend"]) == (0, "cuda sm_80", "cuda")
    assert first["kernel"] == "attention_fwd_bf16_hdim32"
    assert [one["candidate"] for one in first["candidates"]] == [
        "cuda sm_89",
        "cuda sm_80",
        "triton",
        "reference",
    ]


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("system", "code"),
    [(fakes.system(fakes.H100), 0), (fakes.system(), 1)],
    ids=["Triton runs", "no GPU"],
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    system: System,
    code: int,
    form: list[str],
) -> None:
    monkeypatch.setattr(diagnosis, "gather", lambda: system)
    assert main(["doctor", *form]) == code
    printed = capsys.readouterr().out
    assert (json.loads(printed)["healthy"] if form else "What runs" in printed) is (
        code == 0 if form else True
    )


def test_bad_environment_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHVAR_BACKEND", "gpu")
    assert main(["doctor"]) == 2
    assert "FLASHVAR_BACKEND: expected one of auto" in capsys.readouterr().err


def lacking(function: str, version: str = "0.1.0", **changes: Any) -> Inventory:
    """A binary for sm_80 whose manifest has no kernel of a function."""
    made = fakes.binary("80", version=version)
    kernels = tuple(row for row in made.manifest.kernels if row.function != function)
    return Inventory((replace(made, manifest=replace(made.manifest, kernels=kernels), **changes),))


def test_an_op_that_a_release_should_serve_is_missed() -> None:
    found = report(fakes.system(fakes.A100), lacking("merge_states_fwd"))
    assert not found.healthy
    assert (
        "triton 3 (merge_states). On cuda:0 triton runs merge_states_fwd "
        "(cuda sm_80: holds no kernel for merge_states_fwd)." in found.conclusion
    )


def test_a_function_that_the_library_does_not_export_is_missed() -> None:
    missing = (("attention_bwd", "expected a function flashvar_attention_bwd, found none"),)
    inventory = Inventory((replace(fakes.binary("80"), missing=missing),))
    found = report(fakes.system(fakes.A100), inventory)
    assert not found.healthy
    assert "triton runs attention_bwd (cuda sm_80: expected a function" in found.conclusion
    (fallback,) = json.loads(found.to_json())["fallbacks"]
    assert (fallback["device"], fallback["functions"]) == (0, ["attention_bwd"])


@pytest.mark.parametrize(
    ("machine", "inventory"),
    [
        pytest.param(fakes.A100, lacking("merge_states_fwd", "0.1.0+part"), id="a part was built"),
        pytest.param(fakes.A100, lacking("merge_states_fwd", "0.0.9"), id="an older release"),
        pytest.param(fakes.GB200, ALL, id="no binary is for the device"),
    ],
)
def test_triton_serves_what_no_binary_here_should(machine: Device, inventory: Inventory) -> None:
    found = report(fakes.system(machine), inventory)
    assert found.healthy
    assert found.fallbacks == ()


def test_a_binary_with_every_compiled_function_serves_every_request() -> None:
    found = report(fakes.system(fakes.H100), fakes.inventory("90a"))
    assert {one.request.function for one in found.decisions} == {
        name for spec in specs() for name in spec.compiled
    }
    assert found.healthy
    assert found.conclusion == "Compiled kernels run every kind of call."


def test_dtypes_that_no_release_compiles_are_not_missed() -> None:
    held = {function: dtypes for spec in specs() for function, dtypes in spec.compiled.items()}
    (full,) = fakes.inventory("90a").binaries
    rows = tuple(row for row in full.manifest.kernels if row.dtype in held[row.function])
    assert len(rows) < len(full.manifest.kernels)
    released = replace(full, manifest=replace(full.manifest, kernels=rows))
    found = report(fakes.system(fakes.H100), Inventory((released,)))
    assert found.healthy
    assert found.fallbacks == ()
    assert "triton" in found.conclusion


def test_one_op_without_any_kernel_is_unhealthy() -> None:
    found = report(fakes.system(fakes.A100, triton=None), lacking("causal_conv1d_update"))
    assert not found.healthy
    assert (
        "On cuda:0 nothing runs causal_conv1d_update (triton: triton is not installed)"
        in found.conclusion
    )


def test_a_device_without_kernels_beside_one_with_them() -> None:
    found = report(fakes.system(fakes.H100, fakes.V100), fakes.inventory("90a"))
    assert not found.healthy
    assert {one.device for one in found.fallbacks} == {1}
    every = {name for spec in specs() for name in spec.functions}
    assert {name for one in found.fallbacks for name in one.functions} == every


def test_a_dtype_that_a_device_has_not_is_no_fault() -> None:
    """Unlike an op that it has no kernels for, whatever the dtype."""
    found = report(fakes.system(fakes.T4), NOTHING)
    assert any(one.chosen is None for one in found.decisions)
    unserved = {name for one in found.fallbacks for name in one.functions}
    assert unserved == set(gated_delta_rule.SPEC.functions)


SKEWED = Inventory((fakes.binary("80", version="0.0.9"),))
STRICT = Overrides(strict=True)


@pytest.mark.parametrize(
    ("machine", "overrides", "which"),
    [
        pytest.param(fakes.system(fakes.A100), STRICT, "Calls on cuda:0 fail", id="every call"),
        pytest.param(
            fakes.system(fakes.H100, fakes.A100),
            STRICT,
            "Calls on cuda:1 fail",
            id="one of two devices",
        ),
        pytest.param(
            fakes.system(fakes.A100), replace(STRICT, backend="cuda"), "Calls on cuda:0", id="named"
        ),
    ],
)
def test_version_skew_is_an_error_when_strict(
    machine: System, overrides: Overrides, which: str
) -> None:
    found = report(machine, SKEWED, overrides)
    assert not found.healthy
    assert found.conclusion.startswith(which)
    assert "those on the CPU run: FLASHVAR_STRICT=1 makes this an error" in found.conclusion
    assert len(json.loads(found.to_json())["errors"]) == 1
    assert "cuda sm_80  raises" in " ".join(rendered(found).split("\n"))


@pytest.mark.parametrize(
    ("machine", "overrides"),
    [
        pytest.param(fakes.system(), STRICT, id="no device"),
        pytest.param(fakes.system(fakes.H100), STRICT, id="a device it is not for"),
        pytest.param(
            fakes.system(fakes.A100), replace(STRICT, backend="triton"), id="Triton named"
        ),
        pytest.param(fakes.system(fakes.A100), Overrides(), id="not strict"),
    ],
)
def test_version_skew_of_what_no_call_takes_is_no_error(
    machine: System, overrides: Overrides
) -> None:
    found = report(machine, SKEWED, overrides)
    assert found.errors == ()
    assert " fail" not in found.conclusion


def test_some_calls_fail_where_others_are_served_by_another() -> None:
    forward = Inventory(
        (
            fakes.binary(
                "80", version="0.0.9", kernels=fakes.manifest("80", ops=("attention_fwd",)).kernels
            ),
        )
    )
    found = report(fakes.system(fakes.A100), forward, STRICT)
    assert found.conclusion.startswith("Some calls on cuda:0 fail, those on the CPU run")


def test_strict_is_read_from_the_environment(
    fresh_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_binary(tmp_path / "old", replace(fakes.manifest("80"), version="0.0.9"))
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    monkeypatch.setattr(diagnosis, "gather", lambda: fakes.system(fakes.A100))
    monkeypatch.setattr(diagnosis.loader, "open_all", registry.installed)  # it is no library
    assert "FLASHVAR_STRICT=1" in diagnosis.examine_this_machine().conclusion


def test_nothing_installed_says_what_installers_do_with_other_extras() -> None:
    text = rendered(report(fakes.system(fakes.T4), NOTHING))
    assert "pip ignores unknown extras; flashvar has the extras sm80, sm86" in text
    assert "unknown extras" not in rendered(report(fakes.system(fakes.T4)))


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        ("never", "The code of sm_90 has never run on a GPU; `flashvar doctor --verify`"),
        ("ptx", "The code of sm_90 has run on no GPU of its own architecture, only as PTX"),
        ("own", None),
        (None, None),
    ],
)
def test_a_binary_that_never_ran_says_so(ran: str | None, words: str | None) -> None:
    found = report(fakes.system(fakes.H100), Inventory((fakes.binary("90a", ran=ran),)))
    text = str(doctor_page.page(found))
    assert ("--verify" in text) is (words is not None)
    assert words is None or words in text
    assert json.loads(found.to_json())["binaries"][0]["ran"] == ran
