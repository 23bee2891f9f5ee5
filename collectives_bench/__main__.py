"""`python -m muster.collectives_bench`: run one rank whose variables (RANK, WORLD_SIZE, ...) somebody else set."""

import sys

from muster.collectives_bench.ranks.direct import main

if __name__ == "__main__":
    sys.exit(main())
