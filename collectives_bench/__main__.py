"""Run one rank of a benchmark under another launcher (RANK, ...): `python -m muster.collectives_bench`."""

import sys

from muster.collectives_bench.ranks.direct import main

if __name__ == "__main__":
    sys.exit(main())
