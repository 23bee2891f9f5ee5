"""Faults of storage: full, read-only, failing, stuck, and power lost (rows 13 to 15 of the matrix)."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

from faults.bench import Bench
from faults.disks import Disk
from faults.live import Live, resume, signal_all, trains_on
from faults.state import last_checkpoint, last_step
from faults.table import Expected, Fault, Outcome
from faults.work import job
from muster.jobs.basics import exits

LONG = job(steps=300)
SMALL_MB = 4
EXT4_MB = 32
TOO_LITTLE = 64 << 10  # less than a checkpoint of this model
Act = Callable[[Disk, Live], None]


def on_its_own_disk(
    break_it: Act, mend: Act | None = None, *, durable: bool = False, text: str = LONG
) -> Callable[[Bench], Outcome]:
    """Return a row's run whose checkpoints lie on a disk of their own, mounted as soon as the run folder is there.

    The disk is broken when two checkpoints are on it. With `mend`, the run is resumed afterwards.
    """

    def run(bench: Bench) -> Outcome:
        disks: list[Disk] = []

        def ready(live: Live) -> None:
            image = live.root.parent / "disk.img" if durable else None
            disk = Disk(live.run.checkpoints, size_mb=EXT4_MB if durable else SMALL_MB, image=image)
            disks.append(stack.enter_context(disk))
            live.wait_committed(2)

        def then(live: Live) -> Live | None:
            missed = len(live.events("missed"))
            live.notes.append(f"{missed} saves missed; last saved {last_saved(live)}, trained to {live.steps()}")
            if mend is None:
                return None
            mend(disks[0], live)
            return resume(live)

        with ExitStack() as stack:
            return bench.hurt(text, lambda live: break_it(disks[0], live), ready=ready, then=then)

    return run


def last_saved(live: Live) -> int:
    """Return the last step that was said to be saved."""
    return max((row["step"] for row in live.events("saved")), default=0)


def full_for_a_while(disk: Disk, live: Live) -> None:
    """Fill the disk until one save was missed."""
    while not live.events("missed"):
        path = disk.fill(leave_bytes=TOO_LITTLE)
    path.unlink()


def stuck(disk: Disk, live: Live) -> None:
    """Freeze the file system for three seconds: writers wait in state D, training goes on."""
    disk.freeze()
    trains_on(live, 3.0, "the disk")
    disk.thaw()


def lose_power(disk: Disk, live: Live) -> None:
    """Lose power, the machine's too."""
    signal_all(list(live.ranks().values()), signal.SIGSTOP)  # what was told is what is durable by now
    disk.die()
    live.kill()


def after_power_loss(disk: Disk, live: Live) -> None:
    """Mount again: what was said to be saved is there, whole."""
    disk.remount()
    said, found = last_saved(live), last_step(live.run)
    live.notes.append(f"said to be saved {said}, found after the crash {last_checkpoint(live.run).name}")
    if found < said:
        live.wrong.append(f"step {said} was said to be saved, {found} was found")


def replaced_by_a_file(bench: Bench) -> Outcome:
    """Put a file where the folder of checkpoints was; put the folder back; resume."""

    def act(live: Live) -> None:
        folder = live.run.checkpoints
        folder.rename(folder.with_name("aside"))
        folder.write_text("not a folder\n")

    def then(live: Live) -> Live:
        folder = live.run.checkpoints
        folder.unlink()
        folder.with_name("aside").rename(folder)
        return resume(live)

    return bench.hurt(LONG, act, ready=lambda live: live.wait_committed(2), then=then)


def whole_run_folder_full(bench: Bench) -> Outcome:
    """Fill the disk on which everything of the run lies, also its metrics and events; make room; resume."""
    with Disk(bench.place() / "disk", size_mb=SMALL_MB) as disk:

        def then(live: Live) -> Live:
            disk.filler.unlink()
            return resume(live)

        return bench.hurt(
            LONG,
            lambda live: fill(disk, live, leave_bytes=0),
            ready=lambda live: live.wait_committed(2),
            then=then,
            runs=disk.point / "runs",
        )


def fill(disk: Disk, live: Live, *, leave_bytes: int = TOO_LITTLE) -> None:
    """Fill a disk, for a second: what is being deleted meanwhile gives room back."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        disk.fill(leave_bytes=leave_bytes)
        time.sleep(0.05)


ENDS = Expected(code=exits.STORAGE, attempts=2)
GOES_ON = Expected(attempts=1)

FAULTS = (
    # Training goes on, three missed saves end it with 74; with room again it resumes.
    Fault(13, "disk full, three saves", "tmpfs filled", ENDS,
          on_its_own_disk(fill, lambda disk, live: disk.filler.unlink()), quick=True, root=True),
    # The run ends as if nothing had been.
    Fault(13, "disk full, then room again", "tmpfs filled, emptied", GOES_ON,
          on_its_own_disk(full_for_a_while, text=job(steps=400, every=40)), root=True),
    Fault(13, "disk turns read-only", "mount -o remount,ro", ENDS,
          on_its_own_disk(lambda disk, live: disk.make_readonly(), lambda disk, live: disk.make_writable()), root=True),
    # Every access is an EIO from then on; mounted again, the run resumes.
    Fault(13, "disk fails with EIO", "ext4 shutdown ioctl", ENDS,
          on_its_own_disk(lambda disk, live: disk.die(), lambda disk, live: disk.remount(), durable=True), root=True),
    Fault(13, "a file where the folder was", "rename, touch", ENDS, replaced_by_a_file, quick=True),
    Fault(13, "disk of the whole run folder full", "tmpfs filled", ENDS, whole_run_folder_full, root=True),
    Fault(14, "disk stands still 3 s", "FIFREEZE on ext4", GOES_ON,
          on_its_own_disk(stuck, durable=True, text=job(steps=400)), root=True),
    Fault(15, "power lost", "ext4 shutdown without flush, all killed", Expected(attempts=2),
          on_its_own_disk(lose_power, after_power_loss, durable=True), root=True),
)  # fmt: skip
