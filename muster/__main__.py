"""`python -m muster`: the `muster` command without an installed script."""

import sys

from muster.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
