"""Pictures stand in the order of a reader, each with its words; none is left without them."""

from __future__ import annotations

import hashlib
import re
from importlib import import_module
from pathlib import Path

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]


def page(root: Path, *names: str) -> str:
    folder, results = root / "docs" / "pictures", root / "benchmarks" / "results"
    folder.mkdir(parents=True)
    results.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("<dc:source>made.json 0123, peers.toml 4567</dc:source>")
    environment = {"source": {"revision": "0123456789abcdef"}, "time": "2026-01-31T12:00:00+00:00"}
    result_file.write(results / "made.json", {"environment": environment, "rows": []})
    return str(import_module("pictures").pictures(root))


def put_record(root: Path, name: str) -> None:
    folder = root / "tests" / "gpu" / "results"
    folder.mkdir(parents=True)
    (folder / name).touch()


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))


def test_they_are_in_order_and_drawn_as_outlines(tmp_path: Path) -> None:
    put_record(tmp_path, "h200-backward.json")
    outlined = ("sizes.png", "sizes.svg", "h200-forward.png", "h200-forward.svg")
    found = page(tmp_path, "h200-backward.png", *outlined)
    images = [line for line in found.splitlines() if line.startswith("[")]
    assert [image.partition("](")[2] for image in images] == [
        "pictures/h200-forward.svg)](pictures/h200-forward.svg)",
        "pictures/h200-backward.png)](pictures/h200-backward.png)",
        "pictures/sizes.svg)](pictures/sizes.svg)",
    ]
    assert found.startswith("The forward: rates by length")


def test_a_picture_tells_its_day_and_commit(tmp_path: Path) -> None:
    found = page(tmp_path, "h200-forward.png", "h200-forward.svg").partition("\n")[0]
    assert found.endswith(" 2026-01-31, commit 0123456789 (`benchmarks/results/made.json`).")


def test_a_picture_of_several_runs_names_them_all(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "pictures"
    page(tmp_path, "h200-forward.png", "h200-forward.svg")
    results = tmp_path / "benchmarks" / "results"
    environment = {"source": {"revision": "fedcba9876543210"}, "time": "2026-02-01T12:00:00+00:00"}
    result_file.write(results / "later.json", {"environment": environment, "rows": []})
    (folder / "h200-forward.svg").write_text("<dc:source>made.json 0123, later.json 89</dc:source>")
    found = str(import_module("pictures").pictures(tmp_path)).partition("\n")[0]
    assert found.endswith(
        " 2026-01-31, commit 0123456789 (`benchmarks/results/made.json`); "
        "2026-02-01, commit fedcba9876 (`benchmarks/results/later.json`)."
    )


def test_a_picture_of_no_benchmark_names_its_record(tmp_path: Path) -> None:
    put_record(tmp_path, "h200-train-gpt.json")
    found = page(tmp_path, "h200-train-gpt.png").partition("\n")[0]
    assert found.endswith(" No commit recorded (`tests/gpu/results/h200-train-gpt.json`).")


def test_a_picture_without_a_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train-gpt\.png: expected its record tests/gpu/results"):
        page(tmp_path, "h200-train-gpt.png")


PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_drawn_from_the_newest_record(picture: Path) -> None:
    source = re.search(r"<dc:source>(.+)</dc:source>", picture.read_text(encoding="utf-8"))
    assert source is not None
    for name, drawn in (one.split() for one in source[1].split(", ")):
        (file,) = (ROOT / "benchmarks").rglob(name)
        assert hashlib.sha256(file.read_bytes()).hexdigest().startswith(drawn), (
            f"{picture.name}: expected one of this {name}, found an older one: draw it again"
        )


def test_a_picture_without_words_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected pictures of forward, .*found h200-else\.png"):
        page(tmp_path, "h200-else.png")
