"""Stages run in order, once for the same inputs, and all of them or there is no release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flashvar_factory.config import schema
from flashvar_factory.errors import AuditError, ReleaseError
from flashvar_factory.release import pipeline
from flashvar_factory.release.pipeline import Release
from flashvar_factory.release.steps import Outcome, Step

ROOT = Path(__file__).parents[3]


class Writes:
    """A stage with a step that writes a file, and remembers how often it did."""

    def __init__(self, name: str, inputs: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.inputs = inputs or {}
        self.calls = 0
        self.during: Callable[[], None] = lambda: None

    def steps(self, release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
        def work() -> Outcome:
            self.calls += 1
            self.during()
            file = release.folder / f"{self.name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{list(done)} {self.inputs}", encoding="utf-8")
            return Outcome(f"wrote {self.name}", (file,), {"calls": self.calls})

        yield Step(f"{self.name}/file", self.inputs, work)


def raises(error: BaseException) -> Callable[[], None]:
    def during() -> None:
        raise error

    return during


@pytest.fixture
def release(tmp_path: Path) -> Release:
    config = schema.read(ROOT / "variants.toml")
    return Release(config, tmp_path, tmp_path / "work", "1.0", "abc", (), (), {})


@pytest.fixture
def stages() -> dict[str, Writes]:
    return {name: Writes(name) for name in ("one", "two", "three")}


def calls(stages: Mapping[str, Writes]) -> list[int]:
    return [stage.calls for stage in stages.values()]


def test_in_order_with_progress(
    release: Release, stages: dict[str, Writes], capsys: pytest.CaptureFixture[str]
) -> None:
    done = pipeline.run(release, stages)
    assert list(done) == ["one/file", "two/file", "three/file"]
    assert done["three/file"].files[0].read_text(encoding="utf-8").startswith("['one/file', 'two")
    said = capsys.readouterr().out
    assert said.index("[1/3] one") < said.index("one/file: wrote one") < said.index("[3/3] three")


def test_done_is_not_done_again(
    release: Release, stages: dict[str, Writes], capsys: pytest.CaptureFixture[str]
) -> None:
    first = pipeline.run(release, stages)
    assert pipeline.run(release, stages) == first
    assert calls(stages) == [1, 1, 1]
    assert capsys.readouterr().out.count("(done before)") == 3


def test_another_input_does_its_step_alone(release: Release, stages: dict[str, Writes]) -> None:
    pipeline.run(release, stages)
    stages["two"].inputs = {"wheel": "another"}
    done = pipeline.run(release, stages)
    assert calls(stages) == [1, 2, 1]
    assert "another" in done["two/file"].files[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("harm", ["removed", "changed"])
def test_a_file_that_was_harmed_is_made_again(
    harm: str, release: Release, stages: dict[str, Writes]
) -> None:
    (file,) = pipeline.run(release, stages)["two/file"].files
    before = file.read_bytes()
    file.unlink() if harm == "removed" else file.write_bytes(before + b"!")
    pipeline.run(release, stages)
    assert calls(stages) == [1, 2, 1]
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"inputs": 1, "files": []}'])
def test_a_broken_record_is_no_record(
    text: str, release: Release, stages: dict[str, Writes]
) -> None:
    pipeline.run(release, stages)
    (record,) = (release.folder / "done" / "one").iterdir()
    record.write_text(text, encoding="utf-8")
    pipeline.run(release, stages)
    assert calls(stages) == [2, 1, 1]


def test_another_factory_judges_anew(
    release: Release, stages: dict[str, Writes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.run(release, stages)
    monkeypatch.setattr("flashvar_factory.build.source.factory", lambda: "another")
    pipeline.run(release, stages)
    assert calls(stages) == [2, 2, 2]


ENDS = [AuditError("ptx"), ReleaseError("stranger"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_the_first_error_ends_it_and_the_next_run_resumes(
    error: BaseException, release: Release, stages: dict[str, Writes]
) -> None:
    stages["two"].during = raises(error)
    with pytest.raises(type(error)):
        pipeline.run(release, stages)
    assert calls(stages) == [1, 1, 0]
    stages["two"].during = lambda: None
    pipeline.run(release, stages)
    assert calls(stages) == [1, 2, 1]


def test_a_step_that_fails_now_loses_its_record(
    release: Release, stages: dict[str, Writes]
) -> None:
    pipeline.run(release, stages)
    stages["two"].inputs = {"wheel": "another"}
    stages["two"].during = raises(AuditError("ptx"))
    with pytest.raises(AuditError):
        pipeline.run(release, stages)
    stages["two"].inputs = {}
    stages["two"].during = lambda: None
    pipeline.run(release, stages)
    assert calls(stages) == [1, 3, 1]


def test_a_file_that_changes_after_it_was_judged_is_not_released(
    release: Release, stages: dict[str, Writes]
) -> None:
    stages["three"].during = lambda: (release.folder / "one.txt").write_text("x", encoding="utf-8")
    with pytest.raises(ReleaseError, match="expected the files of one/file as they were made"):
        pipeline.run(release, stages)
