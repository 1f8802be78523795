"""The command `wheel-factory`: flashvar's factory for projects of other kernels.

The distribution `flashvar-factory` holds, in the folder `home`, the part of flashvar's checkout
that builds. It is not importable from outside, so any version of flashvar may be installed too.
"""

from __future__ import annotations

import sys
from pathlib import Path

HOME = Path(__file__).parent / "home"


def main() -> int:
    """Run the factory with the modules of its own home; returns the exit code."""
    sys.path.insert(0, str(HOME / "src" / "python"))
    from flashvar_factory import cli
    from flashvar_factory.build import process

    process.end_on_sigterm()
    return cli.main(program="wheel-factory")
