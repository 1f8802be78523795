"""variants.toml is read strictly: each mistake is named, with what is valid."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from matrix import CONFIG, TEXT, project

from flashvar.binaries import manifest
from flashvar.binaries.kinds import Kernel
from flashvar.errors import ConfigurationError
from flashvar_factory.config import schema
from flashvar_factory.errors import ToolchainError

FILE = Path(__file__).parents[3] / "variants.toml"


def test_reads_the_project_file() -> None:
    project = schema.read(FILE).project
    assert (project.name, project.abi) == ("flashvar", manifest.ABI)


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"], ids=["", "byte order mark"])
def test_reads_what_editors_of_windows_write(before: bytes, tmp_path: Path) -> None:
    file = project(tmp_path) / FILE.name
    expected = schema.read(file)
    file.write_bytes(before + file.read_bytes().replace(b"\n", b"\r\n"))
    assert schema.read(file) == expected


def test_reads_every_part() -> None:
    config = schema.parse(TEXT)
    assert config.default_ops == ("attention_fwd",)
    assert [axis.name for axis in config.ops["attention_fwd"].axes] == ["dtype", "head_dim"]
    assert config.ops["attention_fwd"].camel == "AttentionFwd"
    assert config.targets["sm_90"].architecture.code == "90a"
    assert config.dev.axes == {"head_dim": (64,)}


MISTAKES = {
    "unknown top key": ("schema = 1", "schema = 1\nextra = 2", ["extra", "unknown key"]),
    "unknown key of an architecture": (
        'code = "80", family',
        'code = "80", famly = "x", family',
        ["architectures.sm_80.famly", "did you mean 'family'"],
    ),
    "misspelt key of an architecture": (
        'code = "86", family',
        'code = "86", famly',
        ["architectures.sm_86.family", "famly"],
    ),
    "misspelt axis of the defaults": (
        "head_dim = [32",
        "head_dims = [32",
        ["defaults.head_dim", "head_dims"],
    ),
    "head dim not a multiple of 8": (
        "[32, 64, 96",
        "[32, 65, 96",
        ["defaults.head_dim", "65", "8"],
    ),
    "head dim over 256": ("192, 256]", "192, 264]", ["defaults.head_dim", "264", "256"]),
    "head dim as text": ("[32, 64, 96", '[32, "64", 96', ["defaults.head_dim", "'64'"]),
    "head dim twice": ("[32, 64, 96", "[32, 64, 64", ["defaults.head_dim", "once", "64"]),
    "no head dim": ("head_dim = [64]", "head_dim = []", ["dev.head_dim", "at least one"]),
    "unknown dtype": ('["bf16", "fp16"]\nhead', '["bf16", "fp8"]\nhead', ["dtype", "fp8", "bf16"]),
    "unknown op": (
        'ops = ["att',
        'ops = ["bat',
        ["batention_fwd", "did you mean 'attention_fwd'"],
    ),
    "unknown architecture for dev": ('"sm_80"\n', '"sm80"\n', ["'sm80'", "did you mean 'sm_80'"]),
    "code of another architecture": (
        'code = "89"',
        'code = "86"',
        ["sm_89.code", "a row with this is sm_86"],
    ),
    "not a code": ('code = "90a"', 'code = "hopper"', ["sm_90.code", "hopper"]),
    "suffix of later codes": (
        'code = "86"',
        'code = "86a"',
        ["sm_86.code", "no suffix, which begins with 9.0", "86a"],
    ),
    "a distribution twice": ('"flashvar-sm86"', '"flashvar-sm80"', ["distribution", "sm80"]),
    "a choice that differs in _ alone": (
        '["bf16", "fp16"] }',
        '["bf16", "fp16", "bf_16"] }',
        ["axes.dtype.choices", "more than _", "bf_16"],
    ),
    "functions of one name in C++": (
        "[architectures]",
        "[ops.add2.axes]\n[ops.add_2.axes]\n[architectures]",
        ["ops.add2", "both are Add2", "add2 and add_2"],
    ),
    "shared memory as text": ("166912", '"163 KB"', ["sm_80.shared_memory", "163 KB"]),
    "head dim of dev that is not built": (
        "head_dim = [64]",
        "head_dim = [72]",
        ["dev.head_dim", "72"],
    ),
    "schema as a truth": ("schema = 1", "schema = true", ["schema", "integer", "True"]),
    "schema as a float": ("schema = 1", "schema = 1.0", ["schema", "integer", "1.0"]),
    "little shared memory": ("= 166912", "= 1", ["sm_80.shared_memory", "16384", "found 1"]),
    "much shared memory": ("= 166912", "= 166912000", ["sm_80.shared_memory", "1048576"]),
    "odd shared memory": ("= 166912", "= 166913", ["sm_80.shared_memory", "steps of 128"]),
    "a distribution named like another architecture": (
        '"flashvar-sm86"',
        '"sm80"',
        ["sm_86.distribution: expected a name of sm_86 alone, found 'sm80'", "take for sm_80"],
    ),
    "a distribution named like a later architecture": (
        '"flashvar-sm86"',
        '"sm90a"',
        ["sm_86.distribution: expected a name of sm_86 alone, found 'sm90a'", "take for sm_90"],
    ),
    "a distribution named like a selection": (
        '"flashvar-sm86"',
        '"all"',
        ["sm_86.distribution: expected a name of sm_86 alone", "take for a selection of all"],
    ),
    "the project's own distribution": (
        '"flashvar-sm86"',
        '"flashvar"',
        ["sm_86.distribution", "the project's own"],
    ),
    "a project that is a keyword": ('name = "flashvar"', 'name = "class"', ["name", "C++"]),
    "a family that is a keyword": ('family = "sm80"', 'family = "new"', ["sm_80.family", "C++"]),
    "an op of other letters": ("ops.attention_fwd", '"ops"."größe"', ["größe", "a-z"]),
    "an axis that is a keyword": ("dtype = { ch", "int = { ch", ["axes.int", "C++"]),
    "an axis of other letters": ("dtype = { ch", '"ärt" = { ch', ["ärt", "a-z"]),
    "a choice that is no name": ('choices = ["bf16"', 'choices = ["bf-16"', ["choices", "bf-16"]),
    "an axis named like a word": ("dtype = { ch", "arch = { ch", ["axes.arch", "jobs", "ptx"]),
    "an axis named like a key": ("dtype = { ch", "tile = { ch", ["axes.tile", "threads"]),
    "an axis named like an op": (
        "dtype = { ch",
        "attention_fwd = { ch",
        ["axes.attention_fwd", "none of"],
    ),
    "own default of an unknown axis": (
        "[ops.att",
        "[defaults.attention_fwd]\nhead_dims = [64]\n[ops.att",
        ["defaults.attention_fwd.head_dims", "did you mean 'head_dim'"],
    ),
    "own default out of range": (
        "[ops.att",
        "[defaults.attention_fwd]\nhead_dim = [65]\n[ops.att",
        ["defaults.attention_fwd.head_dim", "65", "steps of 8"],
    ),
    "defaults of an unknown op": (
        "[ops.att",
        "[defaults.attention_fdw]\nhead_dim = [64]\n[ops.att",
        ["defaults.attention_fdw", "did you mean 'attention_fwd'"],
    ),
    "another schema": ("schema = 1", "schema = 2", ["schema", "expected 1", "found 2"]),
    "not TOML": ("schema = 1", "schema 1", ["expected TOML"]),
    "an axis beyond C++": ("max = 256", f"max = {2**70}", ["head_dim.max", "from 1 to 2147483647"]),
    "an axis of too many values": (
        "min = 8, max = 256, step = 8",
        "min = 1, max = 2000000000, step = 1",
        ["head_dim.max", "at most 65,536 values", "found 2000000000"],
    ),
    "a number of 5,000 digits": ("schema = 1", f"schema = {'9' * 5000}", ["expected TOML"]),
    "deep arrays": ("schema = 1", f"schema = {'[' * 5000}", ["expected TOML"]),
    "a key of 100,000 parts": (
        "schema = 1",
        f"schema{'.a' * 100_000} = 1",
        ["at most 200 dots in line", "found 100,000; write tables"],
    ),
    "a key of 100,000 letters": (
        "schema = 1",
        f"schema = 1\n{'k' * 100_000} = 1",
        [f"{'k' * 200} ...: unknown key"],
    ),
    "an architecture twice": ("\nsm_86 =", "\nsm_80 =", ["expected TOML", "overwrite"]),
}


OP = "[ops.attention_fwd.axes]"
BUDGETS = {
    "no integer": ('"x"', ["spill_bytes: expected an integer from 1", "or a table", "found 'x'"]),
    "no table of an axis": ("{ head_dim = 8 }", ["head_dim: expected a table, found 8"]),
    "unknown axis": ("{ head_dims = { 64 = 8 } }", ["head_dims: unknown key", "'head_dim'"]),
    "no axis": ("{}", ["spill_bytes: expected one axis, dtype, head_dim, found []"]),
    "two axes": (
        "{ head_dim = { 64 = 8 }, dtype = { bf16 = 8 } }",
        ["spill_bytes: expected one axis, dtype, head_dim, found ['dtype', 'head_dim']"],
    ),
    "no value": ("{ head_dim = {} }", ["spill_bytes.head_dim: expected a value of head_dim"]),
    "value that no kernel has": (
        "{ head_dim = { 65 = 8 } }",
        ["head_dim.65: expected an integer from 8 to 256 in steps of 8", "found '65'"],
    ),
    "name that no kernel has": ("{ dtype = { fp8 = 8 } }", ["dtype.fp8", "one of bf16, fp16"]),
    "bytes that are none": ("{ head_dim = { 64 = 0 } }", ["64: expected an integer from 1"]),
}


@pytest.mark.parametrize(("budget", "words"), BUDGETS.values(), ids=BUDGETS)
def test_mistake_in_a_budget_is_named(budget: str, words: list[str]) -> None:
    text = f"[ops.attention_fwd]\nspill_bytes = {budget}\n{OP}"
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(TEXT.replace(OP, text, 1))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def spill_budgets(budget: str) -> dict[str, tuple[int, str]]:
    """What each of some kernels may spill under a budget, and the key that says so."""
    pairs = TEXT.replace("step = 8 }", "step = 8, pairs = true }", 1)
    text = f"[ops.attention_fwd]\n{budget}\n{OP}"
    op = schema.parse(pairs.replace(OP, text, 1)).ops["attention_fwd"]
    pair: tuple[tuple[str, int], ...] = (("head_dim", 192), ("head_dim_v", 128))
    kernels = [Kernel(op.name, (("dtype", "bf16"), *dims)) for dims in [(("head_dim", 192),), pair]]
    return {one.name: (op.budget.of(one), op.budget.key(one)) for one in kernels}


@pytest.mark.parametrize(
    ("budget", "one", "pair"),
    [
        ("", (0, "spill_bytes"), (0, "spill_bytes")),
        ("spill_bytes = 8", (8, "spill_bytes"), (8, "spill_bytes")),
        (
            "spill_bytes = { head_dim = { 192 = 8 } }",
            (8, "spill_bytes.head_dim.192"),
            (0, "spill_bytes.head_dim.192x128"),
        ),
        (
            "spill_bytes = { head_dim = { 192x128 = 16 } }",
            (0, "spill_bytes.head_dim.192"),
            (16, "spill_bytes.head_dim.192x128"),
        ),
        (
            "spill_bytes = { dtype = { bf16 = 24 } }",
            (24, "spill_bytes.dtype.bf16"),
            (24, "spill_bytes.dtype.bf16"),
        ),
    ],
)
def test_a_budget_is_one_for_all_kernels_or_by_the_values_of_an_axis(
    budget: str, one: tuple[int, str], pair: tuple[int, str]
) -> None:
    assert spill_budgets(budget) == {
        "attention_fwd_bf16_hdim192": one,
        "attention_fwd_bf16_hdim192x128": pair,
    }


@pytest.mark.parametrize(("before", "after", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_named(before: str, after: str, words: list[str]) -> None:
    assert TEXT.count(before) >= 1
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(TEXT.replace(before, after, 1))
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("license", "Evil-1.0", "Unknown license: 'evil-1.0'"),
        ("license", "MIT OR", "expected an SPDX expression"),
        ("license", "apache-2.0", "expected the SPDX expression as 'Apache-2.0'"),
        ("version_file", "../version.py", "below its folder"),
        ("version_file", "a/../../version.py", "below its folder"),
        ("version_file", r"a\u0000b.py", "below its folder"),
        ("smoke", "../smoke.py", "below its folder"),
        ("smoke", "/smoke.py", "expected a path relative to this file"),
    ],
)
def test_values_of_the_project(key: str, value: str, words: str) -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith(f"{key} =")]
    text = "\n".join(lines).replace("[project]", f'[project]\n{key} = "{value}"')
    with pytest.raises(ConfigurationError, match=re.escape(f"project.{key}: ")) as caught:
        schema.parse(text)
    assert words in str(caught.value)


def test_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"variants\.toml: expected a readable file"):
        schema.read(tmp_path / "variants.toml")


def test_family_without_sources_is_a_configuration_error(tmp_path: Path) -> None:
    root = project(tmp_path, TEXT.replace('"86", family = "sm80"', '"86", family = "sm86"'))
    with pytest.raises(ConfigurationError, match=r"sm_86\.family.*src/cuda/sm86/attention_fwd_la"):
        schema.read(root / "variants.toml")


def test_without_a_reader_of_toml_pip_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ToolchainError, match="pip install tomli"):
        schema.parse(TEXT)


def test_defaults_of_one_op_are_its_own() -> None:
    axes = "[ops.add.axes]\nhead_dim = { min = 8, max = 512, step = 8 }\n"
    text = TEXT.replace("[ops.att", f"[defaults.add]\nhead_dim = [512, 64]\n{axes}[ops.att")
    config = schema.parse(text)
    assert config.defaults["add"] == {"head_dim": (512, 64)}
    assert config.defaults["attention_fwd"]["head_dim"] == (32, 64, 96, 128, 192, 256)
    assert set(config.axes["head_dim"]) == {32, 64, 96, 128, 192, 256, 512}


def test_launcher_of_an_op_in_a_folder() -> None:
    assert CONFIG.ops["attention_fwd"].launcher == "attention_fwd_launch"
    assert CONFIG.ops["attention_fwd"].launcher_class == "AttentionFwdLaunch"
    op = '[ops.attention_fwd]\nlauncher = "attention/fwd_launch"\n[ops.att'
    moved = schema.parse(TEXT.replace("[ops.att", op)).ops["attention_fwd"]
    assert moved.launcher == "attention/fwd_launch"
    assert moved.launcher_class == "attention::FwdLaunch"


@pytest.mark.parametrize("launcher", ["/abs", "attention/", "../up", "Attention/fwd", "a.cuh"])
def test_launcher_is_a_header_of_the_family(launcher: str) -> None:
    op = f'[ops.attention_fwd]\nlauncher = "{launcher}"\n[ops.att'
    with pytest.raises(ConfigurationError, match=r"ops\.attention_fwd\.launcher"):
        schema.parse(TEXT.replace("[ops.att", op))


def test_an_op_without_head_dims_fits() -> None:
    text = TEXT.replace('ops = ["attention_fwd"]', 'ops = ["attention_fwd", "add"]').replace(
        "[architectures]", '[ops.add.axes]\ndtype = { choices = ["bf16", "fp16"] }\n[architectures]'
    )
    config = schema.parse(text)
    assert [axis.name for axis in config.ops["add"].axes] == ["dtype"]


OLDER = """
[toolkits]
cu12 = { ptx = "8.8", ptxas = "nvidia-cuda-nvcc-cu12==12.9.86", runtime = "some-runtime==12.9.79" }
"""
ROW = 'distribution = "flashvar-sm89" }'


def rows(**keys: str) -> str:
    """The file with a toolkit, and with more keys in the row of 8.9."""
    more = "".join(f", {key} = {value}" for key, value in keys.items())
    return TEXT.replace(ROW, f"{ROW[:-2]}{more} }}") + OLDER


def test_a_toolkit_is_a_second_target_of_the_row() -> None:
    config = schema.parse(rows(ran='"ptx"', toolkits='{ cu12 = "own" }'))
    assert list(config.targets) == ["sm_80", "sm_86", "sm_89", "sm_89-cu12", "sm_90"]
    usual, older = config.targets["sm_89"], config.targets["sm_89-cu12"]
    assert (usual.toolkit, usual.ran, usual.distribution) == (None, "ptx", "flashvar-sm89")
    assert older.toolkit is not None
    assert (older.toolkit.version, older.toolkit.runtime_version) == ("12.9.86", "12.9.79")
    assert (older.ran, older.distribution) == ("own", "flashvar-sm89-cu12")
    assert config.targets["sm_86"].ran == "never"


def test_a_wheel_for_several_architectures_has_their_names() -> None:
    config = schema.parse(
        TEXT.replace('code = "86", family', 'code = "86", also = ["sm_88"], family')
    )
    assert [kind.name for kind in config.targets["sm_86"].kinds] == ["sm_86", "sm_88"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (rows(toolkits='{ cu11 = "own" }'), "sm_89.toolkits.cu11: unknown key, expected cu12"),
        (rows(toolkits='{ cu12 = "yes" }'), "sm_89.toolkits.cu12: expected one of own, ptx"),
        (rows(ran='"yes"'), "sm_89.ran: expected one of own, ptx"),
        (rows(also='["sm_90"]'), "sm_89.also: expected architectures that code 89 runs on"),
        (rows(also='["sm_87"]'), "sm_89.also: expected architectures that code 89 runs on"),
        (rows(also='["x"]'), "sm_89.also: expected architectures that code 89 runs on"),
        (
            TEXT.replace('code = "86", family', 'code = "86", also = ["sm_89"], family'),
            "architectures: expected each architecture once, as a row or under `also`",
        ),
        (TEXT + OLDER.replace("cu12 =", "old ="), "toolkits.old: expected the name cuN"),
        (TEXT + OLDER.replace("cu12 =", f"cu{'9' * 5000} ="), "expected the name cuN"),
        (
            rows(toolkits='{ cu12 = "own" }').replace('"flashvar-sm80"', '"flashvar-sm89-cu12"'),
            "sm_89.distribution: expected another name each",
        ),
        (
            rows(toolkits='{ cu12 = "own" }').replace('"flashvar-sm80"', '"sm89-cu12"'),
            "sm_80.distribution: expected a name of sm_80 alone, found 'sm89-cu12'",
        ),
        (
            TEXT.replace('code = "86", family', 'code = "86", also = ["sm_88"], family').replace(
                '"flashvar-sm89"', '"sm88"'
            ),
            "sm_89.distribution: expected a name of sm_89 alone, found 'sm88', which commands take "
            "for sm_86",
        ),
        (TEXT + OLDER.replace("cu12==12", "cu13==13"), "toolkits.cu12: expected the name cuN"),
        (TEXT + OLDER.replace("runtime==12", "runtime==11"), "cu12.runtime: expected version 12"),
        (TEXT + OLDER.replace('"8.8"', '"8"'), "cu12.ptx: expected a version of PTX"),
        (TEXT + OLDER.replace("==12.9.86", ""), "cu12.ptxas: expected a requirement"),
    ],
)
def test_mistakes_of_targets(text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(text)
    assert sentence in str(caught.value)
