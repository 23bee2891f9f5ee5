"""A program of the user's that does by hand what a session does: its page, its reports, its checkpoints.

    python own_program.py STEPS [EVERY] [die=N] [hang=N] [always] [mute]

All ranks take their steps together: files in MUSTER_FILES are their collective. In the first attempt, or in every one
(`always`), rank 1 is killed, or sleeps, in step N. `mute`: it opens no session.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

from muster.jobs.basics.files import append_line
from muster.jobs.checkpoint import commit
from muster.jobs.checkpoint.pieces import whole
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.hosts import ranks
from muster.jobs.machine import linux
from muster.jobs.node.page import NEVER, Page, Phase
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir

POLL_S = 0.001
STEPS = int(os.environ.get("OWN_STEPS", sys.argv[1]))
EVERY = int(sys.argv[2]) if sys.argv[2:3] and sys.argv[2].isdecimal() else 1000
FAULTS = dict(each.split("=") for each in sys.argv[3:] if "=" in each)
ENV = ranks.read(os.environ)
RUN = RunDir(Path(ENV.run_dir))
FILES = Path(os.environ[ranks.FILES])
SESSION = json.loads(os.environ[ranks.SESSION])


class Collective:
    """Block in a call into C, as a waiting rank does. A stack shows only the source line of such a call."""

    wait = staticmethod(time.sleep)


def meet(step: int) -> None:
    """Wait until every rank is in this step."""
    for rank in range(ENV.world_size):
        name = f"at-{ENV.attempt}-{rank}-{step}"
        if rank == ENV.rank:
            (FILES / name).touch()
        while not (FILES / name).exists():
            Collective.wait(POLL_S)


def save(step: int, reporter: Reporter) -> None:
    """Commit a checkpoint; rank 0 has all of the state."""
    if ENV.rank == 0:
        folder = commit.begin(RUN, step, ENV.attempt)
        write_shard(folder, 0, 1, [(whole("x", "U8", (5,)), b"state")], meta={"step": step, "losses": []})
        commit.commit(RUN, folder, 1)
        reporter.saved(step=step, checkpoint=folder.name, stall_s=0.0, seconds=0.0, nbytes=5)


def stops(page: Page, done: int) -> bool:
    """As jobs/saving/pace.py."""
    if page.hold and page.stop_at == NEVER:
        page.held = done
        while page.stop_at == NEVER:
            time.sleep(POLL_S)
        page.held = NEVER
    return NEVER != page.stop_at <= done


def spoil(step: int) -> None:
    """Fail as the command line says."""
    spoils = ENV.rank == 1 and (ENV.attempt == 0 or "always" in sys.argv)
    if spoils and FAULTS.get("die") == str(step):
        os.kill(os.getpid(), signal.SIGKILL)
    while spoils and FAULTS.get("hang") == str(step):
        time.sleep(1.0)


def main() -> int:
    """Take the steps; return the exit code."""
    page, reporter = Page.attach(ranks.inherited(os.environ, ranks.PAGE)), Reporter(os.environ)
    faulthandler.register(signal.SIGQUIT, file=sys.stderr.fileno(), all_threads=True)
    if deaf := linux.has_scheduler():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes to every process, and a drain follows
    page.open_session(os.getpid(), deaf=deaf, dumps=True)
    reporter.joined()
    resume = SESSION["resume"] or {"step": 0}
    page.enter(Phase.LOAD)
    if "checkpoint" in resume and ENV.rank == 0:
        reporter.loaded(step=resume["step"], seconds=0.0, checkpoint=resume["checkpoint"])
    page.enter(Phase.RUN)
    for step in range(resume["step"] + 1, STEPS + 1):
        if stops(page, step - 1):
            save(step - 1, reporter)
            print("drained after", step - 1, flush=True)
            return 75
        spoil(step)
        meet(step)
        page.step_done(step, 0.01)
        if ENV.rank == 0:
            if step == resume["step"] + 1:
                reporter.first_step(step)
            reporter.progress(step=step, steps=STEPS)
            append_line(RUN.metrics, {"step": step, "steps": STEPS, "attempt": ENV.attempt, "loss": 0.5})
        asked = ENV.rank == 0 and RUN.save.exists()
        RUN.save.unlink(missing_ok=True) if asked else None
        if asked or step % EVERY == 0:
            save(step, reporter)
        time.sleep(0.01)
    if STEPS % EVERY:
        save(STEPS, reporter)
    print("done", STEPS, "from", resume["step"], flush=True)
    return 0


if __name__ == "__main__":
    if "mute" in sys.argv:
        print("ready", flush=True)
        time.sleep(1000)
    sys.exit(main())
