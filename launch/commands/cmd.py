"""`muster cmd JOB.yaml`: command lines that start a run by hand, one to paste on each node, in any order."""

import argparse
import json
from pathlib import Path

from muster.launch.common.options import add_hosts, add_job, add_json, add_network, add_runs, given


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster cmd job.yaml --master-addr 10.10.1.1      a line to paste on each node"
    add_job(parser, program=True)
    add_runs(parser)
    add_json(parser)
    add_hosts(parser)
    add_network(parser)
    parser.set_defaults(on="hand")


def run(args: argparse.Namespace) -> int:
    """Print one line per node. All lines printed by one call start the same run."""
    from muster.jobs.basics.handshake import new_secret
    from muster.launch.plan.program import replaced
    from muster.launch.submit.byhand import labelled, lines
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request

    request = given(args, Request)
    prepared = prepare(request, here=False)  # the printed lines run on other machines
    changes, context = [*request.changes(), *prepared.loaded.typed_paths], prepared.context
    if context.interpreter is not None and replaced(context):  # the shell on node 0 may use another Python
        changes.append(f"python={json.dumps(context.interpreter.words)}")
    words = [] if request.program else [str(Path(request.job).absolute())]
    words += [word for change in changes for word in ("--set", change)]
    words += ["--site", str(Path(request.site).absolute())] if request.site else []
    found = lines(prepared, words, new_secret(), request.program)
    if args.json:
        print(json.dumps([{"node": node, "line": line} for node, line in enumerate(found)], indent=2))
    else:
        print(labelled(prepared, found))
    return 0
