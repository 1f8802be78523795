"""`python -m wheel_factory`: the same as the command `wheel-factory`."""

import sys

from wheel_factory import main

if __name__ == "__main__":
    sys.exit(main())
