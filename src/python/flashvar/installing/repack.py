"""Packs the checked files into a wheel, so that nothing else is installed."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from flashvar.installing import temporary
from flashvar.installing.wheel_requirements import WheelRequirement


def write(files: Mapping[str, bytes], requirement: WheelRequirement, folder: Path) -> str:
    """Write the wheel into a folder; the requirement that its bytes alone meet."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o644 << 16
            archive.writestr(member, data)
    info = next(name for name in files if name.endswith(".dist-info/RECORD")).partition("/")[0]
    # Its real tags are in its metadata; that they suit this Python was seen when it was fetched.
    path = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with temporary.writing(folder):
        folder.mkdir(exist_ok=True)
        path.write_bytes(content.getvalue())
    # With its label: uv looks for the hash of a whole version, not of the one that was asked for.
    version = info.removesuffix(".dist-info").partition("-")[2]
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    return f"{requirement.distribution}=={version} --hash=sha256:{digest}"
