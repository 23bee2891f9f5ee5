"""`python -m muster.jobs.train JOB.yaml`: one rank of a training job, started by hand or by another launcher."""

import os

from muster.jobs.train.flags import parse

args = parse()
# Read when torch is imported. Its warnings of a lost or a late peer come with stacks of C++, around our one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from muster.jobs.train.direct import main  # noqa: E402 - torch: only when there is something to train

main(args)
