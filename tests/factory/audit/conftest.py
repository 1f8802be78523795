"""Planted faults are tables that other tests go on from: these import one another."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
