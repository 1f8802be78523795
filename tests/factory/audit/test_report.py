"""What the audit says of a wheel beside its faults: sizes, the budget, what is in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fake_artifacts
import fakes
import pytest
from fake_artifacts import Image, Wheel

from flashvar_factory import audit
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.inspect import archive

FAKE = fake_artifacts.manifest()
OWN = fake_artifacts.images("80", FAKE)

pytestmark = pytest.mark.usefixtures("auditwheel")


@pytest.mark.parametrize(("budget", "found"), [(None, 0), (10**6, 0), (100, 1)])
def test_budget(budget: int | None, found: int, tmp_path: Path) -> None:
    report = audit.audit(Wheel().write(tmp_path), Expectations(budget=budget))
    assert [finding.check for finding in report.findings] == ["budget"] * found
    assert report.budget == (budget or 20_000_000)


def test_ledger_adds_up(tmp_path: Path) -> None:
    report = audit.audit(Wheel().write(tmp_path))
    document = json.loads(report.to_json())
    (library,) = document["libraries"]
    assert sum(row["stored"] for row in document["ledger"]) == library["bytes"]
    kernels = [row for row in document["ledger"] if row["kind"] == "sass"]
    assert [(row["architecture"], row["op"], row["dtype"], row["head_dim"]) for row in kernels] == [
        ("sm_80", "attention_fwd", "bf16", 32),
        ("sm_80", "attention_fwd", "bf16", 64),
    ]
    assert [(row["code"], row["kernels"]) for row in kernels] == [(2000, 2), (2000, 2)]


def test_ledger_tells_directions_and_pairs_apart(tmp_path: Path) -> None:
    described = fake_artifacts.manifest(ops=fakes.OPS)
    pair = fakes.kernel("attention_bwd", dtype="bf16", head_dim=192, head_dim_v=128)
    pair = replace(pair, functions=fake_artifacts.functions_of(pair.name))
    described = replace(described, kernels=(*described.kernels, pair))
    report = audit.audit(Wheel(described).write(tmp_path))
    assert report.findings == ()
    rows = [row for row in json.loads(report.to_json())["ledger"] if row["kind"] == "sass"]
    assert [(row["op"], row["head_dim"], row.get("head_dim_v")) for row in rows] == [
        ("attention_bwd", 32, None),
        ("attention_bwd", 64, None),
        ("attention_bwd", 192, 128),
        ("attention_fwd", 32, None),
        ("attention_fwd", 64, None),
    ]
    assert all(row["stored"] > 0 and row["code"] == 2000 for row in rows)
    assert "attention_bwd" in report.text()


def test_a_function_that_kernels_share_counts_for_each_that_has_a_copy(tmp_path: Path) -> None:
    rows = tuple(replace(row, functions=(*row.functions, "_Zshared")) for row in FAKE.kernels)
    described = replace(FAKE, kernels=rows)
    report = audit.audit(Wheel(described).write(tmp_path))
    assert report.findings == ()
    kernels = [row for key, row in report.ledger.items() if key.function]
    assert [(row.code, row.kernels) for row in kernels] == [(3000, 3), (3000, 3)]


def test_kernels_that_spill_are_named(tmp_path: Path) -> None:
    rows = (FAKE.kernels[0], replace(FAKE.kernels[1], spill_bytes=8, stack_bytes=16))
    described = replace(FAKE, kernels=rows, version="0.1.0+spilling")
    report = audit.audit(Wheel(described).write(tmp_path))
    assert report.findings == ()
    assert json.loads(report.to_json())["spilling"] == [
        {"kernel": rows[1].name, "registers": 168, "spill_bytes": 8, "stack_bytes": 16}
    ]
    sentence = f"{rows[1].name} spills 8 bytes of registers and has a stack of 16 bytes, per thread"
    assert sentence in report.text()
    assert rows[0].name not in report.text()


def test_ledger_divides_an_image_by_its_code(tmp_path: Path) -> None:
    small, large = (row.functions[0] for row in FAKE.kernels)
    image = Image("80", fake_artifacts.cubin({small: 100, large: 300}), compression=None)
    wheel = Wheel(library=fake_artifacts.library(FAKE, image))
    rows = [row for key, row in audit.audit(wheel.write(tmp_path)).ledger.items() if key.function]
    assert sum(row.stored for row in rows) == len(image.content) + -len(image.content) % 8
    assert rows[1].stored == pytest.approx(3 * rows[0].stored, abs=4)


def test_wheel_of_another_project_is_described(tmp_path: Path) -> None:
    library = replace(
        fake_artifacts.library(
            FAKE, *OWN, *fake_artifacts.images("90a", FAKE), fake_artifacts.ptx("90")
        ),
        needed=("libtorch.so", "libcudart.so.12"),
    )
    path = tmp_path / "other-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    archive.write(path, {"other/_C.so": library.build()}, "other-1.0.dist-info")
    report = audit.audit(path)
    assert report.findings == ()
    assert report.budget is None
    assert report.architectures == ("compute_90", "sm_80", "sm_90a")
    text = report.text()
    assert "device code: compute_90, sm_80, sm_90a" in text
    assert "needs libtorch.so, libcudart.so.12" in text
    assert "sm_90a sass not known" in text
