"""What the sample of a release is built of: this project in parts, with few kernels in each.

Sources tell architectures apart by family, by shared memory and by whether they are 9.0 or newer.
One part has every op for both families, before 9.0 and for it; one the ops whose tiles depend on
shared memory, where there is most of it; one a binary for older drivers. The 163 KiB of 8.0 decide
one tile of these kernels, that of the pair of head dims, which is on 8.9 and 10.0 too, with other
numbers.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import fewer_ops

PAIR: Final = '[defaults.attention_fwd]\nhead_dim = [64, "192x128"]\n\n'
FEWER: Final = (
    (r"^dtype = \[.+$", 'dtype = ["bf16"]'),
    (r"^head_dim = \[.+$", "head_dim = [64]"),
    (r"^\[ops\.attention_fwd\]$", PAIR + "[ops.attention_fwd]"),
)
# Not in a project that has wheels of binaries alone.
BINARIES_ALONE: Final = ("docs/", "packages/", "pyproject.toml", "tests/")


class Part(NamedTuple):
    """A project of the sample."""

    targets: tuple[str, ...]  # whose wheels are taken, on a processor that has them
    ops: tuple[str, ...] = ()  # all, if none are named

    @property
    def groups(self) -> set[str]:
        """The groups of its ops."""
        return {name.rpartition("_")[0] for name in self.ops} or fewer_ops.GROUPS

    @property
    def without(self) -> tuple[str, ...]:
        """How the names of the files begin that it is without."""
        return (*BINARIES_ALONE, *fewer_ops.other_sources(*self.groups)) if self.ops else ()

    def variants(self) -> str:
        """Its variants.toml."""
        text = fewer_ops.variants(*self.groups)
        if self.ops:
            text = fewer_ops.with_defaults(text, [*self.ops])
        for line, fewer in FEWER:
            text = re.sub(line, fewer, text, flags=re.MULTILINE)
        plain = {name.partition("-")[0] for name in self.targets}
        older = {name.partition("-")[0] for name in self.targets if "-" in name}
        every = re.findall(r"^sm_\d+(?= = )", text, re.MULTILINE)
        assert plain <= {*every}
        for name in every:
            if name not in plain:
                text = re.sub(rf"^{name} = .*\n", "", text, flags=re.MULTILINE)
            elif name not in older:
                toolkits = rf"(?<=^{name} = )(.*), toolkits = {{.*?}}"
                text = re.sub(toolkits, r"\1", text, flags=re.MULTILINE)
        return re.sub(r"(?<=^architecture = ).+", f'"{max(plain)}"', text, flags=re.MULTILINE)


PARTS: Final = {
    "sample": Part(("sm_87", "sm_89", "sm_90")),
    "sample-memory": Part(
        ("sm_100",),
        ("attention_fwd", "attention_bwd", "gated_delta_rule_fwd", "gated_delta_rule_bwd"),
    ),
    "sample-older": Part(("sm_89-cu12",), ("attention_fwd", "merge_states_fwd")),
}
