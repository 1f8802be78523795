"""What every test may import, the helpers beside this file, and how torch runs in tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# Tensors here are tiny: on a busy machine several threads mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
