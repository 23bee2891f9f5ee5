"""`muster cmd JOB.yaml`: the lines to paste, one on each node and in any order, to start a run by hand."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from muster.launch.common.options import add_hosts, add_job, add_json, add_network, add_runs

if TYPE_CHECKING:
    from muster.launch.submit.prepare import Prepared


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser, program=True)
    add_runs(parser)
    add_json(parser)
    add_hosts(parser)
    add_network(parser)
    parser.set_defaults(on="hand")


def run(args: argparse.Namespace) -> int:
    """Print one line per node; the lines of one call belong together."""
    from muster.launch.submit.byhand import labelled, lines
    from muster.launch.submit.prepare import overrides, prepare
    from muster.launch.wire.handshake import new_secret

    prepared = prepare(args, here=False)  # the lines are for other machines
    words = [] if args.program else [str(Path(args.job).absolute())]
    words += [word for override in [*overrides(args), *prepared.loaded.typed_paths] for word in ("--set", override)]
    words += ["--site", str(Path(args.site).absolute())] if args.site else []
    found = lines(prepared, [*words, *_python(prepared)], new_secret(), args.program)
    if args.json:
        print(json.dumps([{"node": node, "line": line} for node, line in enumerate(found)], indent=2))
    else:
        print(labelled(prepared, found))
    return 0


def _python(prepared: "Prepared") -> list[str]:
    """Return the options that keep the Python which was chosen here: node 0's shell may have another one active."""
    from muster.launch.plan.program import replaced

    interpreter = prepared.context.interpreter
    if interpreter is None or not replaced(prepared.context):
        return []
    return ["--set", f"python={json.dumps(interpreter.words)}"]
