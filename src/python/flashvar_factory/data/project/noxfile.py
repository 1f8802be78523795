"""`nox -s wheels` builds, audits and indexes wheels; `nox -s tests` installs and tests them."""

from pathlib import Path

import nox
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
FACTORY = "flashvar-factory[audit,cuda]"
# What both sessions install besides: ["torch>=2.13"] if the library calls torch.
ALSO: list[str] = []

nox.options.sessions = ["wheels", "tests"]


@nox.session(reuse_venv=True)
def wheels(session: nox.Session) -> None:
    """Build a wheel per architecture, audit each, and make an index: `-- sm_90` for one."""
    session.install(factory(), *ALSO)
    session.run("wheel-factory", "wheels", *(session.posargs or ["all"]))
    session.run("wheel-factory", "audit", *map(str, sorted(DIST.glob("*.whl"))))
    session.run("wheel-factory", "index")


@nox.session
def tests(session: nox.Session) -> None:
    """Install every wheel from the index into a fresh environment, and test it: `-- torch`.

    The arguments are more packages; torch is for the test that calls the kernels on a GPU.
    """
    names = sorted({path.name.split("-")[0] for path in DIST.glob("*.whl")})
    index = ROOT / "build" / "index"
    if not names or not index.is_dir():
        session.error("expected wheels in dist and their index, found none: run `nox -s wheels`")
    session.install("pytest==9.2.0", *ALSO, *session.posargs)
    session.install("--index-url", f"{index.as_uri()}/", *names)
    session.run("python", "-m", "pytest")


def factory() -> str:
    """The factory's newest wheel in vendor/ if there is one, else its release on PyPI."""
    wheels = (ROOT / "vendor").glob("flashvar_factory-*.whl")
    found = sorted(wheels, key=lambda wheel: parse_wheel_filename(wheel.name)[1])
    return f"{FACTORY} @ {found[-1].as_uri()}" if found else f"{FACTORY}==@version@"
