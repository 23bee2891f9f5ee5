"""Run one rank of a benchmark, `python -m muster.collectives_bench`, with another launcher's variables (RANK, ...)."""

import sys

from muster.collectives_bench.ranks.direct import main

if __name__ == "__main__":
    sys.exit(main())
