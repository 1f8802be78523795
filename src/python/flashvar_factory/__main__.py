"""`python -m flashvar_factory`."""

import sys

from flashvar_factory.build import process
from flashvar_factory.cli import main

if __name__ == "__main__":
    process.end_on_sigterm()
    sys.exit(main())
