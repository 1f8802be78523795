"""`flashvar install` in environments of pip and of uv, on machines that a fake driver shows.

The wheels have real manifests and no machine code. What must not change on disk is listed before
and after, with hashes.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import threading
import venv
from pathlib import Path
from typing import ClassVar

import pytest
from damaged_wheels import (
    bring_a_stranger,
    change_a_member,
    cut,
    lose_the_entry_point,
    name_a_file_elsewhere,
)
from installing_place import (
    CODE_12,
    LIBRARY,
    METADATA,
    ROOT,
    RTX_3090,
    RTX_4090,
    UV,
    V100,
    VERSION,
    Place,
    wheel,
)

from flashvar_factory import index
from flashvar_factory.config import extras, schema


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for target in schema.read(ROOT / "variants.toml").targets.values():
        wheel(folder, target.architecture.code)
    wheel(folder, "89", "-cu12", CODE_12)
    return folder


@pytest.fixture(scope="module", params=["pip", "uv"])
def fresh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with flashvar in it, with pip or without; it is copied, never changed."""
    environment = tmp_path_factory.mktemp(request.param) / "env"
    venv.create(environment, with_pip=request.param == "pip", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    if request.param == "pip":
        # Found beside it, as is setuptools: thousands of files that no test has to copy and remove.
        packages = environment.with_name("packages")
        site.rename(packages)
        site.mkdir()
        (site / "pip.pth").write_text(f"{packages}\n", encoding="utf-8")
    config = schema.read(ROOT / "variants.toml")
    lines = [METADATA.rstrip()]
    for name, requirements in extras.extras(config, VERSION).items():
        lines.append(f"Provides-Extra: {name}")
        for one in requirements:
            what, _, marker = one.partition("; ")
            both = f"({marker}) and extra == '{name}'" if marker else f"extra == '{name}'"
            lines.append(f"Requires-Dist: {what} ; {both}")
    info = site / f"flashvar-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (site / "sources.pth").write_text(str(ROOT / "src" / "python"), encoding="utf-8")
    return environment


@pytest.fixture(scope="module")
def site(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the wheels; it is copied, never changed."""
    folder = tmp_path_factory.mktemp("site")
    index.write(wheels, folder)
    return folder


@pytest.fixture
def place(fresh: Path, wheels: Path, site: Path, tmp_path: Path) -> Place:
    """A fresh environment, a folder of wheels and an index of them."""
    shutil.copytree(fresh, tmp_path / "env", symlinks=True)
    shutil.copytree(wheels, tmp_path / "dist")
    shutil.copytree(site, tmp_path / "site")
    python = tmp_path / "env" / "bin" / "python"
    return Place(tmp_path, python, tmp_path / "dist", tmp_path / "site")


@pytest.mark.parametrize("way", ["dist", "site", "file"])
def test_the_binary_of_the_gpu_is_installed(way: str, place: Place) -> None:
    named = (place.root / "site").as_uri() + "/" if way == "file" else way
    done = place.run("--from", named, gpus=[RTX_4090])
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm89"}
    assert "NVIDIA GeForce RTX 4090 (8.9)" in done.stdout
    assert done.stderr == ""
    assert f"flashvar-sm89=={VERSION}" in place.frozen()
    (path,) = place.dist.glob("flashvar_sm89-*.whl")
    if way != "dist":
        assert f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" in done.stdout
    before = place.files()
    again = place.run(gpus=[RTX_4090])
    assert (again.returncode, place.files()) == (0, before)
    assert f"installed already: flashvar-sm89=={VERSION}," in again.stdout


# Settings of a user for other calls, in variables and in files: where they apply, nothing can be
# installed, or it goes elsewhere.
OTHER_CALLS = {
    **{f"{tool}_REQUIRE_HASHES": "1" for tool in ("PIP", "UV")},
    **{f"{tool}_CONSTRAINT": "constraints.txt" for tool in ("PIP", "UV")},
    **{"PIP_NO_BINARY": ":all:", "UV_NO_BINARY": "1", "PIP_TARGET": "elsewhere", "PIP_USER": "1"},
    **{"UV_EXCLUDE_NEWER": "2001-01-01", "UV_OVERRIDE": "constraints.txt", "PIP_DRY_RUN": "1"},
    **{"PIP_PREFIX": "elsewhere", "UV_LINK_MODE": "symlink", "XDG_CONFIG_HOME": "config"},
    "PYTHONWARNINGS": "error",
}


@pytest.mark.parametrize("way", ["dist", "site"])
def test_settings_for_other_calls_do_not_matter(way: str, place: Place) -> None:
    (place.root / "constraints.txt").write_text("flashvar-sm89==0.0.1\n", encoding="utf-8")
    for name, text in {
        "pip/pip.conf": "[global]\nrequire-hashes = 1\n[install]\ntarget = elsewhere\n",
        "uv/uv.toml": "no-index = true\n[pip]\nrequire-hashes = true\ntarget = 'elsewhere'\n",
    }.items():
        (place.root / "config" / name).parent.mkdir(parents=True)
        (place.root / "config" / name).write_text(text, encoding="utf-8")
    settings = {**OTHER_CALLS, "XDG_CONFIG_HOME": str(place.root / "config")}
    done = place.run("--from", way, "--arch", "8.9", settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm89"}
    assert f"flashvar-sm89=={VERSION}" in place.frozen()
    assert not (place.root / "elsewhere").exists()


def test_names_of_folders_do_not_matter(place: Place) -> None:
    """Spaces, and what means something in lists and addresses; an environment behind a link.

    The locale has no letter but those of ASCII.
    """
    dist = place.root / "my wheels, #1 (50%) ü"
    place.dist.rename(dist)
    (place.root / "a link").symlink_to(place.root / "env")
    (place.root / "tmp, #2").mkdir()
    done = place.run(
        *("--from", dist.name, "--arch", "sm89"),
        settings={
            **{"TMPDIR": str(place.root / "tmp, #2"), "LC_ALL": "C", "PYTHONUTF8": "0"},
            "PYTHONCOERCECLOCALE": "0",
        },
        through=place.root / "a link" / "bin" / "python",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm89"}
    assert list((place.root / "tmp, #2").iterdir()) == []


def test_another_version_is_replaced(place: Place, tmp_path: Path) -> None:
    assert place.run("--from", "dist", "--arch", "sm89").returncode == 0
    (info,) = place.root.glob("env/lib/*/site-packages/flashvar_sm89-*.dist-info")
    other = info.with_name("flashvar_sm89-0.0.1.dist-info")
    info.rename(other)
    for path in (other / "METADATA", other / "RECORD"):
        path.write_text(path.read_text().replace(VERSION, "0.0.1"), encoding="utf-8")
    manifest = info.with_name("flashvar_sm89") / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"{VERSION}"', '"0.0.1"'), encoding="utf-8")
    done = place.run("--from", "dist", gpus=[RTX_4090])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"flashvar-sm89=={VERSION}" in place.frozen()
    assert not other.exists()


def test_a_wheel_that_was_withdrawn_is_said(place: Place) -> None:
    """An exact version still takes it, as locks need; that it is harmful, its user has to hear."""
    yanked = place.root / "yanked.toml"
    yanked.write_text(f'[flashvar-sm89]\n"{VERSION}" = "wrong results"\n', encoding="utf-8")
    index.write(place.dist, place.site, yanked=yanked)
    done = place.run("--from", "site", gpus=[RTX_4090])
    said = f"warning: flashvar-sm89=={VERSION} was withdrawn by its publisher: wrong results; "
    assert (done.returncode, done.stderr[: len(said)]) == (0, said)


def test_a_dry_run_changes_nothing(place: Place) -> None:
    before = place.files()
    done = place.run("--from", "dist", "--dry-run", gpus=[RTX_4090, RTX_3090])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"would install flashvar-sm89=={VERSION}, flashvar-sm86=={VERSION}" in done.stdout
    assert place.files() == before


def test_a_mixed_machine_gets_both_and_hears_of_the_third(place: Place) -> None:
    done = place.run("--from", "dist", gpus=[RTX_4090, V100, RTX_3090, RTX_4090])
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm86", "flashvar_sm89"}
    assert "no binary for Tesla V100 (7.0)" in done.stdout
    assert "2 x NVIDIA GeForce RTX 4090" in done.stdout


@pytest.mark.parametrize("words", [("--arch", "12.1,12.0"), ()], ids=["named", "found"])
def test_two_gpus_of_one_binary_fetch_it_once(words: tuple[str, ...], place: Place) -> None:
    gpus = [("NVIDIA GeForce RTX 5090", 12, 0), ("NVIDIA RTX PRO", 12, 1)]
    done = place.run("--from", "dist", *words, gpus=gpus)
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm120"}
    assert done.stdout.count("fetching ") == 1
    assert f"installed flashvar-sm120=={VERSION} into" in done.stdout


def test_a_named_gpu_that_nobody_serves_stops_the_others(place: Place) -> None:
    before = place.files()
    done = place.run("--from", "dist", "--arch", "sm89,sm77")
    assert (done.returncode, place.files()) == (13, before)
    assert "found sm77" in done.stderr


def test_an_image_is_made_without_a_gpu(place: Place) -> None:
    done = place.run("--from", "dist", "--arch", "sm_90, 8.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm80", "flashvar_sm90"}


def test_an_older_driver_gets_the_binary_made_for_it(place: Place) -> None:
    done = place.run("--from", "dist", gpus=[RTX_4090], cuda=(12, 4))
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm89_cu12"}
    assert done.stdout.count("fetching ") == 1
    before = place.files()
    again = place.run("--from", "dist", gpus=[RTX_4090], cuda=(12, 4))
    assert (again.returncode, place.files()) == (0, before), again.stdout + again.stderr
    assert "installed already: flashvar-sm89-cu12" in again.stdout


def test_the_binary_for_older_drivers_can_be_named(place: Place) -> None:
    done = place.run("--from", "dist", "--arch", "sm89-cu12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm89_cu12"}
    done = place.run("--from", "dist", "--arch", "sm89,8.9-cu12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed() == {"flashvar_sm89", "flashvar_sm89_cu12"}


def test_a_source_that_has_no_binary_for_an_older_driver(place: Place) -> None:
    for path in place.dist.glob("flashvar_sm89_cu12-*.whl"):
        path.unlink()
    done = place.run("--from", "dist", gpus=[RTX_4090], cuda=(12, 4))
    assert (done.returncode, place.installed()) == (15, set())
    assert "flashvar-sm89-cu12==" in done.stderr


@pytest.mark.parametrize("damaged", [b"", LIBRARY.swapcase()], ids=["empty", "of its size"])
def test_a_damaged_binary_is_replaced(damaged: bytes, place: Place) -> None:
    assert place.run("--from", "dist", "--arch", "sm89").returncode == 0
    (library,) = place.root.glob("env/lib/*/site-packages/flashvar_sm89/*.so")
    library.write_bytes(damaged)
    done = place.run("--from", "dist", gpus=[RTX_4090])
    assert (done.returncode, library.read_bytes()) == (0, LIBRARY), done.stdout + done.stderr


# What the environment's Python does: fetch, then install while the source has other bytes.
CHANGED_MEANWHILE = """
import os, sys, shutil
from pathlib import Path
from flashvar.binaries.kinds import Architecture
from flashvar.installing import installer, record, repack, source, wheel_requirements
place = source.find(sys.argv[1], os.environ, extra="sm89")
tool = installer.find(os.environ)
wanted = wheel_requirements.WheelRequirement(Architecture.parse("89"), "flashvar-sm89", sys.argv[2])
fetched = tool.fetch(wanted, place, Path("fetched"))
judged = Path("judged").resolve()
requirement = repack.write(record.read(fetched.tree, wanted), wanted, judged)
for path in Path(sys.argv[1]).glob("**/flashvar_sm89-*.whl"):
    path.write_bytes(b"other bytes")
tool.install([requirement], judged)
"""


@pytest.mark.parametrize("way", ["dist", "site"])
def test_what_was_judged_is_installed(way: str, place: Place) -> None:
    """An index without hashes, and a folder: what lies there may change at any time."""
    for page in place.site.glob("**/index.*"):
        text = re.sub(r"#sha256=[0-9a-f]{64}", "", page.read_text(encoding="utf-8"))
        page.write_text(re.sub(r'"sha256": ?"[0-9a-f]+"', "", text), encoding="utf-8")
    environ = {**os.environ, "PATH": f"{Path(UV).parent}:{os.environ['PATH']}"}
    command = [str(place.python), "-c", CHANGED_MEANWHILE, way, VERSION]
    done = subprocess.run(command, cwd=place.root, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (library,) = place.root.glob("env/lib/*/site-packages/flashvar_sm89/*.so")
    assert library.read_bytes() == LIBRARY


# What is done to the machine or the source, what is asked, the exit code and words of the sentence.
BAD = {
    "a GPU that nobody serves": ([V100], (13, 0), "dist", None, 13, "Tesla V100 (7.0)"),
    "no GPU": ([], (13, 0), "dist", None, 13, "--arch"),
    "a driver too old for all": ([RTX_3090], (11, 8), "dist", None, 14, "driver 525 or newer"),
    "no source": ([RTX_4090], (13, 0), "", None, 15, "no release of flashvar is published yet"),
    "a folder that is not there": ([RTX_4090], (13, 0), "away", None, 15, "no such folder"),
    "an index that does not answer": (
        [RTX_4090],
        (13, 0),
        "http://user:secret@127.0.0.1:9/",
        None,
        15,
        "efused",
    ),
    "a wheel that is not there": ([RTX_4090], (13, 0), "dist", Path.unlink, 15, "flashvar-sm89=="),
    "a wheel that is cut off, in a folder": ([RTX_4090], (13, 0), "dist", cut, 16, "whole wheel"),
    "a wheel that is cut off, in an index": ([RTX_4090], (13, 0), "site", cut, 16, ""),
    "other bytes than the index lists": (
        [RTX_4090],
        (13, 0),
        "site",
        change_a_member,
        16,
        "other bytes",
    ),
    "a module of another package": (
        [RTX_4090],
        (13, 0),
        "dist",
        bring_a_stranger,
        16,
        "torch_extension.py",
    ),
    "no entry point": ([RTX_4090], (13, 0), "dist", lose_the_entry_point, 16, "entry point"),
    "other bytes than the manifest lists": (
        [RTX_4090],
        (13, 0),
        "dist",
        change_a_member,
        16,
        "expected its manifest to describe it",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_case_is_one_sentence_and_changes_nothing(case: str, place: Place) -> None:
    gpus, cuda, named, damage, code, words = BAD[case]
    if damage is not None:
        for path in place.root.glob(f"{named}/**/flashvar_sm89-*.whl"):
            damage(path)
    before = place.files()
    done = place.run(*(("--from", named) if named else ()), gpus=gpus, cuda=cuda)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.startswith("flashvar: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "user:secret" not in done.stdout + done.stderr
    assert place.files() == before
    assert code != 14 or "fetching" not in done.stdout


def test_a_record_that_names_a_file_elsewhere_brings_nothing(place: Place) -> None:
    """pip leaves RECORD as it is, which is refused; uv drops such a line when it unpacks."""
    (path,) = place.dist.glob("flashvar_sm89-*.whl")
    name_a_file_elsewhere(path)
    before = place.files()
    done = place.run("--from", "dist", "--arch", "sm89")
    records = list(place.root.glob("env/lib/python*/site-packages/flashvar_sm89-*/RECORD"))
    assert "secret" not in "".join(record.read_text() for record in records)
    if done.returncode != 0:
        assert (done.returncode, done.stderr.count("\n")) == (16, 1)
        assert "secret.txt" in done.stderr
        assert place.files() == before
    else:
        assert place.installed() == {"flashvar_sm89"}


class Breaking(http.server.SimpleHTTPRequestHandler):
    """Serves an index, and half of each wheel."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.suffix != ".whl":
            return super().do_GET()
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])


def test_an_interrupted_download_changes_nothing(place: Place) -> None:
    handler = functools.partial(Breaking, directory=str(place.site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        before = place.files()
        address = f"http://127.0.0.1:{server.server_port}/"
        done = place.run("--from", address, "--arch", "sm89")
        server.shutdown()
    # A pip that does not count the bytes finds that they have another hash.
    assert done.returncode == 16, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert place.files() == before


class Silent(http.server.SimpleHTTPRequestHandler):
    """Takes a request for a wheel, and never answers."""

    asked: ClassVar[threading.Event]
    ended: ClassVar[threading.Event]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            return super().do_GET()
        self.asked.set()
        self.ended.wait()


def test_a_signal_during_a_download_leaves_nothing(place: Place) -> None:
    Silent.asked, Silent.ended = threading.Event(), threading.Event()
    scratch = place.root / "scratch"
    scratch.mkdir()
    handler = functools.partial(Silent, directory=str(place.site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        before = place.files()
        words = ("--from", f"http://127.0.0.1:{server.server_port}/", "--arch", "sm89")
        with place.started(*words, settings={"TMPDIR": str(scratch)}) as process:
            assert Silent.asked.wait(60), process.communicate()
            process.terminate()
            _, printed = process.communicate(timeout=60)
        Silent.ended.set()
        server.shutdown()
    assert (process.returncode, printed) == (128 + signal.SIGTERM, "flashvar: interrupted\n")
    assert list(scratch.iterdir()) == []
    assert place.files() == before


# What a half-written environment lacks, and words of the sentence.
LOST = {
    "an installer": ("pip*", "found neither"),
    "metadata": ("flashvar-*", "found no metadata"),
    "most of the metadata": ("flashvar-*/METADATA", "cut short"),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_half_written_environment_is_refused(lost: str, place: Place) -> None:
    pattern, words = LOST[lost]
    for path in place.root.glob(f"env/lib/python*/site-packages/{pattern}"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name == "METADATA":
            path.write_bytes(path.read_bytes()[:40])
        else:
            path.unlink()
    before = place.files()
    done = place.run("--from", "dist", "--arch", "sm89", tools="/usr/bin:/bin")
    assert done.returncode == 12, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert place.files() == before
