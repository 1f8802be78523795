"""The variables that nearly have a name of flashvar's."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import flashvar
from flashvar import cli, variables
from flashvar.selection import resolve

ROOT = Path(__file__).parents[2]


def test_the_documented_ones_are_known() -> None:
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `FLASHVAR_(\w+)`", text, re.MULTILINE)) == list(variables.NAMES)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("BACKENDS", "BACKEND"),
        ("BAKEND", "BACKEND"),
        ("backend", "BACKEND"),
        ("CACHE", "CACHE_DIR"),
        ("FORCEARCH", "FORCE_ARCH"),
        ("FORCE_ARCHITECTURE", "FORCE_ARCH"),
        ("INDEX_URL", "INDEX"),
        ("LIBDIR", "LIB_DIR"),
        ("LOG_LEVEL", "LOG"),
        ("STRICT_MODE", "STRICT"),
    ],
)
def test_the_nearest_is_found(name: str, near: str) -> None:
    given = f"FLASHVAR_{name}"
    assert variables.misspelled({given: "1"}) == {given: f"FLASHVAR_{near}"}


def test_known_ones_and_those_of_others_are_left_alone() -> None:
    others = (
        "VERSION",
        "HOME",
        "DIR",
        "ROOT",
        "PATH",
        "WHEELS",
        "TAG",
        "IMAGE",
        "PLAN",
        "TORCH_DIR",
    )
    environ = {f"FLASHVAR_{name}": "1" for name in (*variables.NAMES, *others)}
    assert variables.misspelled({**environ, "BACKENDS": "1", "XFLASHVAR_BACKENDS": "1"}) == {}


@pytest.mark.parametrize("service", ["BACKEND", "CACHE", "INDEX", "LOG"])
def test_addresses_of_services_are_left_alone(service: str) -> None:
    """What Kubernetes and linked containers set for a service called `flashvar-index`."""
    endings = (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP_METRICS",
        "PORT",
        "PORT_80_TCP",
        "PORT_80_TCP_ADDR",
        "PORT_80_TCP_PORT",
        "PORT_53_UDP_PROTO",
        "PORT_9_SCTP",
    )
    environ = {f"FLASHVAR_{service}_{ending}": "1" for ending in endings}
    assert variables.misspelled(environ) == {}
    assert variables.misspelled({f"FLASHVAR_{service}_DIRS": "1"}) != {}


@pytest.mark.parametrize("way", ["a call", "the command"])
@pytest.mark.usefixtures("fresh_registry")
def test_it_is_said_once(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHVAR_BACKENDS", "cuda")
    variables.warn_of_misspelled.cache_clear()
    resolve.choose.cache_clear()
    q = torch.randn(1, 2, 1, 8)
    with caplog.at_level(logging.INFO, "flashvar"):
        for _ in range(2):
            if way == "a call":
                flashvar.attention(q, q, q)
            else:
                cli.main(["show"])
    variables.warn_of_misspelled.cache_clear()
    (message,) = [one.getMessage() for one in caplog.records if "did you mean" in one.getMessage()]
    assert (
        message == "FLASHVAR_BACKENDS is not a variable of flashvar: did you mean FLASHVAR_BACKEND?"
    )
