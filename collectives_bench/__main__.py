"""`python -m muster.collectives_bench`: run one rank with variables (RANK, WORLD_SIZE, ...) of another launcher."""

import sys

from muster.collectives_bench.ranks.direct import main

if __name__ == "__main__":
    sys.exit(main())
