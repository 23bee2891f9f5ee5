"""Faults of storage: full, read-only, failing, stuck, and power lost (rows 13 to 15 of the matrix)."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from faults.bench import Bench
from faults.disks import Disk
from faults.live import Live, resume, signal_all
from faults.state import last_checkpoint, last_step
from faults.table import Expected, Fault, Outcome
from faults.work import job
from muster.jobs.basics import exits

LONG = job(steps=300)
SMALL_MB = 4
EXT4_MB = 32
TOO_LITTLE = 64 << 10  # less than a checkpoint of this model


class OnItsOwnDisk:
    """Rows whose checkpoints lie on a disk of their own: it is mounted as soon as the run folder is there."""

    def __init__(self, bench: Bench, *, durable: bool = False) -> None:
        self.bench = bench
        self.durable = durable
        self.disk: Disk | None = None
        self.notes: list[str] = []
        self.wrong: list[str] = []

    def run(
        self,
        break_it: Callable[[Disk, Live], object],
        *,
        mend: Callable[[Disk, Live], None] | None = None,
        text: str = LONG,
    ) -> Outcome:
        """Break the disk when two checkpoints are on it; with `mend`, resume the run afterwards."""
        with ExitStack() as stack:

            def ready(live: Live) -> None:
                image = live.root.parent / "disk.img" if self.durable else None
                size_mb = EXT4_MB if self.durable else SMALL_MB
                self.disk = stack.enter_context(Disk(live.run.checkpoints, size_mb=size_mb, image=image))
                live.wait_committed(2)

            def act(live: Live) -> float:
                assert self.disk is not None
                began = time.time()
                break_it(self.disk, live)
                return began

            def then(live: Live, code: int) -> Live | None:
                self._look(live)
                if mend is None:
                    return None
                assert self.disk is not None
                mend(self.disk, live)
                return resume(live)

            outcome = self.bench.hurt(text, act, ready=ready, then=then)
            return replace(outcome, notes=(*outcome.notes, *self.notes), wrong=(*outcome.wrong, *self.wrong))

    def _look(self, live: Live) -> None:
        """Note how far training went on, and how many saves were missed."""
        missed = live.events("missed")
        saved = [row["step"] for row in live.events("saved")]
        self.notes.append(f"{len(missed)} saves missed; last saved {max(saved, default=0)}, trained to {live.steps()}")


def full(bench: Bench) -> Outcome:
    """Fill the disk for good: training goes on, three missed saves end it with 74; with room again it resumes."""
    row = OnItsOwnDisk(bench)
    return row.run(
        lambda disk, live: _fill(disk),
        mend=lambda disk, live: (disk.point / "somebody-elses-file").unlink(),
    )


def full_for_a_while(bench: Bench) -> Outcome:
    """Fill the disk until one save was missed: the run ends as if nothing had been."""

    def for_a_while(disk: Disk, live: Live) -> None:
        while not live.events("missed"):
            path = disk.fill(leave_bytes=TOO_LITTLE)
        path.unlink()

    return OnItsOwnDisk(bench).run(for_a_while, text=job(steps=400, every=40))


def read_only(bench: Bench) -> Outcome:
    """Remount read-only."""
    return OnItsOwnDisk(bench).run(
        lambda disk, live: disk.make_readonly(), mend=lambda disk, live: disk.make_writable()
    )


def failing(bench: Bench) -> Outcome:
    """Let an ext4 die: every access is an EIO from then on; mounted again, the run resumes."""

    def mend(disk: Disk, live: Live) -> None:
        disk.unmount()
        disk.mount()

    return OnItsOwnDisk(bench, durable=True).run(lambda disk, live: disk.die(), mend=mend)


def stuck(bench: Bench) -> Outcome:
    """Freeze the file system for three seconds: writers wait in state D, training goes on."""
    row = OnItsOwnDisk(bench, durable=True)

    def break_it(disk: Disk, live: Live) -> None:
        disk.freeze()
        first = live.steps()
        time.sleep(3.0)
        steps = live.steps() - first
        disk.thaw()
        row.notes.append(f"{steps} steps while the disk stood")
        if steps < 10:
            row.wrong.append(f"only {steps} steps while the disk stood: training waited for it")

    return row.run(break_it, text=job(steps=400))


def power_lost(bench: Bench) -> Outcome:
    """Lose power: what was said to be saved is there after it, whole; the run resumes from it."""
    row = OnItsOwnDisk(bench, durable=True)
    said: list[int] = []

    def break_it(disk: Disk, live: Live) -> None:
        signal_all(list(live.ranks().values()), signal.SIGSTOP)  # what was told is what is durable by now
        disk.die()
        said.append(max((event["step"] for event in live.events("saved")), default=0))
        live.kill()

    def mend(disk: Disk, live: Live) -> None:
        disk.unmount()
        disk.mount()
        found = last_step(live.run)
        row.notes.append(f"said to be saved {said[0]}, found after the crash {last_checkpoint(live.run).name}")
        if found < said[0]:
            row.wrong.append(f"step {said[0]} was said to be saved, {found} was found")

    return row.run(break_it, mend=mend)


def replaced_by_a_file(bench: Bench) -> Outcome:
    """Put a file where the folder of checkpoints was; put the folder back; resume."""
    aside: list[Path] = []

    def act(live: Live) -> float:
        began = time.time()
        folder = live.run.checkpoints
        aside.append(folder.with_name("aside"))
        folder.rename(aside[0])
        folder.write_text("not a folder\n")
        return began

    def then(live: Live, code: int) -> Live:
        live.run.checkpoints.unlink()
        aside[0].rename(live.run.checkpoints)
        return resume(live)

    return bench.hurt(LONG, act, ready=lambda live: live.wait_committed(2), then=then)


def whole_run_folder_full(bench: Bench) -> Outcome:
    """Fill the disk on which everything of the run lies, also its metrics and events; make room; resume."""
    place = bench.place()
    with Disk(place / "disk", size_mb=SMALL_MB) as disk:

        def act(live: Live) -> float:
            began = time.time()
            _fill(disk, leave_bytes=0)
            return began

        def then(live: Live, code: int) -> Live:
            (disk.point / "somebody-elses-file").unlink()
            return resume(live)

        runs = disk.point / "runs"
        return bench.hurt(LONG, act, ready=lambda live: live.wait_committed(2), then=then, runs=runs)


def _fill(disk: Disk, leave_bytes: int = TOO_LITTLE) -> Path:
    """Fill a disk, for a second: what is being deleted meanwhile gives room back."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        path = disk.fill(leave_bytes=leave_bytes)
        time.sleep(0.05)
    return path


ENDS = Expected(code=exits.STORAGE, attempts=2)
GOES_ON = Expected(attempts=1)

FAULTS = (
    Fault(13, "disk full, three saves", "tmpfs filled", ENDS, full, quick=True, root=True),
    Fault(13, "disk full, then room again", "tmpfs filled, emptied", GOES_ON, full_for_a_while, root=True),
    Fault(13, "disk turns read-only", "mount -o remount,ro", ENDS, read_only, root=True),
    Fault(13, "disk fails with EIO", "ext4 shutdown ioctl", ENDS, failing, root=True),
    Fault(13, "a file where the folder was", "rename, touch", ENDS, replaced_by_a_file, quick=True),
    Fault(13, "disk of the whole run folder full", "tmpfs filled", ENDS, whole_run_folder_full, root=True),
    Fault(14, "disk stands still 3 s", "FIFREEZE on ext4", GOES_ON, stuck, root=True),
    Fault(15, "power lost", "ext4 shutdown without flush, all killed", Expected(attempts=2), power_lost,
          root=True),
)  # fmt: skip
