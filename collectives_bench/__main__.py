"""`python -m collectives_bench`: run one rank whose variables (RANK, WORLD_SIZE, ...) somebody else set."""

import argparse
import sys

from collectives_bench.ranks.run import run_operation
from collectives_bench.settings import BenchSettings
from jobs.errors import MusterError


def main() -> int:
    """Read the operation, then run it."""
    parser = argparse.ArgumentParser(prog="python -m collectives_bench", description=__doc__)
    parser.add_argument("--operation", default="hello")
    parser.add_argument("--start-timeout-s", type=float, default=60.0)
    args = parser.parse_args()
    try:
        return run_operation(BenchSettings(operation=[args.operation]), args.start_timeout_s)
    except MusterError as error:
        print(f"muster: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
