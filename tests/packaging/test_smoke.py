"""The smoke test: a fresh environment gets the wheels and nothing else, and says what is wrong."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory import index
from flashvar_factory.build import example
from flashvar_factory.cli import main
from flashvar_factory.config import schema
from flashvar_factory.errors import PackagingError, SmokeError
from flashvar_factory.inspect import archive
from flashvar_factory.release import pythons, smoke

SECOND = example.TEMPLATE
TAG = f"py3-none-manylinux_2_28_{platform.machine()}"
SCRIPT = """\
import sys
from importlib import metadata
import vecadd
print(vecadd.WORDS, *(f"{name}={metadata.version(name)}" for name in sys.argv[1:]))
sys.exit(vecadd.EXIT)
"""
PIP = ("pip",)
# Its environments are without pip, which takes seconds to put into one.
UV = ("uv",)


def put_wheel(
    folder: Path, name: str, tag: str, files: dict[str, str], *metadata: str, version: str = "0.1.0"
) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata, ""]
    kept = {
        **files,
        f"{info}/METADATA": "\n".join(lines),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    folder.mkdir(exist_ok=True)
    contents = {path: text.encode() for path, text in kept.items()}
    archive.write(folder / f"{stem}-{tag}.whl", contents, info)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose wheels are empty but for their metadata and one module."""
    monkeypatch.setattr(smoke, "INSTALLERS", UV)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    folder = tmp_path / "project"
    shutil.copytree(SECOND, folder)
    put_wheels(folder / "dist")
    (folder / "smoke.py").write_text(SCRIPT, encoding="utf-8")
    text = (SECOND / "variants.toml").read_text(encoding="utf-8")
    text = text.replace('license = "MIT"\n', 'license = "MIT"\nsmoke = "smoke.py"\n')
    (folder / "variants.toml").write_text(text, encoding="utf-8")
    return folder


def put_wheels(folder: Path, *, code: int = 0, version: str = "0.1.0") -> None:
    extras = [
        line
        for extra in ("sm75", "sm90")
        for line in (f'Requires-Dist: vecadd-{extra}=={version}; extra == "all"',)
    ]
    module = {"vecadd.py": f"WORDS = 'hello'\nEXIT = {code}\n"}
    needs = ("Requires-Dist: absent-here>=3.1", "Provides-Extra: all", *extras)
    put_wheel(folder, "vecadd", "py3-none-any", module, *needs, version=version)
    for extra in ("sm75", "sm90"):
        put_wheel(folder, f"vecadd-{extra}", TAG, {}, version=version)


def run(project: Path, *, index_url: str | None = None) -> smoke.Report:
    return smoke.run(
        project / "dist",
        root=project,
        config=schema.read(project / "variants.toml"),
        pythons=pythons.named([Path(sys.executable)]),
        index_url=index_url,
    )


def fault(report: smoke.Report) -> str:
    (check,) = report.checks
    assert check.error is not None
    assert not report.ok
    return check.error


@pytest.mark.parametrize("installers", [PIP, UV], ids=["pip", "uv"])
@pytest.mark.parametrize("way", ["find-links", "index"])
def test_wheels_that_work(
    project: Path, way: str, installers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "INSTALLERS", installers)
    url = None
    if way == "index":
        index.write(project / "dist", project / "site")
        # Nothing on an index is a stand-in: it comes from beside.
        url = (project / "site").as_uri() + "/"
    report = run(project, index_url=url)
    (check,) = report.checks
    assert report.ok, report.text()
    assert (check.installer,) == installers
    assert check.dependencies == ("stand-in absent-here 3.1",)
    assert check.output == "hello vecadd=0.1.0 vecadd-sm75=0.1.0 vecadd-sm90=0.1.0"
    assert json.loads(report.to_json())["ok"] is True


def test_the_latest_version_is_tried_whenever_its_file_was_written(project: Path) -> None:
    put_wheels(project / "dist", version="0.10.0")
    put_wheels(project / "dist", version="0.9.0")  # copied later
    (check,) = run(project).checks
    assert check.output == "hello vecadd=0.10.0 vecadd-sm75=0.10.0 vecadd-sm90=0.10.0"


def test_script_that_fails_is_a_fault(project: Path) -> None:
    put_wheels(project / "dist", code=3)
    assert "found 3 of" in fault(run(project))


def test_extra_without_its_wheel_is_a_fault(project: Path) -> None:
    (wheel,) = (project / "dist").glob("vecadd_sm90-*.whl")
    put_wheel(project / "dist", "vecadd-sm90", TAG, {}, version="2.0.0")
    wheel.unlink()
    assert "vecadd-sm90" in fault(run(project))


def test_command_ends_with_the_exit_code(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_wheels(project / "dist", code=1)
    words = ["smoke", "--python", sys.executable, "--json", str(project / "report.json")]
    assert main(["--root", str(project), *words]) == SmokeError.exit_code
    report = json.loads((project / "report.json").read_text(encoding="utf-8"))
    assert report["ok"] is False
    printed = capsys.readouterr()
    assert printed.out.startswith("FAILED: Python")
    assert "found 1 of 1 environments" in printed.err


def test_command_installs_from_an_index_that_it_serves(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    run_command = smoke._run

    def spy(command: Sequence[str], **changes: Any) -> str:
        commands.append(" ".join(command))
        return run_command(command, **changes)

    monkeypatch.setattr(smoke, "_run", spy)
    words = ["smoke", "--serve", "--python", sys.executable]
    assert main(["--root", str(project), *words]) == 0, capsys.readouterr().out
    (installing,) = [line for line in commands if "vecadd[all]==0.1.0" in line]
    assert "--index-url http://127.0.0.1:" in installing
    assert str(project / "dist") not in installing


def test_no_wheels(project: Path) -> None:
    with pytest.raises(PackagingError, match="expected wheels"):
        smoke.run(
            project / "none",
            root=project,
            config=schema.read(project / "variants.toml"),
            pythons=pythons.named([Path(sys.executable)]),
        )


def test_no_python(project: Path) -> None:
    config = schema.read(project / "variants.toml")
    with pytest.raises(PackagingError, match="expected a Python"):
        smoke.run(project / "dist", root=project, config=config, pythons=())


def script(folder: Path, name: str, line: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_pythons_are_found_once_each_and_shims_are_passed_over(tmp_path: Path) -> None:
    script(tmp_path, "python3.12", "echo not here; exit 127")
    script(tmp_path, "python3.14t", "echo 3 14 1 /opt/python3.14t")
    script(tmp_path, "python3.9", "echo 3 9 0 /opt/python3.9")
    found = pythons.find({"PATH": str(tmp_path), "HOME": str(tmp_path)})
    mine = pythons.probe(Path(sys.executable))
    assert mine is not None
    other = pythons.Python((3, 14), True, Path("/opt/python3.14t"))
    assert found == tuple(sorted([mine, other]))
    assert other.tag == "cp314t"
    assert replace(other, free_threaded=False).tag == "cp314"


@pytest.mark.parametrize(
    ("line", "found"),
    [("echo 3 9 0 /opt/python", "3.9"), ("exit 1", "none")],
    ids=["too old", "no Python"],
)
def test_named_python_that_will_not_do(tmp_path: Path, line: str, found: str) -> None:
    with pytest.raises(ConfigurationError, match=f"found {found}"):
        pythons.named([script(tmp_path, "python", line)])
