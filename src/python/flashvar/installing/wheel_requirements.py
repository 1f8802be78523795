"""The binaries that the installed flashvar names in its extras, and which of them run on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from flashvar._version import __version__
from flashvar.binaries import install_commands
from flashvar.binaries.extras import pins
from flashvar.binaries.kinds import CUDA, Architecture, BinaryKind, dotted
from flashvar.errors import ConfigurationError, InstallError
from flashvar.machine import distributions

_CUDA: Final = re.compile(r"-cu([0-9]{1,4})$")
_EVERY: Final = re.compile(r"all(?:-cu([1-9][0-9]{0,3}))?")


@dataclass(frozen=True, order=True)
class WheelRequirement:
    """A binary distribution of exactly one version, for one architecture."""

    architecture: Architecture
    distribution: str
    version: str

    @property
    def folder(self) -> str:
        """Its folder in an environment, which its wheel's name begins with too."""
        return self.distribution.replace("-", "_")

    @property
    def kind(self) -> BinaryKind:
        """The architecture, and the CUDA major that the name states: 12 of `flashvar-sm89-cu12`."""
        stated = _CUDA.search(self.distribution)
        return BinaryKind(self.architecture, int(stated[1]) if stated else CUDA)

    def __str__(self) -> str:
        """The requirement that an installer is given."""
        return f"{self.distribution}=={self.version}"


def of_installed(platform: str) -> tuple[WheelRequirement, ...]:
    """The binaries that the installed flashvar names for a platform such as "linux_x86_64".

    Raises:
        InstallError: flashvar is not installed here, or its metadata is damaged or cut short.
    """
    installed = distributions.find("flashvar", __version__)
    if installed is None:
        raise InstallError(
            "expected flashvar to be installed in this environment, found no metadata of it: "
            f"run {install_commands.install_runtime()} first"
        )
    required = distributions.fields(installed).get_all("Requires-Dist") or []
    if not any(pins(required)):
        raise InstallError(
            "expected the metadata of flashvar to name its binaries in extras, found none: it is "
            "damaged, cut short, or of a build without them; install flashvar here again"
        )
    return read(required, platform)


def read(requirements: Iterable[str], platform: str) -> tuple[WheelRequirement, ...]:
    """The binaries among the requirements of a distribution, from high to low architectures.

    An architecture may have several, for different drivers; the one whose extra has no further word
    comes first.
    """
    found: dict[WheelRequirement, bool] = {}  # whether an extra is the architecture alone
    for pin in pins(requirements):
        if platform not in (pin.platforms or {platform}):
            continue
        words = pin.extra.split("-")
        for count in range(len(words), 0, -1):
            architecture = _architecture("-".join(words[:count]))
            if architecture is not None:
                requirement = WheelRequirement(architecture, pin.distribution, pin.version)
                found[requirement] = found.get(requirement, False) or count == len(words)
                break
    return tuple(
        sorted(
            found,
            key=lambda one: (
                -one.architecture.major,
                -one.architecture.minor,
                not found[one],
                one.distribution,
            ),
        )
    )


def running_on(
    capability: tuple[int, int], known: Iterable[WheelRequirement]
) -> tuple[WheelRequirement, ...]:
    """The requirements whose machine code runs on a device, the best first."""
    return tuple(one for one in known if one.architecture.runs_on(capability))


def kinds_of(text: str, known: tuple[WheelRequirement, ...]) -> list[BinaryKind]:
    """The binaries of `--arch`: `sm_89,9.0-cu12`, or `all`, `all-cu12` that are known.

    Raises:
        ConfigurationError: a word is neither.
    """
    found: list[BinaryKind] = []
    for word in (one.strip() for one in text.split(",")):
        every = _EVERY.fullmatch(word)
        try:
            found += _every(int(every[1] or CUDA), known) if every else [_kind(word)]
        except ValueError as error:
            raise ConfigurationError(
                f"--arch: {error}; {describe(known)}, or all of them: --arch all"
            ) from None
    return list(dict.fromkeys(found))


def _kind(word: str) -> BinaryKind:
    """A named binary; `90a` is another name of `90`."""
    kind = BinaryKind.parse(word)
    return replace(kind, architecture=replace(kind.architecture, specific=False))


def _every(cuda: int, known: tuple[WheelRequirement, ...]) -> list[BinaryKind]:
    """The binaries that are known for drivers of this CUDA major, one per architecture."""
    found = [one.kind for one in known if one.kind.cuda == cuda]
    if known and not found:
        raise ValueError(f"expected binaries for CUDA {cuda}, found none")
    return found


def describe(known: Iterable[WheelRequirement]) -> str:
    """The known binaries, in words."""
    kinds = [one.kind for one in known]
    capabilities = dict.fromkeys(dotted(kind.architecture.capability) for kind in reversed(kinds))
    if not capabilities:
        return "flashvar has no binaries for this platform"
    older = sorted({kind.cuda for kind in kinds if kind.cuda != CUDA}, reverse=True)
    words = f"flashvar has binaries for compute capability {', '.join(capabilities)}"
    return "".join([words, *(f", with -cu{cuda} for drivers of CUDA {cuda}" for cuda in older)])


def _architecture(text: str) -> Architecture | None:
    """The architecture of an extra's name, as installers spell it: `sm89`, `sm-89`."""
    try:
        found = Architecture.parse(text.replace("sm-", "sm_").replace("-", "."))
    except ValueError:
        return None
    # `sm-90a` is another name of `sm90`; what code it holds, its manifest says.
    return Architecture(found.major, found.minor)
