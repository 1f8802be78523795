"""A plugin of pytest that puts flashvar under FlashAttention's own tests.

    python -m pytest -p upstream_flash_attn tests/test_flash_attn.py tests/test_rotary.py

in a checkout of flash-attention where the package is not installed, with this folder on PYTHONPATH.
There are half a million cases: choose some, for example with -k.
"""

import flashvar.compat.flash_attn

flashvar.compat.flash_attn.install()
