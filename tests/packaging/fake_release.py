"""A fake release: a clone of a project with one architecture, its files, a GPU record, a tag.

The sdist and the project's own wheel are built; the binary wheel holds a library that no compiler
made, but that is right in everything an audit reads.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fake_artifacts
from checkout import ROOT, committed_copy, git
from fake_artifacts import Wheel

from flashvar.binaries.manifest import Manifest, SourceRevision
from flashvar_factory.build import binary_project, source, wheel
from flashvar_factory.config import schema, version
from flashvar_factory.config.expand import expand_platforms
from flashvar_factory.config.schema import Config
from flashvar_factory.config.selection_arguments import SelectionArguments
from flashvar_factory.inspect import archive

STEM = "flashvar_sm80"
RECORDS = Path("tests", "gpu", "results")
RECORD = RECORDS / "fake.json"
SMOKE = """\
import os, sys
from importlib import metadata
print(*(f"{name}={metadata.version(name)}" for name in sys.argv[1:]))
sys.exit("BREAK_THE_SMOKE_TEST" in os.environ)
"""


@dataclass(frozen=True)
class Case:
    """A clone, the files of two builds, and what the check is told."""

    root: Path
    one: Path
    two: Path
    release: str

    @property
    def config(self) -> Config:
        return schema.read(self.root / schema.FILE_NAME)

    @property
    def names(self) -> dict[str, str]:
        """The files, by what they are."""
        return {
            "sdist": f"flashvar-{self.release}.tar.gz",
            "pure": f"flashvar-{self.release}-py3-none-any.whl",
            "factory": f"flashvar_factory-{self.release}-py3-none-any.whl",
            "binary": f"{STEM}-{self.release}-py3-none-manylinux_2_28_x86_64.whl",
        }

    @contextmanager
    def both(self, name: str) -> Iterator[Path]:
        """A file of the first build, to be changed; it is then that of the second one too."""
        yield self.one / self.names[name]
        shutil.copyfile(self.one / self.names[name], self.two / self.names[name])

    def edit(self, name: str, pattern: str, old: str, new: str) -> None:
        """Change a member of a wheel in both builds, and its RECORD."""
        with self.both(name) as path:
            files = archive.read(path)
            (member,) = [one for one in files if re.search(pattern, one)]
            changed = files[member].replace(old.encode(), new.encode())
            assert changed != files[member]
            repack(path, {**files, member: changed})

    def put_binary(self, **changes: Any) -> None:
        """The binary wheel of both builds, made again with another manifest."""
        for folder in (self.one, self.two):
            put_binary(folder, self.root, **changes)

    def record(self, **changes: Any) -> None:
        """Change the GPU record, as part of the tagged commit, and build of that."""
        record = json.loads((self.root / RECORD).read_text(encoding="utf-8"))
        binary = {key: changes.pop(key) for key in list(changes) if key in record["binaries"][0]}
        record["binaries"][0].update(binary)
        (self.root / RECORD).write_text(json.dumps({**record, **changes}), encoding="utf-8")
        self.commit()

    def commit(self) -> None:
        """Commit what was changed in the clone, move the tag there, and build of it."""
        git(self.root, "commit", "--quiet", "--all", "--message", "Changed")
        git(self.root, "tag", "--force", f"v{self.release}")
        self.put_binary()


def repack(path: Path, files: dict[str, bytes]) -> None:
    """Write a wheel of these files, with a RECORD of them."""
    info = next(name.partition("/")[0] for name in files if ".dist-info/" in name)
    files.pop(f"{info}/RECORD", None)
    archive.write(path, files, info)


def described(root: Path) -> Manifest:
    """The manifest of the binary of a checkout."""
    config = schema.read(root / schema.FILE_NAME)
    release = version.read(config, root)
    fake = replace(fake_artifacts.complete(config, "sm_80"), version=release)
    (build,) = expand_platforms(SelectionArguments(), config)
    made = source.gather(root, source.identity(build, release, fake.toolkit, lineinfo=False))
    return replace(fake, source=made)


def put_binary(folder: Path, root: Path, **changes: Any) -> Path:
    """Write the binary wheel of a checkout into a folder."""
    texts = {name: (root / name).read_bytes() for name in binary_project.license_files(root)}
    manifest = replace(described(root), **changes)
    plain = Wheel(manifest)
    metadata = f"{plain.info}/METADATA"
    listed = "".join(f"License-File: {name}\n" for name in texts)
    text = plain.files()[metadata].decode().replace("License-File: LICENSE\n", listed)
    licenses = {f"{plain.info}/licenses/{name}": content for name, content in texts.items()}
    return Wheel(manifest, more={metadata: text.encode(), **licenses}).write(folder)


def put_own(case: Case) -> None:
    """The sdist and the project's own wheel of both builds, made again."""
    for make_one in wheel.makers(case.config, case.root).values():
        made = make_one(case.one)
        shutil.copyfile(made, case.two / made.name)


def record_of(made: SourceRevision) -> dict[str, Any]:
    """What a run of every test on a device of capability 8.0 left behind."""
    device = {"name": "NVIDIA A100", "capability": [8, 0]}
    binary = {
        "architecture": "sm_80",
        "code_kinds": ["sass", "ptx"],
        "version": "0.1.0+ptx",
        "source": {"revision": made.revision, "dirty": made.dirty, "hash": "1" * 64},
        "toolkit": {"compiler": "nvcc", "version": "13.0.88"},
    }
    return {
        "left_to_other_shards": 0,
        "forced_architecture": None,
        "system": {"devices": [device], "platform": "linux_x86_64", "interpreted": False},
        "binaries": [binary],
        "counts": {"passed": 25, "skipped": 1},
        "counts_by_file": {
            "test_attention_features.py cuda": {"passed": 9, "skipped": 1},
            "test_causal_conv1d.py other": {"passed": 3},
            "test_gated_delta_rule_compiled.py other": {"passed": 3},
            "test_merge_states.py cuda": {"passed": 3},
            "test_attention_features.py triton": {"passed": 7},
        },
        "columns": ["case", "outcome"],
        "cases": [],
    }


def make(folder: Path) -> Case:
    """The project, tagged, and two builds of it."""
    text = (ROOT / "variants.toml").read_text(encoding="utf-8")
    text = re.sub(r"^sm_(?!80)\d+ = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r", toolkits = \{[^}]*\}", "", text)
    text = re.sub(r"^smoke = .*$", 'smoke = "fake_smoke.py"', text, flags=re.MULTILINE)
    # Each case is a clone, which takes as long as it has files: not those that nothing here reads.
    more = ("benchmarks/", "docs/", "examples/", "tests/")
    root = committed_copy(folder / "project", {"variants.toml": text.encode()}, without=more)
    release = version.read(schema.read(root / schema.FILE_NAME), root)
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    changes = changes.replace("## Unreleased", f"## {release} - 2026-01-31", 1)
    (root / "CHANGELOG.md").write_text(changes, encoding="utf-8")
    (root / "fake_smoke.py").write_text(SMOKE, encoding="utf-8")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "The sources")
    record = json.dumps(record_of(source.gather(root, "")))
    (root / RECORDS).mkdir(parents=True)
    (root / RECORD).write_text(record, encoding="utf-8")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Its record")
    git(root, "tag", f"v{release}")
    case = Case(root, folder / "one", folder / "two", release)
    case.one.mkdir()
    case.two.mkdir()
    put_own(case)
    case.put_binary()
    return case


def clone(case: Case, folder: Path) -> Case:
    """The same in a fresh clone, with copies of the files."""
    # Without the 256 folders of objects and the samples of hooks, which take longest to remove.
    words = ("--quiet", "--shared", "--template=", str(case.root), str(folder / "clone"))
    git(folder, "clone", *words)
    return copied(replace(case, root=folder / "clone"), folder)


def copied(case: Case, folder: Path) -> Case:
    """The same with copies of the files; what is tagged and checked stays where it is."""
    own = replace(case, one=folder / "one", two=folder / "two")
    shutil.copytree(case.one, own.one)
    shutil.copytree(case.two, own.two)
    return own
