"""`python -m jobs.train JOB.yaml`: one rank of a training job, started by hand or by another launcher."""

from jobs.train.direct import main

main()
