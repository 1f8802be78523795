"""Packs an unpacked wheel again: the bytes that were judged are those that are installed."""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Final

from flashvar.errors import IntegrityError

# What an installer adds to a distribution's metadata.
_ADDED: Final = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})


def write(tree: Path, folder: Path) -> Path:
    """Write the wheel that is unpacked in `tree` into a folder; its path.

    Raises:
        IntegrityError: the tree is not one unpacked wheel.
    """
    infos = list(tree.glob("*.dist-info"))
    if len(infos) != 1 or not (infos[0] / "WHEEL").is_file():
        raise IntegrityError(
            f"{tree.parent.name}: expected the metadata of one wheel, found {len(infos)}; "
            "nothing was installed: fetch it again"
        )
    (info,) = infos
    lines = (info / "WHEEL").read_text(encoding="utf-8").splitlines()
    tags = [line.partition(":")[2].strip() for line in lines if line.startswith("Tag:")]
    path = folder / f"{info.stem}-{tags[0] if tags else 'py3-none-any'}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in _listed(info):
            if (tree / name).is_file():
                archive.write(tree / name, name)
    return path


def _listed(info: Path) -> list[str]:
    """The files of the wheel itself, by its RECORD; those of the installer are left out."""
    record = info / "RECORD"
    with record.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    added = {f"{info.name}/{name}" for name in _ADDED}
    kept = [row for row in rows if row[0] not in added]
    with record.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(kept)
    return [row[0] for row in kept]
