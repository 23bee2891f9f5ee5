"""Count the sizes of a user's model and optimizer, in a separate process with the ranks' Python.

    stdin     {"job": the job as serialized by `jobs/spec/plain.py`}
    stdout    one line: the result of `count.py`, or {"refused": message}

The process runs in the job's working folder. Output of the user's code goes to standard error.
"""

import sys
from typing import TYPE_CHECKING, Any, cast

from muster.jobs.basics.answering import answer
from muster.jobs.basics.errors import RefusedError

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


def main() -> int:
    """Count the model and optimizer of the job on standard input."""
    return answer(_counted)


def _counted(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        import torch
    except ModuleNotFoundError:
        return {"refused": f"{sys.executable} has no torch; install torch there, or set python: to the ranks' Python"}
    from muster.jobs.spec.plain import plain_job
    from muster.jobs.train.memory.count import count

    torch.set_num_threads(1)
    try:
        return count(cast("TrainSettings", plain_job(asked["job"]).settings))
    except RefusedError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    sys.exit(main())
