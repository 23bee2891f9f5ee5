"""`muster schema`: the JSON Schema of the job file, for editors that complete and check YAML."""

import argparse
import json


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the epilog; the command has no options."""
    parser.epilog = "muster schema > muster.schema.json"


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    from muster.jobs.spec.schema import job_schema
    from muster.launch.common.kinds import KINDS

    print(json.dumps(job_schema(KINDS), indent=2))
    return 0
