"""`python -m flashvar_factory`."""

import sys

from flashvar_factory.cli import main

if __name__ == "__main__":
    sys.exit(main())
