"""`muster env`: the rank that this process would have, and the variable that determined each value."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from muster.jobs.basics.errors import MusterError
from muster.jobs.hosts.detect import Flags, detect, seen
from muster.launch.common.options import add_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "srun muster env                                 the rank of each process"
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the detected rank and the variables seen.

    Raises:
        MusterError: if the variables contradict each other or are incomplete; the variables are printed first.
    """
    record, error = describe(os.environ)
    print(json.dumps(record, indent=2) if args.json else render(record))
    if error is not None:
        raise error
    return 0


def describe(environ: Mapping[str, str]) -> tuple[dict[str, Any], MusterError | None]:
    """Return the detected rank as plain values (None if refused), and the error that refused it, if any."""
    record: dict[str, Any] = {"launcher": None, "rank_environment": None, "seen": seen(environ), "error": None}
    try:
        detected = detect(environ, Flags())
    except MusterError as error:
        return {**record, "error": str(error)}, error
    values = asdict(detected.env)
    record["launcher"] = detected.launcher
    record["rank_environment"] = [
        {"name": name, "value": values[name], "origin": detected.origins[name]} for name in values
    ]
    return record, None


def render(record: dict[str, Any]) -> str:
    """Format the record: the launcher of this process, its rank, and the variables seen."""
    from muster.launch.common.screen import table

    lines = [f"started by  {record['launcher'] or 'unknown'}"]
    if record["rank_environment"] is not None:
        rows = [(row["name"], _plain(row["value"]), row["origin"]) for row in record["rank_environment"]]
        lines += ["", table(("value", "is", "from"), rows)]
    lines += ["", "variables seen" if record["seen"] else "variables seen: none"]
    lines += [f"  {name}={value}" for name, value in record["seen"].items()]
    return "\n".join(lines)


def _plain(value: object) -> str | None:
    return None if value == "" else str(value)
