"""`muster compare RUN|SWEEP...`: the parts of a step's time in several runs, and which run is faster."""

import argparse
import json

from muster.launch.common import options
from muster.launch.sweeps.rows import chosen_rows, configure_rows

EPILOG = """\
muster compare bucketed-2026 zero1-2026=ours      two runs; the second row is named ours
muster compare sweep-vgg11 --baseline mode=ddp    all points of a sweep, compared with one of them
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    configure_rows(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print the rows as CSV")
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options.add_json(form)


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Errors as for `chosen_rows`."""
    from muster.launch.look import comparison_view

    rows = chosen_rows(args).rows
    if args.json:
        print(json.dumps({"rows": [row.record() for row in rows]}, indent=1))
    elif args.csv:
        print(comparison_view.as_csv(rows), end="")
    elif args.markdown:
        print(comparison_view.as_markdown(rows), end="")
    else:
        print(comparison_view.table(rows))
    return 0
