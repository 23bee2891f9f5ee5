"""A job whose supervisor is gone with its node: with --no-kill Slurm would keep the others running to its limit."""

from collections.abc import Mapping

from muster.slurm.requeue import RUNNING, call, state_of


def end_orphan(environ: Mapping[str, str], *, requeue: bool) -> str:
    """Queue the job around this process again, or cancel it, if Slurm holds it for running; say what was done.

    A job that somebody cancels at the same moment is left alone: scontrol would queue it again.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if (state := state_of(job, environ)) != RUNNING:
        return f"Slurm job {job}: {state}"
    argv = ["scontrol", "requeue", job] if requeue else ["scancel", job]
    done = call(argv, environ)
    return f"{' '.join(argv)}: {'done' if done.returncode == 0 else done.stderr.strip()}"
