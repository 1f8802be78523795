"""What readers see and type: what tests without a GPU share."""

from __future__ import annotations

import sys
from pathlib import Path

from without_gpu import (  # noqa: F401 (pytest finds them here)
    _collected,
    _seeded,
    fresh_registry,
    pytest_collection_finish,
    pytest_configure,
    pytest_sessionfinish,
    pytest_xdist_setupnodes,
    python,
    python_with_models,
    python_with_nox,
)

sys.path.insert(0, str(Path(__file__).parent))
