"""Projects that need nothing beside themselves, and the container they are built in."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import fakes
import pytest
from committed import commit_all
from installed import put_wheel

from flashvar.errors import ConfigurationError
from flashvar_factory.build import example, self_contained, source
from flashvar_factory.cli import COMMANDS, main
from flashvar_factory.config import schema, this_machine
from flashvar_factory.config.expand import Build, expand, select_all
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.errors import BuildError, CheckoutError, PackagingError
from flashvar_factory.toolchain import container
from flashvar_factory.toolchain.container import Choice, Facts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
CONFIG = schema.read(ROOT / "variants.toml")


def build_of(words: str) -> Build:
    (build,) = expand(CONFIG, select_all(parse(words.split(), CONFIG), CONFIG))
    return build


@pytest.mark.parametrize(
    "words",
    ["sm80", "sm89 hdim=64,128", "sm90 dtype=bf16 hdim=32 ptx=1", "sm90 op=attention_fwd hdim=96"],
)
def test_its_words_select_the_same_build(words: str) -> None:
    build = build_of(f"{words} platform=x86_64")
    assert (
        build_of(" ".join([*self_contained.selection(CONFIG, build), "platform=x86_64"])) == build
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("project") / "sm90"
    self_contained.write(
        CONFIG, build_of("sm90 hdim=64 platform=aarch64"), root=ROOT, output=output
    )
    return output


def test_a_project_without_cmake_files_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "vecadd"
    example.write("vecadd", root)
    output = tmp_path / "for sm90"
    words = ["project", "sm90", "--root", str(root), "--output", str(output)]
    assert main(words) == 0
    assert f"pip wheel '{output}'" in capsys.readouterr().out
    for part in ("variants.toml", "CMakeLists.txt", "cmake/write_plan.cmake", "src/cuda/abi"):
        assert (output / part).exists(), part


def test_it_holds_what_its_build_reads(project: Path) -> None:
    for part in ("variants.toml", "CMakeLists.txt", "cmake", "src/cuda", "LICENSE"):
        assert (project / part).exists(), part
    names = {path.name for path in (project / "src/python").iterdir()}
    assert names == {"flashvar", "flashvar_factory"}
    assert not list(project.rglob("__pycache__"))


def test_it_knows_its_revision(project: Path) -> None:
    copied, original = source.gather(project, "x"), source.gather(ROOT, "x")
    assert (copied.revision, copied.dirty) == (original.revision, original.dirty)


def test_it_knows_that_it_was_changed(tmp_path: Path) -> None:
    root, output = tmp_path / "vecadd", tmp_path / "sm90"
    example.write("vecadd", root)
    commit_all(root)
    assert main(["project", "sm90", "--root", str(root), "--output", str(output)]) == 0
    assert source.stated(output) == (source.stated(root)[0], False)
    (output / "src/cuda/abi/info.cc").write_text("// changed", encoding="utf-8")
    assert source.stated(output) == (source.stated(root)[0], True)
    (output / source.REVISION_FILE).write_text("[]", encoding="utf-8")
    with pytest.raises(CheckoutError, match="expected what the command project wrote"):
        source.stated(output)


def test_its_metadata(project: Path) -> None:
    document = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    assert document["project"]["name"] == "flashvar-sm90"
    assert document["project"]["version"].endswith("+hdim64")
    assert document["project"]["license-files"] == ["LICENSE", "THIRD_PARTY_NOTICES.md"]
    requires = document["build-system"]["requires"]
    assert any(requirement.startswith("cuda-toolkit[nvcc,") for requirement in requires)
    assert all("==" in requirement for requirement in requires)


def test_one_identifier_of_cibuildwheel(project: Path) -> None:
    document = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    settings = document["tool"]["cibuildwheel"]
    assert settings["build"] == "cp311-manylinux_aarch64"
    assert settings["linux"]["archs"] == ["aarch64"]
    assert "--plat manylinux_2_28_aarch64" in settings["linux"]["repair-wheel-command"]
    assert _call(settings["audit-command"]) == ("audit_wheels", ["{wheel}"])
    assert _call(settings["test-command"]) == ("load_installed", ["flashvar-sm90"])


def _call(command: str) -> tuple[str, list[str]]:
    """The module that a command line of the factory runs, and the arguments it is given."""
    _, _, line = command.partition(" -m flashvar_factory --root {package} ")
    name, *arguments = shlex.split(line)
    return COMMANDS[name], arguments


def test_cibuildwheel_takes_what_is_locked(project: Path) -> None:
    document = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    settings = document["tool"]["cibuildwheel"]
    assert settings["build-frontend"]["args"] == ["--no-isolation"]
    locked = "--require-hashes --requirement {package}/locks/binary.txt"
    assert settings["before-build"] == f"uv pip install {locked}"
    assert (project / "locks/binary.txt").read_bytes() == (ROOT / "locks/binary.txt").read_bytes()


def test_a_project_is_written_again(project: Path) -> None:
    (project / "src/cuda/stranger.cuh").touch()
    self_contained.write(CONFIG, build_of("sm89 platform=x86_64"), root=ROOT, output=project)
    assert not (project / "src/cuda/stranger.cuh").exists()
    self_contained.write(
        CONFIG, build_of("sm90 hdim=64 platform=aarch64"), root=ROOT, output=project
    )


def test_what_others_put_into_a_project_stays(project: Path) -> None:
    """A project that is written again may be a checkout meanwhile, with wheels in it."""
    for name in (".git/HEAD", "wheelhouse/a.whl"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x", encoding="utf-8")
    build = build_of("sm90 hdim=64 platform=aarch64")
    self_contained.write(CONFIG, build, root=ROOT, output=project)
    for name in (".git/HEAD", "wheelhouse/a.whl"):
        assert (project / name).is_file()
        shutil.rmtree((project / name).parent)


def test_a_file_that_an_editor_has_open(tmp_path: Path) -> None:
    root = tmp_path / "vecadd"
    example.write("vecadd", root)
    (root / "src/cuda/.#kernel.cuh").symlink_to("somebody@somewhere.1")
    words = ["project", "sm90", "--root", str(root), "--output", str(tmp_path / "sm90")]
    assert main(words) == 0


def test_what_cannot_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "vecadd"
    example.write("vecadd", root)
    os.mkfifo(root / "src/cuda/pipe")
    words = ["project", "sm90", "--root", str(root), "--output", str(tmp_path / "sm90")]
    assert main(words) == BuildError.exit_code
    expected = f"{root / 'src/cuda/pipe'}: expected a file that can be copied, found: "
    assert expected in capsys.readouterr().err


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(PackagingError, match="expected an empty folder"):
        self_contained.write(CONFIG, build_of("sm89"), root=ROOT, output=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("where", [".", "src/cuda/sm90"])
def test_a_project_is_not_written_into_its_own_sources(
    where: str, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has their mark, by which an earlier one is removed; and a copy of itself has no end."""
    root = tmp_path / "root"
    shutil.copytree(project, root)
    before = sorted(root.rglob("*"))
    words = ["project", "--root", str(root), "sm89", "--output", where]
    assert main(words) == ConfigurationError.exit_code
    assert "expected a folder apart from what is copied into it" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


def test_a_project_is_of_one_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["project", "--root", str(ROOT), "all", "--output", str(output)]) == 2
    assert "expected one architecture" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("name", ["flashvar-sm00", ""])
def test_loading_what_is_not_installed_is_an_error(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load-test", name]) == 1
    assert f"expected the distribution {name!r} in this environment" in capsys.readouterr().err


def test_loading_a_library_that_is_not_that_of_its_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = put_wheel(tmp_path, fakes.manifest("89")).glob("*.so")
    library.write_bytes(b"1234")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["load-test", "flashvar-sm89"]) == 1
    said = f"{library.parent}: {library.name}: expected sha256 df3f619804a9... as in its manifest"
    assert said in capsys.readouterr().err


def test_matrix_is_a_job_for_each_wheel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--root", str(ROOT), "--matrix"]) == 0
    rows = json.loads(capsys.readouterr().out)["include"]
    found = [(row["distribution"], row["platform"]) for row in rows]
    expected = [
        (target.distribution, platform)
        for platform in schema.PLATFORMS
        for target in CONFIG.targets.values()
        if platform in target.platforms
    ]
    assert found == expected
    assert {row["runner"] for row in rows if row["platform"] == "aarch64"} == {"ubuntu-24.04-arm"}


def test_a_container_is_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    other = next(name for name in schema.PLATFORMS if name != this_machine.PROCESSOR)
    assert main(["cibuildwheel", "--root", str(ROOT), f"platform={other}"]) == 2
    assert f"expected {this_machine.PROCESSOR}" in capsys.readouterr().err


CHOICES = {
    "official image": (Facts("docker", True, ("podman", "root")), Choice("docker")),
    "official before made here": (Facts("podman", True, ()), Choice("podman")),
    "no registry": (Facts("podman", False, ()), Choice("podman", made_here=True)),
}


@pytest.mark.parametrize(("facts", "choice"), CHOICES.values(), ids=CHOICES)
def test_container(facts: Facts, choice: Choice) -> None:
    assert container.choose(facts) == choice


REASONS = {
    "no engine": (Facts(None, False, ("podman", "runc")), ["found neither", "podman, runc"]),
    "no registry, not root": (
        Facts("docker", False, ("root",)),
        ["docker, which does not", "root"],
    ),
}


@pytest.mark.parametrize(("facts", "words"), REASONS.values(), ids=REASONS)
def test_no_container_says_why(facts: Facts, words: list[str]) -> None:
    why_not = container.choose(facts).why_not
    assert [word for word in words if word not in why_not] == []
