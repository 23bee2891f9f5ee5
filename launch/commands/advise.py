"""`muster advise`: every way to split a job over its ranks, with predicted step times, and the best one."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.launch.common import options

EPILOG: Final = """\
muster advise JOB.yaml --profile cluster.json                      the best split of the job
muster advise JOB.yaml --profile cluster.json --apply best.yaml    also write the job with that split
muster advise JOB.yaml --what-if nodes=64,link=100gbit             on a cluster that you do not have
Passes of the job's model are timed on this machine, and steps of some modes, for about a minute. With --keep-times and
--times they are timed only once.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", help="a job file with train:")
    source = parser.add_argument_group("the network")
    source.add_argument("--profile", metavar="FILE.json", help="the profile written by muster bench fit")
    source.add_argument("--link", metavar="RATE", help="a link of this speed, such as 100Gbit, instead of a profile")
    source.add_argument("--latency", metavar="TIME", help="latency of a message over --link (default: 0)")
    source.add_argument("--backend", choices=("gloo", "nccl"), help="default: that of the job's device")
    source.add_argument(
        "--hosts",
        metavar="HOSTS",
        help="the hosts of the run, as in muster run. With box:NAME, or without hosts, all ranks share this machine",
    )
    source.add_argument(
        "--what-if",
        metavar="KEY=VALUE,...",
        help="a cluster that you do not have: nodes, ranks_per_node, link, latency, batch, memory",
    )
    model = parser.add_argument_group("the model")
    options.add_set(model)
    model.add_argument("-n", "--ranks-per-node", metavar="M", type=int, help="same as --set ranks_per_node=M")
    model.add_argument("--memory", metavar="SIZE", help="memory per rank, such as 80G; a split may use nine tenths")
    model.add_argument(
        "--options", metavar="NAMES", help="also time compile, cuda_graph, activation_checkpointing; use commas"
    )
    model.add_argument("--times", metavar="FILE.json", help="use these times instead of measuring the model")
    model.add_argument("--keep-times", metavar="FILE.json", help="write the measured times, for --times")
    output = parser.add_argument_group("output")
    output.add_argument(
        "-o", "--output", metavar="FILE.json", help="write the advice, for muster report and compare --advice"
    )
    output.add_argument(
        "--apply", metavar="OUT.yaml", help="write the job with the best split; it may replace the job file itself"
    )
    options.add_json(output)


def run(args: argparse.Namespace) -> int:
    """Print the advice. Errors as for `advising.advise`.

    Raises:
        RefusedError: with --apply, if no split fits.
    """
    from muster.jobs.basics.files import write_text
    from muster.launch.bench import advising
    from muster.launch.look import advice_view

    record = advising.advise(options.given(args, advising.AdviceWanted))
    text = json.dumps(record, indent=1)
    if args.output is not None:
        write_text(Path(args.output), text + "\n")
    print(text if args.json else advice_view.render(record))
    if args.apply is not None:
        _apply(args, record)
    return 0


def _apply(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write the job file with the best split. Other keys keep their values; comments are not kept."""
    from muster.collectives_bench.cost.advice.plans import changed
    from muster.jobs.basics.files import write_text
    from muster.jobs.spec import yamlfile
    from muster.jobs.spec.load import load_job
    from muster.launch.common.kinds import KINDS

    if record["best"] is None:
        raise RefusedError("--apply: no split fits, so there is nothing to write; give more memory or more ranks")
    whole = load_job(Path(args.job), KINDS, args.overrides, allow_unread=True).document.mapping()
    section = changed(whole["train"], record["best"]["changes"])
    write_text(Path(args.apply), yamlfile.dump({**whole, "train": section}))
    load_job(Path(args.apply), KINDS, [], allow_unread=True)
    print(f"wrote {args.apply}: {record['best']['plan']}", file=sys.stderr)
