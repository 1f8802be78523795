"""`python -m flashvar_factory`."""

import sys

from flashvar_factory import at_work
from flashvar_factory.cli import main

if __name__ == "__main__":
    at_work.end_on_sigterm()
    sys.exit(main())
