"""`python -m muster.jobs.train JOB.yaml`: one rank of a training job, started by hand or by another launcher."""

import os
import signal

from muster.jobs.train.flags import parse

args = parse()
# Until the ranks have met, Ctrl-C ends this process at once: torch's import and its store do not react to Python's
# handler.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# Read when torch is imported. Its warnings about a lost or late peer print C++ stacks around Muster's one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from muster.jobs.train.direct import main  # noqa: E402 - torch: only when there is something to train

main(args)
