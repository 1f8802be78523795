"""What an op adds lies in its own folders, variants.toml and one line of the table of ops.

Attention alone is also named by what stands in for attention of other packages. The page on adding
an op counts the files.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from flashvar.ops import TABLE

ROOT = Path(__file__).parents[2]
TABLE_FILE = "src/python/flashvar/ops/__init__.py"
OPS = [op for op in TABLE if op != "attention"]
PACKAGE = "src/python/flashvar"
# What stands in for other packages, and layers, are made of ops.
USERS = (f"{PACKAGE}/compat/", f"{PACKAGE}/integrations/xformers/", f"{PACKAGE}/layers/")
STANDS_IN = ("integrations", "compat", "layers")
# The public names.
PUBLIC = {f"{PACKAGE}/__init__.py", f"{PACKAGE}/flash_attn.py", TABLE_FILE}
# Attention by name, its axes, its masks and its score modifiers.
OF_ATTENTION = re.compile(
    r"attention|head.?dim|\bhdim|\bmask|softcap|alibi|dropout|sliding|\bcausal\b|\bkv\b",
    re.IGNORECASE,
)
# Pages, and tests of what all ops share, that have something of every op.
OF_EVERY_OP = (
    *(f"docs/{page}.md" for page in ("comparison", "performance", "support")),
    "README.md",
    "mkdocs.yml",
    "tests/gpu/sanitized.py",
    *(f"tests/unit/ops/test_{name}.py" for name in ("profiles", "torch_tools")),
    "tests/unit/cli/test_verify.py",
    "tests/integrations/sharded_linear.py",
)
# Likewise of every op that binaries have: of its C functions, and of its records of GPU tests.
OF_EVERY_COMPILED_OP = (
    "docs/abi.md",
    "tests/kernels/abi_calls.py",
    "tests/kernels/test_abi_calls.py",
    *(f"tests/packaging/{name}.py" for name in ("fake_release", "test_check_release")),
)
# The page, and the op that it counts the files of.
PAGE = ROOT / "docs" / "adding-an-op.md"
OP = "merge_states"
# The files of each step: their names, as far as a pattern says them.
STEPS = {
    2: rf"{PACKAGE}/ops/{OP}/spec\.py",
    4: rf"{PACKAGE}/ops/{OP}/(?!spec|verify|warmup|speed).*",
    5: rf"{PACKAGE}/ops/{OP}/(verify|warmup|speed)\.py",
    6: rf"{PACKAGE}/backends/reference/{OP}/.*",
    7: rf"{PACKAGE}/backends/triton/{OP}/.*",
    8: rf"src/cuda/abi/{OP}\.h",
    9: rf"src/cuda/abi/{OP}_.*",
    10: rf"src/cuda/{OP}/.*",
    11: rf"src/cuda/sm90/{OP}/.*",
    12: rf"{PACKAGE}/backends/cuda/{OP}\.py",
    13: rf"tests/.*/\w*{OP}\w*\.py",
}
SHARED = {*OF_EVERY_OP, *OF_EVERY_COMPILED_OP}
TESTS = {file for file in SHARED if file.startswith("tests/")}
OWN_PAGE = f"docs/api/{OP.replace('_', '-')}.md"
# Tests of compiled kernels alone.
COMPILED = re.compile(rf"tests/.*/(host_{OP}|test_{OP}_(kernels|params))\.py")


def tracked(*folders: str) -> list[str]:
    """Every file of some folders or of all, as git knows them or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def sources() -> list[str]:
    return tracked("src")


def is_own(file: str, op: str) -> bool:
    """A file in a folder of the op's name, or whose name begins with it."""
    *folders, name = file.split("/")
    return op in folders or bool(re.match(rf"{op}(_|\.)", name))


def is_compiled(op: str) -> bool:
    return f"[ops.{op}_" in (ROOT / "variants.toml").read_text()


@pytest.mark.parametrize("op", OPS)
def test_no_other_file_names_the_op(op: str) -> None:
    # A single short word may be a part of other words.
    whole = op.replace("_", "[_ ]?") if "_" in op else rf"(?<![a-z]){op}(?![a-z])"
    spelled = re.compile(whole, re.IGNORECASE)
    named = {
        file
        for file in sources()
        if not file.startswith(USERS)
        and (
            spelled.search((ROOT / file).read_text(encoding="utf-8", errors="replace"))
            or spelled.search(file)
        )
    }
    own = {file for file in named if is_own(file, op)}
    assert named - own == {TABLE_FILE}
    # An op that binaries are built for has sources for them.
    assert any(file.startswith("src/cuda/") for file in own) is is_compiled(op)
    lines = [line for line in (ROOT / TABLE_FILE).read_text().splitlines() if op in line]
    # The types, a name each in __all__, and the entry.
    assert len(lines) <= 2 + len(TABLE[op])


def test_shared_kernel_code_is_of_no_op() -> None:
    """What kernels of several ops include names neither attention nor what it alone has."""
    shared = [
        file
        for file in sources()
        if file.startswith("src/cuda/") and not any(is_own(file, op) for op in TABLE)
    ]
    assert {"src/cuda/abi/flashvar.h", "src/cuda/sm90/pipeline.cuh"} <= set(shared)
    found = {
        f"{file}:{number}: {line.strip()}"
        for file in shared
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if OF_ATTENTION.search(line)
    }
    assert found == set()


def of_the_runtime() -> list[str]:
    return [file for file in sources() if file.startswith(f"{PACKAGE}/") and file.endswith(".py")]


def folders_of_ops(file: str) -> set[str]:
    """The ops in whose folders a file lies, also those that are not in the table."""
    *folders, name = file.removeprefix(f"{PACKAGE}/").split("/")
    ops = {path.name for path in (ROOT / PACKAGE / "ops").iterdir() if path.is_dir()}
    return ops & {*folders, name.removesuffix(".py")}


def test_attention_is_named_where_it_is_served_alone() -> None:
    found = {
        f"{file}:{number}: {line.strip()}"
        for file in of_the_runtime()
        if file not in PUBLIC
        and not folders_of_ops(file)
        and not file.removeprefix(f"{PACKAGE}/").startswith(STANDS_IN)
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if OF_ATTENTION.search(line)
    }
    assert found == set()


def test_ops_do_not_import_one_another() -> None:
    imported = re.compile(r"flashvar\.(?:ops|backends\.\w+)\.(\w+)")
    ops = {path.name for path in (ROOT / PACKAGE / "ops").iterdir() if path.is_dir()}
    found = {
        (file, name)
        for file in of_the_runtime()
        if (own := folders_of_ops(file))
        and not file.removeprefix(f"{PACKAGE}/").startswith("compat")
        for name in imported.findall((ROOT / file).read_text())
        if name in ops - own
    }
    assert found == set()


def test_kernels_of_ops_do_not_include_one_another() -> None:
    included = re.compile(r'#include "([^"]+)"')
    found = {
        (file, header)
        for file in sources()
        if file.startswith("src/cuda/")
        for header in included.findall((ROOT / file).read_text())
        for op in TABLE
        if is_own(header, op) and not is_own(file, op)
    }
    assert found == set()


def lacking(file: str, ops: Iterable[str]) -> list[str]:
    """The ops that a file does not name."""
    text = (ROOT / file).read_text()
    return [op for op in ops if not re.search(op.replace("_", "[_-]"), text)]


@pytest.mark.parametrize("file", OF_EVERY_OP)
def test_what_is_of_every_op_has_each(file: str) -> None:
    assert lacking(file, TABLE) == []


@pytest.mark.parametrize("file", OF_EVERY_COMPILED_OP)
def test_what_is_of_every_compiled_op_has_each(file: str) -> None:
    assert lacking(file, filter(is_compiled, TABLE)) == []


@pytest.mark.parametrize("op", TABLE)
def test_an_op_has_tests_of_its_own(op: str) -> None:
    """A release needs a record of those on a GPU."""
    for folders in (("kernels", "unit"), ("gpu",)):
        paths = (ROOT / "tests" / folder for folder in folders)
        assert [file for path in paths for file in path.rglob(f"test_{op}*.py")] != []


@pytest.fixture(scope="module")
def files() -> list[str]:
    return tracked()


def of_step(files: list[str], step: int) -> set[str]:
    return {name for name in files if re.fullmatch(STEPS[step], name)}


def counted(beginning: str) -> list[int]:
    """The numbers that the cells of a row begin with, after the cell that begins like this."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {beginning}")]
    numbers = (re.match(r"\d+", cell.strip()) for cell in re.split(r"(?<!\\)\|", row)[2:])
    return [int(number[0]) for number in numbers if number]


@pytest.mark.parametrize("step", STEPS)
def test_files_of_a_step(step: int, files: list[str]) -> None:
    assert counted(f"{step}. ") == [len(of_step(files, step))]


def test_files_of_what_all_ops_share() -> None:
    assert counted("14. ") == [len(TESTS)]
    assert counted("15. ") == [1 + len(SHARED - TESTS)]


def test_files_of_an_op(files: list[str]) -> None:
    families = {name for name in files if re.fullmatch(rf"src/cuda/sm\d+/{OP}/.*", name)}
    own = set().union(*(of_step(files, step) for step in STEPS)) | families | {OWN_PAGE}
    # And variants.toml and ops/__init__.py.
    assert counted("an op as large as") == [len(own), 2 + len(SHARED)]


def test_files_of_an_op_without_cuda_kernels(files: list[str]) -> None:
    own = set().union(*(of_step(files, step) for step in (2, 4, 5, 6, 7, 13))) | {OWN_PAGE}
    own = {name for name in own if not COMPILED.fullmatch(name)}
    # And ops/__init__.py and test_doctor.py.
    assert counted("an op without CUDA kernels") == [len(own), 2 + len(OF_EVERY_OP)]
