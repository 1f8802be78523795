"""Toolkits of an older CUDA, for drivers that are older than the compiler's: reads [toolkits].

    [toolkits]
    cu12 = { ptx = "8.8", ptxas = "nvidia-cuda-nvcc-cu12==12.9.86", runtime = "...==12.9.79" }

nvcc stays the front end. The PTX that it writes is labeled with the version that the older ptxas
reads; machine code and the CUDA runtime are of the older toolkit.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashvar.binaries.kinds import CUDA
from flashvar_factory.config.toml_table import Table

_REQUIREMENT = r"[a-z][a-z0-9-]*==[0-9]+\.[0-9]+\.[0-9]+"
_MEANING = "a requirement with its version, such as 'nvidia-cuda-nvcc-cu12==12.9.86'"


@dataclass(frozen=True)
class OlderToolkit:
    """What makes the machine code of a second binary of an architecture."""

    cuda: int  # the major version: drivers that support it run the binary
    ptx: str  # the version of PTX that its ptxas reads
    ptxas: str  # the requirement of its packages on PyPI
    runtime: str

    @property
    def version(self) -> str:
        """The version of ptxas."""
        return self.ptxas.partition("==")[2]

    @property
    def runtime_version(self) -> str:
        """The version of the CUDA runtime."""
        return self.runtime.partition("==")[2]


def read(table: Table) -> dict[str, OlderToolkit]:
    """The toolkits of the table, by name."""
    found = {}
    for name in list(table.rest):
        one = table.table(name)
        ptx = one.text("ptx", r"[1-9]\.[0-9]", "a version of PTX such as '8.8'")
        ptxas, runtime = (one.text(key, _REQUIREMENT, _MEANING) for key in ("ptxas", "runtime"))
        major = int(ptxas.partition("==")[2].partition(".")[0])
        toolkit = OlderToolkit(major, ptx, ptxas, runtime)
        if name != f"cu{major}" or not 12 <= major < CUDA:
            raise table.wrong(name, f"the name cuN of a CUDA major, 12 to {CUDA - 1}", name)
        if not toolkit.runtime_version.startswith(f"{major}."):
            raise one.wrong("runtime", f"version {major} as ptxas", toolkit.runtime)
        found[name] = toolkit
        one.end()
    return found
