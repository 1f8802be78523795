"""variants.toml is read strictly: each mistake is named, with what is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory import schema

FILE = Path(__file__).parents[2] / "variants.toml"
TEXT = FILE.read_text(encoding="utf-8")


def test_reads_the_project_file() -> None:
    config = schema.read(FILE)
    assert config.project.name == "flashvar"
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
    "code of another architecture": ('code = "89"', 'code = "86"', ["sm_89.code", "'86'"]),
    "not a code": ('code = "90a"', 'code = "hopper"', ["sm_90.code", "hopper"]),
    "a distribution twice": ('"flashvar-sm86"', '"flashvar-sm80"', ["distribution", "sm80"]),
    "shared memory as text": ("166912", '"163 KB"', ["sm_80.shared_memory", "163 KB"]),
    "head dim of dev that is not built": (
        "head_dim = [64]",
        "head_dim = [72]",
        ["dev.head_dim", "72"],
    ),
    "another schema": ("schema = 1", "schema = 2", ["schema", "expected 1", "found 2"]),
    "not TOML": ("schema = 1", "schema 1", ["expected TOML"]),
    "an architecture twice": ("\nsm_86 =", "\nsm_80 =", ["expected TOML", "overwrite"]),
}


@pytest.mark.parametrize(("before", "after", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_named(before: str, after: str, words: list[str]) -> None:
    assert TEXT.count(before) >= 1
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(TEXT.replace(before, after, 1))
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"variants\.toml: expected a readable file"):
        schema.read(tmp_path / "variants.toml")


def test_an_op_without_head_dims_fits() -> None:
    text = TEXT.replace('ops = ["attention_fwd"]', 'ops = ["attention_fwd", "add"]').replace(
        "[architectures]", '[ops.add.axes]\ndtype = { choices = ["bf16", "fp16"] }\n[architectures]'
    )
    config = schema.parse(text)
    assert [axis.name for axis in config.ops["add"].axes] == ["dtype"]
