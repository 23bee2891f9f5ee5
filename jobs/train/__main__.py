"""`python -m muster.jobs.train JOB.yaml`: one rank of a training job, started by hand or by another launcher."""

import os
import signal

from muster.jobs.train.flags import parse

args = parse()
# Until the ranks have met, Ctrl-C ends this process at once, because Python's handler would not run while torch is
# imported or its store waits.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# torch reads this when it is imported. Its warnings about a lost or late peer would print C++ stacks around Muster's
# one-line message.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from muster.jobs.train.direct import main  # noqa: E402 - imports torch, which --help does not need

main(args)
