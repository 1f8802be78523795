"""Inline code of the site: a long name breaks between its words, a short one nowhere."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("head_dim", "head_dim"),
        ("FLASHVAR_BACKEND", "FLASHVAR_BACKEND"),
        ("SCCACHE_REDIS_ENDPOINT", "SCCACHE_<wbr>REDIS_<wbr>ENDPOINT"),
        ("flashvar/ops/__init__.py", "flashvar/<wbr>ops/<wbr>__init__.py"),
        ("sm90/attention/bwd_dq.cuh", "sm90/<wbr>attention/<wbr>bwd_dq.cuh"),
        ("flashvar.compat.fla.install()", "flashvar.<wbr>compat.fla.<wbr>install()"),
        ("CrossToolchainError", "Cross<wbr>Toolchain<wbr>Error"),
        ("&lt;function&gt;_kernels.inc", "&lt;function&gt;_<wbr>kernels.inc"),
        ("flashvar doctor --verify", 'flashvar doctor <span class="whole">--verify</span>'),
        ("nox -s wheels -- sm89", 'nox <span class="whole">-s</span> wheels '
         '<span class="whole">--</span> sm89'),
        ("width - 1", "width - 1"),
        ('"bhsd-&gt;bshd"', '<span class="whole">"bhsd-&gt;bshd"</span>'),
        ("torch.nn.functional.scaled_dot_product_attention",
         "torch.nn.<wbr>functional.<wbr>scaled_<wbr>dot_<wbr>product_<wbr>attention"),
        ('<a href="a_long_address_of_a_page">short</a>',
         '<a href="a_long_address_of_a_page">short</a>'),
    ],
)  # fmt: skip
def test_where_code_breaks(code: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    in_code = import_module("line_breaks").in_code
    if len(code) < 38:  # breaks in a column of a table only
        expected = expected.replace("<wbr>", '<wbr class="column">')
    assert in_code(f"<p>{code}<code>{code}</code></p>") == f"<p>{code}<code>{expected}</code></p>"
    block = f"<pre><code>{code}</code></pre>"
    assert in_code(block) == block


def test_no_line_begins_with_the_bracket_behind_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    in_code = import_module("line_breaks").in_code
    assert in_code("(default: <code>None</code>\n )") == "(default: <code>None</code>)"
