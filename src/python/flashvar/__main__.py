"""`python -m flashvar`: the same as the command `flashvar`."""

import sys

from flashvar.cli import main

sys.exit(main())
