"""Wait for space on a full disk before another attempt begins, because its first files must be written."""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from muster.jobs.basics.errors import MusterError, StorageError
from muster.jobs.basics.files import reserve
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.eventlog import EventLog

NEEDED_BYTES: Final = 1 << 18
PATIENCE_S: Final = 60.0
LOOK_S: Final = 0.5

Pump = Callable[[Callable[[], bool]], Awaitable[None]]


async def wait_for_space(
    run: RunDir, log: EventLog, pump: Pump, is_void: Callable[[], bool], delay_s: float = 0.0
) -> None:
    """Wait for `delay_s`, then until the run folder's disk has space. After PATIENCE_S more the attempt may fail.

    `pump` handles events until a condition is true. `is_void`: no attempt follows.
    """
    probe, next_look, is_told = run.nonce("space"), time.monotonic() + delay_s, False
    deadline = next_look + PATIENCE_S

    def is_done() -> bool:
        nonlocal next_look, is_told
        now = time.monotonic()
        if is_void() or now > deadline:
            return True
        if now < next_look:
            return False
        next_look = now + LOOK_S
        try:
            reserve(probe, NEEDED_BYTES)
        except StorageError as error:
            if not is_told:
                log.tell("warning", text=f"{error}; the next attempt waits up to {PATIENCE_S:g} s for it")
            is_told = True
            return False
        except MusterError:  # another reason, which the attempt will report
            return True
        return True

    await pump(is_done)
    with suppress(OSError):
        probe.unlink(missing_ok=True)
