"""The project's own wheel and its sdist against a checkout: each planted fault is found."""

from __future__ import annotations

import gzip
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from audited import faults
from committed import commit_all

from flashvar_factory.audit import expectations, source_checks
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.finding import where_they_differ
from flashvar_factory.config import extras, schema
from flashvar_factory.inspect import archive

ROOT = Path(__file__).parents[3]
CONFIG = schema.read(ROOT / "variants.toml")
NAME, INFO, STEM = "flashvar-1.0-py3-none-any.whl", "flashvar-1.0.dist-info", "flashvar-1.0"
PYPROJECT = """\
[project]
name = "flashvar"
description = "Attention kernels"
keywords = ["attention", "cuda"]
classifiers = ["Typing :: Typed"]
dynamic = ["version", "readme", "optional-dependencies"]
license-files = ["LICENSE"]
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["torch>=2.8"]

[project.scripts]
flashvar = "flashvar.cli:main"

[tool.scikit-build]
wheel.packages = ["src/python/flashvar"]
"""
FACTORY = """\
[project]
name = "flashvar-factory"
dynamic = ["version"]
readme = "README.md"
license = "Apache-2.0"
dependencies = ["packaging"]

[project.optional-dependencies]
audit = ["zstandard; python_version < '3.14' or os_name == 'nt'"]

[project.scripts]
wheel-factory = "wheel_factory:main"

[tool.scikit-build]
wheel.packages = ["../../src/python/wheel_factory"]

[tool.scikit-build.wheel.force-include]
"../../src/python/flashvar" = "wheel_factory/home/flashvar"
"../../variants.toml" = "wheel_factory/home/variants.toml"
"""
MODULES = {"__init__.py": "", "_version.py": '__version__ = "1.0"\n', "cli.py": "main = None\n"}
WHEEL = "Wheel-Version: 1.0\nGenerator: scikit-build-core 1.1.2\nRoot-Is-Purelib: true\n"
Files = dict[str, bytes]

pytestmark = pytest.mark.usefixtures("auditwheel")


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project with the real variants.toml."""
    root = tmp_path_factory.mktemp("committed")
    files = {
        "pyproject.toml": PYPROJECT,
        "variants.toml": (ROOT / "variants.toml").read_text(encoding="utf-8"),
        "LICENSE": "Apache\n",
        "README.md": "[Text](docs/text.md).\n",  # an index is told no address that it lacks
        "packages/factory/README.md": "Wheels.\n",
        "packages/factory/pyproject.toml": FACTORY,
        "src/python/wheel_factory/__init__.py": "",
        "CMakeLists.txt": "project(x)\n",
        **{f"src/python/flashvar/{name}": text for name, text in MODULES.items()},
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    commit_all(root)
    return root


@pytest.fixture
def checkout(committed: Path, tmp_path: Path) -> Path:
    """A copy of it, to plant faults in."""
    return shutil.copytree(committed, tmp_path / "checkout")


def metadata() -> str:
    lines = ["Metadata-Version: 2.4", "Name: flashvar", "Version: 1.0"]
    lines += ["Summary: Attention kernels", "Keywords: attention,cuda"]
    lines += ["Classifier: Typing :: Typed", "Description-Content-Type: text/markdown"]
    lines += ["License-Expression: Apache-2.0", "License-File: LICENSE", "Requires-Python: >=3.10"]
    lines.append("Requires-Dist: torch>=2.8")
    for extra, requirements in extras.extras(CONFIG, "1.0").items():
        lines.append(f"Provides-Extra: {extra}")
        for one in requirements:
            joint = " and" if ";" in one else ";"
            lines.append(f'Requires-Dist: {one}{joint} extra == "{extra}"')
    return "\n".join([*lines, "", "Text.", ""])


def pure() -> Files:
    """The files of the wheel, without a fault."""
    files = {f"flashvar/{name}": text for name, text in MODULES.items()}
    files |= {
        f"{INFO}/METADATA": metadata(),
        f"{INFO}/WHEEL": f"{WHEEL}Tag: py3-none-any\n",
        f"{INFO}/entry_points.txt": "[console_scripts]\nflashvar = flashvar.cli:main\n",
        f"{INFO}/licenses/LICENSE": "Apache\n",
    }
    return {name: text.encode() for name, text in files.items()}


def expected(root: Path) -> Expectations:
    return expectations.of(CONFIG, root=root)


def edit(name: str, old: str, new: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        text = files[name].decode()
        assert old in text
        files[name] = text.replace(old, new, 1).encode()

    return change


def add(name: str, content: bytes = b"x = 1\n") -> Callable[[Files], None]:
    return lambda files: files.update({name: content})


def remove(name: str) -> Callable[[Files], None]:
    return lambda files: files.pop(name) and None


METADATA = f"{INFO}/METADATA"
FAULTS: dict[str, tuple[Callable[[Files], None], str]] = {
    "path file": (add("flashvar.pth"), "found others too: 'flashvar.pth'"),
    "sitecustomize": (add("sitecustomize.py"), "found others too: 'sitecustomize.py'"),
    "foreign package": (add("torch/__init__.py"), "found others too: 'torch/__init__.py'"),
    "module of nobody": (add("flashvar/evil.py"), "found others too: 'flashvar/evil.py'"),
    "data": (add(f"{STEM}.data/scripts/pip"), "found others too: 'flashvar-1.0.data/scripts/pip'"),
    "library": (add("flashvar/evil.so", b"\x7fELF" + bytes(60)), "expected a 64-bit little-endian"),
    "module less": (remove("flashvar/cli.py"), "found these missing: 'flashvar/cli.py'"),
    "no license": (remove(f"{INFO}/licenses/LICENSE"), "licenses/LICENSE"),
    "other license": (edit(f"{INFO}/licenses/LICENSE", "Apache", "MIT"), "found other content in"),
    "other bytes": (
        edit("flashvar/cli.py", "None", "1   "),
        "found other content in 'flashvar/cli.py'",
    ),
    "no module": (edit("flashvar/cli.py", "=", "("), "expected a module that compiles"),
    "NUL in a module": (add("flashvar/cli.py", b"\0"), "expected a module that compiles"),
    "version": (edit(METADATA, "Version: 1.0\nS", "Version: 1.1\nS"), "expected version '1.0'"),
    "requirement": (
        edit(METADATA, "Requires-Dist: torch", "Requires-Dist: evil\nRequires-Dist: torch"),
        "expected requirements '', found 'evil'",
    ),
    "no requirement": (
        edit(METADATA, "Requires-Dist: torch>=2.8\n", ""),
        "expected requirements 'torch>=2.8', found ''",
    ),
    "extra of another version": (edit(METADATA, "sm80==1.0", "sm80==0.9"), "flashvar-sm80==0.9"),
    "extra of another distribution": (edit(METADATA, "flashvar-sm80=", "evil="), "evil==1.0"),
    "no extra": (edit(METADATA, "Provides-Extra: cuda\n", ""), "expected extras"),
    "other Python": (edit(METADATA, ">=3.10", ">=3.6"), "expected Python '>=3.10'"),
    "license": (edit(METADATA, "Apache-2.0", "MIT"), "expected license 'Apache-2.0'"),
    "another script": (
        edit(f"{INFO}/entry_points.txt", "flashvar =", "pip = evil:main\nflashvar ="),
        "expected entry points",
    ),
    "a plugin": (
        edit(f"{INFO}/entry_points.txt", "[console", "[pytest11]\nx = y\n[console"),
        "expected entry points",
    ),
    "name in capitals": (edit(METADATA, "Name: f", "Name: F"), "expected name 'flashvar'"),
    "version spelled otherwise": (
        edit(METADATA, "\nVersion: 1.0", "\nVersion: v1.0"),
        "expected version '1.0', found 'v1.0'",
    ),
    "summary": (edit(METADATA, "kernels", "miners"), "expected summary 'Attention kernels'"),
    "keywords": (edit(METADATA, ",cuda", ",torch"), "expected keywords"),
    "classifier": (edit(METADATA, ":: Typed", ":: Stubs"), "expected classifiers"),
    "description": (edit(METADATA, "Text.", "Buy now."), "expected description 'Text.'"),
    "description of another kind": (
        edit(METADATA, "text/markdown", "text/x-rst"),
        "expected description content type 'text/markdown', found 'text/x-rst'",
    ),
    "address": (
        edit(METADATA, "Keywords", "Project-URL: Homepage, https://example.org\nKeywords"),
        "expected project urls None",
    ),
    "author": (edit(METADATA, "Keywords", "Author: A\nKeywords"), "expected author None"),
    "obsoletes": (
        edit(METADATA, "Keywords", "Obsoletes-Dist: torch\nKeywords"),
        "expected obsoletes dist None, found ['torch']",
    ),
    "module that is compiled already": (
        add("flashvar/__pycache__/cli.cpython-311.pyc"),
        "found others too: 'flashvar/__pycache__",
    ),
    "requirement twice": (
        edit(METADATA, "Requires-Dist: torch", "Requires-Dist: torch>=2.8\nRequires-Dist: torch"),
        "expected requirements '', found 'torch>=2.8'",
    ),
    "requirement of some systems": (
        edit(METADATA, "torch>=2.8\n", 'torch>=2.8; sys_platform == "linux"\n'),
        "expected requirements 'torch>=2.8', found 'torch>=2.8; sys_platform",
    ),
    "script of an extra": (
        edit(f"{INFO}/entry_points.txt", "cli:main", "cli:main [evil]"),
        "expected entry points",
    ),
    "script in a window": (
        edit(f"{INFO}/entry_points.txt", "[console", "[gui_scripts]\n[console"),
        "expected entry points",
    ),
    "script in a group with spaces": (
        edit(f"{INFO}/entry_points.txt", "[console_scripts]", "[ console_scripts ]"),
        "expected entry points",
    ),
    "dynamic": (edit(METADATA, "Keywords", "Dynamic: Version\nKeywords"), "metadata"),
    "unknown coding": (
        add("flashvar/cli.py", b"# coding: evil\nmain = None\n"),
        "expected a module that compiles",
    ),
    "slow coding": (
        add("flashvar/cli.py", b"# coding: punycode\n-" + b"a" * 1_000_000),
        "expected a module that compiles, found: the encoding punycode",
    ),
    "deep module": (
        add("flashvar/cli.py", b"-" * 100_000 + b"1"),
        "expected a module that compiles",
    ),
    "not pure": (edit(f"{INFO}/WHEEL", "true", "false"), "expected fields"),
    "tag": (edit(f"{INFO}/WHEEL", "py3-none-any", "py3-none-linux_x86_64"), "expected tags"),
}


def test_nothing_against_the_wheel(checkout: Path, tmp_path: Path) -> None:
    archive.write(tmp_path / NAME, pure(), INFO)
    assert faults(tmp_path / NAME, expected(checkout)) == []


@pytest.mark.parametrize("table", ["", '[project.entry-points.x]\na = "b"\n'])
def test_other_entry_points_than_scripts(table: str, checkout: Path, tmp_path: Path) -> None:
    declared = re.sub(r'.project.scripts.\n.*"\n', table, PYPROJECT)
    (checkout / "pyproject.toml").write_text(declared, encoding="utf-8")
    files = {**pure(), f"{INFO}/entry_points.txt": b"[x]\na = b\n"}
    if not table:
        del files[f"{INFO}/entry_points.txt"]
    archive.write(tmp_path / NAME, files, INFO)
    assert faults(tmp_path / NAME, expected(checkout)) == []


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(
    plant: Callable[[Files], None], sentence: str, checkout: Path, tmp_path: Path
) -> None:
    files = pure()
    plant(files)
    archive.write(tmp_path / NAME, files, INFO)
    found = faults(tmp_path / NAME, expected(checkout))
    assert any(sentence in fault for fault in found), found


def of_the_factory() -> Files:
    """The files of the wheel beside the project's own, without a fault."""
    info = "flashvar_factory-1.0.dist-info"
    lines = ["Metadata-Version: 2.4", "Name: flashvar-factory", "Version: 1.0"]
    lines += ["License-Expression: Apache-2.0", "Requires-Dist: packaging", "Provides-Extra: audit"]
    lines.append("Description-Content-Type: text/markdown")
    marker = "(python_version < '3.14' or os_name == 'nt') and extra == 'audit'"
    lines.append(f"Requires-Dist: zstandard; {marker}")
    files = {f"wheel_factory/home/flashvar/{name}": text for name, text in MODULES.items()}
    files |= {
        "wheel_factory/__init__.py": "",
        "wheel_factory/home/variants.toml": (ROOT / "variants.toml").read_text(encoding="utf-8"),
        f"{info}/METADATA": "\n".join([*lines, "", "Wheels.", ""]),
        f"{info}/WHEEL": f"{WHEEL}Tag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nwheel-factory = wheel_factory:main\n",
    }
    return {name: text.encode() for name, text in files.items()}


OF_THE_FACTORY: dict[str, tuple[Callable[[Files], None], str]] = {
    "path file": (add("factory.pth"), "found others too: 'factory.pth'"),
    "module of nobody": (add("wheel_factory/evil.py"), "others too: 'wheel_factory/evil.py'"),
    "other bytes": (
        add("wheel_factory/__init__.py"),
        "other content in 'wheel_factory/__init__.py'",
    ),
    "other file": (add("wheel_factory/home/variants.toml"), "found other content in"),
    "file less": (remove("wheel_factory/home/flashvar/cli.py"), "found these missing:"),
    "no module": (add("wheel_factory/__init__.py", b"("), "expected a module that compiles"),
    "requirement": (
        edit("flashvar_factory-1.0.dist-info/METADATA", "packaging", "evil"),
        "expected requirements 'packaging', found 'evil'",
    ),
    "description": (
        edit("flashvar_factory-1.0.dist-info/METADATA", "Wheels.", "Buy now."),
        "expected description 'Wheels.', found 'Buy now.'",
    ),
    "script": (
        edit("flashvar_factory-1.0.dist-info/entry_points.txt", "wheel-f", "pip = x:y\nwheel-f"),
        "expected entry points",
    ),
}


def audited_factory(checkout: Path, folder: Path, plant: Callable[[Files], None]) -> list[str]:
    files = of_the_factory()
    plant(files)
    path = folder / "flashvar_factory-1.0-py3-none-any.whl"
    archive.write(path, files, "flashvar_factory-1.0.dist-info")
    return faults(path, expected(checkout))


def test_of_long_texts_the_difference_is_shown() -> None:
    text = "same " * 1000
    found = where_they_differ(f"{text}right {text}", f"{text}wrong {text}")
    assert [str(part)[43:48] for part in found] == ["right", "wrong"]
    assert max(len(str(part)) for part in found) < 200
    assert where_they_differ("a", "b") == ("a", "b")
    assert where_they_differ(None, text) == (None, text)


def test_nothing_against_the_factory(checkout: Path, tmp_path: Path) -> None:
    assert audited_factory(checkout, tmp_path, lambda files: None) == []


@pytest.mark.parametrize(("plant", "sentence"), OF_THE_FACTORY.values(), ids=OF_THE_FACTORY)
def test_fault_of_the_factory(
    plant: Callable[[Files], None], sentence: str, checkout: Path, tmp_path: Path
) -> None:
    found = audited_factory(checkout, tmp_path, plant)
    assert any(sentence in fault for fault in found), found


def packed(root: Path, folder: Path, plant: Callable[[Files], None]) -> Path:
    """The sdist of a checkout, with a fault."""
    names = subprocess.run(
        ["git", "-C", str(root), "ls-files"], check=True, capture_output=True, text=True
    )
    files = {name: (root / name).read_bytes() for name in names.stdout.split()}
    files["PKG-INFO"] = metadata().encode()
    plant(files)
    path = folder / f"{STEM}.tar.gz"
    with tarfile.open(path, "w:gz") as opened:
        for name, content in files.items():
            info = tarfile.TarInfo(name if name.startswith("/") else f"{STEM}/{name}")
            info.size = len(content)
            if name.endswith(".link"):
                info.type, info.linkname, info.size = tarfile.SYMTYPE, "/etc/passwd", 0
            opened.addfile(info, io.BytesIO(content))
    return path


SDISTS: dict[str, tuple[Callable[[Files], None], str]] = {
    "file of nobody": (add("setup.py"), "found others too: 'setup.py'"),
    "other bytes": (edit("CMakeLists.txt", "x", "y"), "found other content in 'CMakeLists.txt'"),
    "file less": (remove("CMakeLists.txt"), "found these missing: 'CMakeLists.txt'"),
    "module less": (remove("src/python/flashvar/cli.py"), "found these missing: 'src/python"),
    "no license": (remove("LICENSE"), "found these missing: 'LICENSE'"),
    "no readme": (remove("README.md"), "found these missing: 'README.md'"),
    "no PKG-INFO": (remove("PKG-INFO"), "expected valid core metadata"),
    "other name": (edit("PKG-INFO", "Name: flashvar", "Name: evil"), "found evil 1.0"),
    "other version": (edit("PKG-INFO", "Version: 1.0", "Version: 1.1"), "found flashvar 1.1"),
    "requirement": (
        edit("PKG-INFO", "Requires-Dist: torch", "Requires-Dist: evil\nRequires-Dist: torch"),
        "expected requirements '', found 'evil'",
    ),
    "extra": (edit("PKG-INFO", "Provides-Extra: cuda\n", ""), "expected extras"),
    "summary": (edit("PKG-INFO", "kernels", "miners"), "expected summary 'Attention kernels'"),
    "link": (add("a.link"), "no regular file"),
    "dots": (add("../a"), "a path with '..'"),
    "absolute": (add("/a"), "elsewhere"),
    "bomb": (add("a", bytes(50_000_000)), "bytes of files"),
}


def member(name: str, content: bytes = b"", **changes: object) -> Callable[[tarfile.TarFile], None]:
    """A member more, with these fields in its header."""

    def change(opened: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for key, value in changes.items():
            setattr(info, key, value)
        opened.addfile(info, io.BytesIO(content))

    return change


def headers(name: str, value: str) -> Callable[[tarfile.TarFile], None]:
    """A member more, with a field of PAX."""
    return member(f"{STEM}/a", pax_headers={name: value})


TARS: dict[str, tuple[Callable[[tarfile.TarFile], None], str]] = {
    "folder elsewhere": (member(f"{STEM}/../evil", type=tarfile.DIRTYPE), "a path with '..'"),
    "folder beside": (member("evil", type=tarfile.DIRTYPE), "elsewhere"),
    "folder that everyone writes to": (
        member(f"{STEM}/a", type=tarfile.DIRTYPE, mode=0o777),
        "the mode drwxrwxrwx",
    ),
    "program with its owner's rights": (member(f"{STEM}/a", mode=0o4755), "the mode -rwsr-xr-x"),
    "hard link": (
        member(f"{STEM}/a", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        "no regular file",
    ),
    "device": (member(f"{STEM}/a", type=tarfile.CHRTYPE), "no regular file"),
    "named pipe": (member(f"{STEM}/a", type=tarfile.FIFOTYPE), "no regular file"),
    "kind of nobody": (member(f"{STEM}/a", type=b"Z"), "no regular file"),
    "sparse": (headers("GNU.sparse.map", "0,1"), "no regular file"),
    "path of PAX": (headers("path", "/etc/passwd"), "elsewhere"),
    "capability of PAX": (
        headers("SCHILY.xattr.security.capability", "x"),
        "SCHILY.xattr.security.capability=x",
    ),
    "size of PAX": (headers("size", "99999999999"), "size=99999999999"),
    "twice": (member(f"{STEM}/PKG-INFO"), "'flashvar-1.0/PKG-INFO' twice"),
    "device of Windows": (member(f"{STEM}/aux.py"), "a name that is a device"),
}


@pytest.mark.parametrize(("plant", "sentence"), TARS.values(), ids=TARS)
def test_fault_of_a_member_of_an_sdist(
    plant: Callable[[tarfile.TarFile], None], sentence: str, checkout: Path, tmp_path: Path
) -> None:
    path = packed(checkout, tmp_path, lambda files: None)
    content = gzip.decompress(path.read_bytes())
    target = io.BytesIO(content)
    with tarfile.open(fileobj=target, mode="a:", format=tarfile.PAX_FORMAT) as opened:
        plant(opened)
    path.write_bytes(gzip.compress(target.getvalue()))
    found = [str(one) for one in source_checks.audit_sdist(path, expected(checkout))]
    assert any(sentence in fault for fault in found), found


def behind(content: bytes) -> bytes:
    return content + content


def damaged(content: bytes) -> bytes:
    """A header that is none: some readers end here, others go on."""
    with tarfile.open(fileobj=io.BytesIO(content)) as opened:
        last = opened.getmembers()[-1].offset
    return content[:last] + b"x" * 8 + content[last + 8 :]


def in_a_gap(content: bytes) -> bytes:
    """Bytes between the content of a file and the next header."""
    with tarfile.open(fileobj=io.BytesIO(content)) as opened:
        first = opened.getmembers()[0]
    end = first.offset_data + first.size
    return content[:end] + b"x" + content[end + 1 :]


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "archive behind": (behind, "no zeros alone after its last file"),
    "damaged header": (damaged, "with a wrong checksum"),
    "bytes in a gap": (in_a_gap, "bytes behind its content"),
}


@pytest.mark.parametrize(("change", "sentence"), BYTES.values(), ids=BYTES)
def test_fault_of_the_bytes_of_an_sdist(
    change: Callable[[bytes], bytes], sentence: str, checkout: Path, tmp_path: Path
) -> None:
    path = packed(checkout, tmp_path, lambda files: None)
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
    found = [str(one) for one in source_checks.audit_sdist(path, expected(checkout))]
    assert any(sentence in fault for fault in found), found


def test_nothing_against_the_sdist(checkout: Path, tmp_path: Path) -> None:
    path = packed(checkout, tmp_path, lambda files: None)
    assert source_checks.audit_sdist(path, expected(checkout)) == []


@pytest.mark.parametrize(("plant", "sentence"), SDISTS.values(), ids=SDISTS)
def test_fault_of_an_sdist(
    plant: Callable[[Files], None], sentence: str, checkout: Path, tmp_path: Path
) -> None:
    path = packed(checkout, tmp_path, plant)
    found = [str(one) for one in source_checks.audit_sdist(path, expected(checkout))]
    assert any(sentence in fault for fault in found), found
