"""`muster run JOB.yaml`: start the ranks, watch them, say how it went. The exit code is the verdict's."""

import argparse
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from muster.launch.common.options import add_job, add_runs, add_transport

if TYPE_CHECKING:
    from muster.launch.submit.prepare import Prepared


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser, program=True)
    add_runs(parser)
    add_transport(parser)
    parser.add_argument("--quiet", action="store_true", help="say nothing unless it fails; logs are kept all the same")
    parser.add_argument("--tee", action="store_true", help="show what every rank prints, each line with its rank")
    parser.add_argument("--detach", action="store_true", help="leave once it has begun, as muster submit does")


def run(args: argparse.Namespace) -> int:
    """Prepare, then start and supervise; a queue's jobs are submitted and followed."""
    from muster.launch.submit import queueing
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.start import start
    from muster.launch.supervision.console import Console

    check_tee(args)
    prepared = prepare(args)
    if prepared.submission.route.transport == "hand":
        prepared = by_hand(prepared, args)
    if args.detach:
        print(queueing.leave(prepared, snapshot=True).run_id)
        print(f"muster: it {queueing.whereabouts(prepared.context.run)}", file=sys.stderr)
        return 0
    console = Console(quiet=args.quiet, tee=args.tee)
    if prepared.is_queued:
        return queueing.follow(prepared, console=console)
    context = replace(prepared.context, tee=args.tee)
    prepared = replace(prepared, submission=replace(prepared.submission, context=context))
    return start(prepared, console=console).code


def check_tee(args: argparse.Namespace) -> None:
    """Refuse --tee where nothing is shown.

    Raises:
        UsageError: it would have no effect.
    """
    from muster.jobs.basics.errors import UsageError

    for name in ("quiet", "detach"):
        if args.tee and getattr(args, name):
            raise UsageError(f"--tee: has no effect with --{name}; leave one out. muster logs -f shows every rank")


def by_hand(prepared: "Prepared", args: argparse.Namespace) -> "Prepared":
    """Take port and secret from the pasted line. Without one, draw them and print the lines of the other nodes."""
    from muster.launch.submit.byhand import any_port, labelled, lines
    from muster.launch.wire.handshake import new_secret
    from muster.launch.wire.keys import SECRET

    route = prepared.submission.route
    given = os.environ.pop(SECRET, "")
    route = replace(route, secret=given or new_secret(), port=route.port or any_port())
    prepared = replace(prepared, submission=replace(prepared.submission, route=route))
    if not given:
        print("paste on the other nodes, in any order:", file=sys.stderr)
        print(labelled(prepared, lines(prepared, [args.job], route.secret)[1:], first=1), file=sys.stderr)
    return prepared
