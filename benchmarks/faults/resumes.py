"""Resumes on other ranks, drains, programs that fail by themselves, clocks and ports (rows 18 to 21, 23 and 24)."""

import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from faults.bench import Bench
from faults.disks import call
from faults.live import Live, resume, signal_all, wait_for
from faults.state import largest_difference, last_step, tensors
from faults.table import Expected, Fault, Outcome
from faults.work import MODEL, job
from muster.jobs.basics import exits
from muster.jobs.machine import ports

PLAIN = job()
CLOSE = 1e-12
HOUR_S = 3600
LONG_BYTES = 8


def on_other_ranks(*sizes: int, virtual_ranks: int = 4) -> Callable[[Bench], Outcome]:
    """Return a row's run: the supervisor is killed, and the run resumed on another number of ranks, again and again."""
    text = job(nodes=1, ranks=2, train={"virtual_ranks": virtual_ranks}, steps=90)
    return lambda bench: bench.hurt(text, Live.kill, then=lambda live: _resumed_on(live, sizes))


def in_float64(bench: Bench) -> Outcome:
    """Resume 2 -> 1 -> 4 ranks in one epoch, in float64 and without `exact`: equal but for the order of sums.

    Without dropout: its draws are keyed by virtual rank, of which there are as many as ranks.
    """
    train = {
        "precision": "fp64",
        "exact": False,
        "virtual_ranks": None,
        "mode": "ddp",
        "model": {**MODEL, "dropout": 0},
    }
    text = job(nodes=1, ranks=2, train=train, steps=90)
    wanted = bench.reference(text)

    def then(live: Live) -> Live:
        last = _resumed_on(live, (1, 4))
        last.end()
        found = largest_difference(tensors(last.run), wanted)
        live.notes.append(f"largest difference {found:.2g}")
        if found > CLOSE:
            live.wrong.append(f"largest difference {found:.2g}, at most {CLOSE:g}")
        return last

    return replace(bench.hurt(text, Live.kill, then=then), equal=None)


def _resumed_on(live: Live, sizes: Sequence[int]) -> Live:
    """Resume on each number of ranks; all but the last are killed after ten new steps."""
    for number, size in enumerate(sizes, start=1):
        done = live.steps()
        live = resume(live, "--ranks-per-node", str(size))
        live.wait_event("first_step", attempt=live.first_attempt)
        if number < len(sizes):
            live.wait_step(done + 10, live.first_attempt)
            live.kill()
    return live


# Drains ---------------------------------------------------------------------------------------------


def drained(
    number: signal.Signals, ready: Callable[[Live], object], *, frozen_rank: bool = False, twice: bool = False
) -> Callable[[Bench], Outcome]:
    """Return a row's run: the supervisor is told to stop, then the run is resumed."""

    def act(live: Live) -> float:
        if frozen_rank:
            signal_all([live.ranks()[1]], signal.SIGSTOP)
        began = time.time()
        live.process.send_signal(number)
        if twice:
            live.wait_event("draining")
            live.process.send_signal(number)
        return began

    def then(live: Live) -> Live:
        live.notes.append(f"trained to {live.steps()}, saved {last_step(live.run)}")
        return resume(live)

    return lambda bench: bench.hurt(job(steps=200), act, ready=ready, then=then)


def failing(what: str, step: int, attempts: str, rank: str = "1") -> Callable[[Bench], Outcome]:
    """Return a row's run: a rank fails by itself, in all the attempts given."""
    return lambda bench: bench.hurt(
        PLAIN,
        lambda live: float(live.wait_event("exited", attempt=0)["time"]),
        ready=lambda live: live.ranks(0),
        bend=f"{what}:{rank}:{step}:{attempts}",
    )


def not_a_number(bench: Bench) -> Outcome:
    """Let one weight become NaN in attempt 0: what is saved after it must not be what the end is made of."""

    def act(live: Live) -> float:
        live.wait_step(30)
        return time.time()

    return bench.hurt(PLAIN, act, ready=lambda live: live.wait_step(20), bend="nan:all:24:0")


# Clocks and ports ---------------------------------------------------------------------------------------------


def clock_jumps(seconds: int) -> Callable[[Bench], Outcome]:
    """Return a row's run: every process of the run sees its wall clock jump; then a rank is killed."""

    def run(bench: Bench) -> Outcome:
        offset, library = bench.folder / f"offset-{bench.made}", bench.folder / "jump.so"
        offset.write_bytes(bytes(LONG_BYTES))
        call("cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(Path(__file__).with_name("jump.c")), "-ldl")
        env = {"LD_PRELOAD": str(library), "JUMP_FILE": str(offset)}

        def act(live: Live) -> float:
            with offset.open("r+b") as file:  # the same bytes, which the processes have mapped
                file.write(seconds.to_bytes(LONG_BYTES, sys.byteorder, signed=True))
            live.wait_step(live.steps() + 10)
            began = time.time()
            signal_all([live.ranks()[1]], signal.SIGKILL)
            return began + seconds

        return bench.hurt(job(steps=150), act, env=env)

    return run


def ports_taken(bench: Bench) -> Outcome:
    """Listen on nine of ten ports that a store could have, and leave a stranger's file in /dev/shm; kill a rank."""
    mark = Path("/dev/shm/somebody-elses-leftover")
    mark.write_text("not ours\n")
    found = ports.candidates(*ports.kernel_ranges())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for port in (each for each in found if each % 10):
            listening = socket.socket()
            stack.callback(listening.close)
            try:
                listening.bind(("127.0.0.1", port))
                listening.listen(1)
            except OSError:
                continue  # taken already, which is as good
        outcome = bench.hurt(PLAIN, lambda live: signal_all([live.ranks()[1]], signal.SIGKILL))
    left = mark.exists()
    mark.unlink(missing_ok=True)
    return outcome if left else replace(outcome, wrong=(*outcome.wrong, "a stranger's file in /dev/shm was removed"))


def _in_step(live: Live) -> None:
    live.wait_step(24)


def _in_save(live: Live) -> None:
    """Wait for a checkpoint that is being written."""
    live.wait_committed(1)
    folders = live.run.checkpoints
    wait_for("a save in flight", lambda: any(not (each / "MANIFEST.json").exists() for each in folders.glob("step-*")))


DRAINED = Expected(code=exits.STOPPED, attempts=2, detect_s=0.5)
HOPELESS = Expected(code=exits.DO_NOT_RESTART, equal=False)

FAULTS = (
    Fault(18, "resumed on 1 rank, exact", "2 -> 1", Expected(), on_other_ranks(1), quick=True),
    Fault(18, "resumed on 4 ranks, exact", "2 -> 4", Expected(), on_other_ranks(4)),
    Fault(18, "resumed on 3 ranks, exact", "2 -> 3, 12 virtual", Expected(), on_other_ranks(3, virtual_ranks=12)),
    Fault(18, "two resumes in one epoch, exact", "2 -> 1 -> 4", Expected(), on_other_ranks(1, 4), quick=True),
    Fault(18, "two resumes in one epoch, float64", "2 -> 1 -> 4", Expected(equal=None), in_float64),
    Fault(19, "Ctrl-C in a step", "SIGINT", DRAINED, drained(signal.SIGINT, _in_step), quick=True),
    Fault(19, "SIGTERM in a save", "SIGTERM", DRAINED, drained(signal.SIGTERM, _in_save)),
    Fault(19, "Ctrl-C twice", "SIGINT, SIGINT", DRAINED, drained(signal.SIGINT, _in_step, twice=True)),
    Fault(19, "Ctrl-C while a rank is stopped", "STOP rank 1, SIGINT", DRAINED,
          drained(signal.SIGINT, _in_step, frozen_rank=True)),
    Fault(20, "raises at the same step always", "ValueError at step 24", replace(HOPELESS, attempts=2),
          failing("raise", 24, "all"), quick=True),
    Fault(20, "raises once", "ValueError at step 24", Expected(attempts=2), failing("raise", 24, "0")),
    Fault(20, "fails at import always", "ValueError", HOPELESS, failing("import", 0, "all", rank="all")),
    Fault(20, "a weight becomes NaN", "one element, attempt 0", Expected(), not_a_number),
    Fault(23, "clocks jump by +1 h, then rank killed", "preloaded clock", Expected(attempts=2), clock_jumps(HOUR_S)),
    Fault(23, "clocks jump by -1 h, then rank killed", "preloaded clock", Expected(attempts=2), clock_jumps(-HOUR_S)),
    Fault(24, "most ports taken, leftover in /dev/shm", "9 of 10 ports; kill -9 rank 1", Expected(attempts=2),
          ports_taken),
)  # fmt: skip
