"""`muster compare RUN|SWEEP...`: the parts of a step's time in several runs, and which run is faster."""

import argparse
import json

from muster.launch.common import options
from muster.launch.sweeps.rows import chosen_rows, configure_rows

EPILOG = """\
muster compare bucketed-2026 zero1-2026=ours      two runs; the second row is named ours
muster compare sweep-vgg11 --baseline mode=ddp    all points of a sweep, compared with one of them
muster compare vgg11-2026 --advice advice.json    each part of a step beside its prediction
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
    """Print the comparison. Errors as for `chosen_rows` and `predicted.read_advice`."""
    from dataclasses import asdict

    from muster.launch.common import screen
    from muster.launch.look import comparison_view, predicted

    chosen = chosen_rows(args)
    rows = chosen.rows
    parts = [] if args.advice is None else predicted.beside(predicted.read_advice(args.advice), chosen)
    if args.json:
        record = {"rows": [row.record() for row in rows]}
        told = {} if args.advice is None else {"predicted": [{**asdict(each), "error": each.error} for each in parts]}
        print(json.dumps({**record, **told}, indent=1))
    elif args.csv:
        print(comparison_view.as_csv(rows), end="")
    elif args.markdown:
        print(comparison_view.as_markdown(rows), end="")
    else:
        print(comparison_view.table(rows))
        if args.advice is not None:
            print("", screen.table(predicted.COLUMNS, predicted.table_rows(parts)), sep="\n")
            print(*predicted.missing(parts, chosen), sep="\n")
    return 0
