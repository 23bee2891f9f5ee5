"""Count the user's model and optimizer of a job: a process of its own, in the Python that ranks run in.

    stdin     {"job": the job as `jobs/spec/plain.py` spells it}
    stdout    one line: what `count.py` returns, or {"refused": message}

The working folder of the job is the current one. What the user's code prints goes to standard error.
"""

import json
import os
import sys
from typing import TYPE_CHECKING, Any, cast

from muster.jobs.basics.errors import RefusedError

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


def main() -> int:
    """Count what standard input names."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        answer.write(json.dumps(_counted(json.load(sys.stdin))))
    return 0


def _counted(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        import torch
    except ModuleNotFoundError:
        return {"refused": f"{sys.executable} has no torch; install it there, or name the ranks' Python by python:"}
    from muster.jobs.spec.plain import plain_job
    from muster.jobs.train.memory.count import count

    torch.set_num_threads(1)
    try:
        return count(cast("TrainSettings", plain_job(asked["job"]).settings))
    except RefusedError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    sys.exit(main())
