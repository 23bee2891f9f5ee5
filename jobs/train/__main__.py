"""`python -m muster.jobs.train JOB.yaml`: one rank of a training job, started by hand or by another launcher."""

import os
import signal

from muster.jobs.train.flags import parse

args = parse()
# Until the ranks have met, Ctrl-C ends this process at once: neither torch's import nor its store hears Python's own.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# Read when torch is imported. Its warnings of a lost or a late peer come with stacks of C++, around our one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from muster.jobs.train.direct import main  # noqa: E402 - torch: only when there is something to train

main(args)
