"""What pages take from files and modules of this repository."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Final
from unittest import mock

from tables import table

from flashvar import cli, errors
from flashvar.cli.warmup import warmed_ops
from flashvar.compat.not_served import NAMES_NOT_SERVED, NOT_SERVED
from flashvar_factory import errors as factory_errors
from flashvar_factory.cli import COMMANDS

# What users import; the modules beside them are parts of these.
INTEGRATIONS: Final = ("transformers", "torch", "documents", "diffusers", "attend", "xformers")


def of_the_root(root: Path) -> dict[str, str]:
    """Pages that are files of the repository's root, their links seen from docs/."""
    named = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    texts = {}
    for file, page in named.items():
        text = (root / file).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        text = text.replace("\\|", "|")  # within code, which GitHub alone wants escaped
        for other, its_page in named.items():
            text = text.replace(f"]({other})", f"]({its_page})")
        texts[page] = text
    return texts


def integrations(root: Path) -> str:
    """Links to the pages of integrations that are there, by their titles."""
    links = []
    for path in sorted((root / "docs" / "integrations").glob("*.md")):
        if path.name != "index.md":
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            links.append(f"[{title}]({path.name})")
    return " · ".join(links)


def modules_of_integrations(root: Path) -> str:
    """Reference of each module of flashvar.integrations, for mkdocstrings."""
    folder = root / "src" / "python" / "flashvar" / "integrations"
    for name in INTEGRATIONS:
        if not ((folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()):
            raise ValueError(f"expected flashvar.integrations.{name}, found no such module")
    return "\n\n".join(f"::: flashvar.integrations.{name}" for name in INTEGRATIONS)


def stand_in(root: Path) -> str:
    """The modules of FlashAttention: what each has in flashvar's stand-in, or what serves it."""
    source = root / "src" / "python" / "flashvar" / "compat"
    rows = {}
    for path in (source / "flash_attn").rglob("*.py"):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        if names := _exported(path):
            rows[name] = ", ".join(f"`{one}`" for one in names if "install" not in one)
    missing = {**NOT_SERVED, **NAMES_NOT_SERVED}
    rows |= {name: f"missing; use {instead}" for name, instead in missing.items()}
    return table(("module", "names"), ((f"`{name}`", rows[name]) for name in sorted(rows)))


def _exported(path: Path) -> list[str]:
    """`__all__` of a file, which is not run: that would need torch."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    return []


def command_line(root: Path) -> str:
    """What `flashvar --help` and the help of each command say."""
    del root
    overview = _help([])
    commands = re.findall(r"^    ([a-z]+) ", overview, re.MULTILINE)
    if "doctor" not in commands:
        raise ValueError(f"expected the commands in the help, found {commands}: {overview}")
    parts = [f"```text\n{overview}```"]
    for name in commands:
        parts.append(f"## flashvar {name}\n\n```text\n{_help([name])}```")
        if name == "warmup":
            _, *others = warmed_ops()
            parts += [f"### {name} {op}\n\n```text\n{_help([name, op])}```" for op in others]
    return "\n\n".join(parts)


def _help(words: list[str]) -> str:
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
        mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"),
    ):
        cli.main([*words, "--help"])
    return output.getvalue()


def factory(root: Path) -> str:
    """The commands of the factory and their first lines."""
    del root
    rows = []
    for name, module in COMMANDS.items():
        text = import_module(f"flashvar_factory.cli.{module}").__doc__ or ""
        rows.append((f"`{name}`", text.partition("\n")[0]))
    return table(("command", "does"), rows)


def exit_codes(root: Path) -> str:
    """Exit code of every error that has one of its own."""
    del root
    kinds = {
        one
        for where in (errors, factory_errors)
        for one in vars(where).values()
        if isinstance(one, type)
    }
    own = [one for one in kinds if "exit_code" in vars(one)]
    rows = [
        (one.exit_code, f"`{one.__name__}`", (one.__doc__ or "").strip())
        for one in sorted(own, key=lambda one: one.exit_code)
    ]
    return table(("code", "error", "when"), rows)


def header(root: Path) -> str:
    """The C headers, whole: what all ops share, then one per op."""
    folder, first = root / "src" / "cuda" / "abi", "flashvar.h"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.h"))}
    ops = [name for name, text in texts.items() if f'#include "{first}"' in text]
    return "\n\n".join(f'```c title="{name}"\n{texts[name]}```' for name in (first, *ops))
