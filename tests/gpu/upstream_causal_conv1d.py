"""A plugin of pytest that puts flashvar under causal-conv1d's own tests.

    python -m pytest -p upstream_causal_conv1d tests/test_causal_conv1d.py

in a checkout of causal-conv1d where the package is not installed, with this folder on PYTHONPATH.
"""

import flashvar.compat.causal_conv1d

flashvar.compat.causal_conv1d.provide()
