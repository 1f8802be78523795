"""What pages take from files and modules of this repository."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final
from unittest import mock

from tables import table

from flashvar import cli, errors
from flashvar.cli.warmup import warmed_ops
from flashvar.compat.not_provided import NAMES_NOT_PROVIDED, NOT_PROVIDED
from flashvar_factory import audit
from flashvar_factory import cli as factory_cli
from flashvar_factory import errors as factory_errors

# What users import; the modules beside them are parts of these.
INTEGRATIONS: Final = ("transformers", "torch", "documents", "diffusers", "attend", "xformers")
# Commands of the factory that only CMake or nox calls.
INTERNAL: Final = {"plan", "manifest", "write-sbom", "check-selection"}


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
    hidden = 'options: {filters: ["!^_", "!^extra_repr$"]}'
    return "\n\n".join(f"::: flashvar.integrations.{name}\n    {hidden}" for name in INTEGRATIONS)


def stand_in(root: Path) -> str:
    """The modules of FlashAttention: what each has in flashvar's stand-in, or what replaces it."""
    source = root / "src" / "python" / "flashvar" / "compat"
    rows = {}
    for path in (source / "flash_attn").rglob("*.py"):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        if names := _exported(path):
            rows[name] = ", ".join(f"`{one}`" for one in names if "install" not in one)
    missing = {**NOT_PROVIDED, **NAMES_NOT_PROVIDED}
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
    overview = _help(cli.main, [])
    commands = re.findall(r"^    ([a-z]+) ", overview, re.MULTILINE)
    if "doctor" not in commands:
        raise ValueError(f"expected the commands in the help, found {commands}: {overview}")
    parts = [f"```text\n{overview}```"]
    for name in commands:
        parts.append(f"## flashvar {name}\n\n```text\n{_help(cli.main, [name])}```")
        if name == "warmup":
            _, *others = warmed_ops()
            for op in others:
                parts.append(f"### {name} {op}\n\n```text\n{_help(cli.main, [name, op])}```")
    return "\n\n".join(parts)


def _help(main: Callable[[list[str]], int], words: list[str]) -> str:
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
        mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"),
    ):
        main([*words, "--help"])
    return output.getvalue()


def factory(root: Path) -> str:
    """The commands of the factory that people call: their first lines, then the help of each."""
    del root
    rows, parts = [], []
    for name, module in factory_cli.COMMANDS.items():
        if name in INTERNAL:
            continue
        text = import_module(f"flashvar_factory.cli.{module}").__doc__ or ""
        rows.append((f"[`{name}`](#flashvar_factory-{name})", text.partition("\n")[0]))
        text = _help(factory_cli.main, [name])
        parts.append(f"### flashvar_factory {name}\n\n```text\n{text}```")
    return "\n\n".join([table(("command", "does"), rows), *parts])


def audit_checks(root: Path) -> str:
    """The checks of the audit, with the wheels that each is made of."""
    del root
    wheels: dict[audit.Check, list[str]] = {}
    groups = {
        "every wheel": audit.OF_EVERY_WHEEL,
        "the project's own": audit.OF_THE_PROJECT,
        "binary": audit.OF_THE_FACTORY,
    }
    for group, checks in groups.items():
        for check in checks:
            wheels.setdefault(check, []).append(group)
    rows = [
        (f"`{check.__name__}`", ", ".join(of), (check.__doc__ or "").partition("\n")[0])
        for check, of in wheels.items()
    ]
    return table(("check", "wheels", "what must be true"), rows)


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
