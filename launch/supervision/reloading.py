"""Get the state of the next attempt into the memory of its nodes, if the ranks that continue do not have all of it.

    a rank is lost    the newest checkpoint in memory of which the living nodes have every shard
    ranks join        the copy that the ranks have made after their last step
                      ─► Fetch ─► Fetched … of all nodes ─► the next attempt, in which every rank loads it

ZeRO needs this, because each rank has a shard of the state. Meanwhile the ranks wait in their processes.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

from muster.launch.supervision.attempt import Attempt
from muster.launch.supervision.peer_memory import Chosen, PeerMemory
from muster.launch.supervision.space import wait_for_space

COPY_S: Final = 60.0  # the limit for the copy of the state that ranks make before others join them


async def reload(
    attempt: Attempt,
    memory: PeerMemory,
    pump: Callable[[Callable[[], bool]], Awaitable[None]],
    is_stopped: Callable[[], bool],
) -> Chosen | None:
    """Return the checkpoint from which the next attempt continues in place; None if it needs none, or restarts.

    `pump` handles events until a condition is true. If another failure changes the ranks that continue, begin again.
    If there is no checkpoint, stop all ranks, so that they restart.
    """
    if attempt.regrouping is not None:
        await wait_for_space(attempt.context.run, attempt.log, pump, lambda: is_stopped() or attempt.regrouping is None)
    while (regrouping := attempt.regrouping) is not None and regrouping.reloads(attempt.spread.groups):

        def is_void() -> bool:
            return is_stopped() or attempt.regrouping is not regrouping

        async def wait(until: Callable[[], bool]) -> bool:
            await pump(lambda: until() or is_void())
            return not is_void()

        deadline, last = time.monotonic() + COPY_S, _copied_after(attempt)
        await wait(lambda: memory.newest_step() >= last or time.monotonic() > deadline)  # noqa: B023
        slots, limit_s = regrouping.slots, attempt.job.start_timeout_s
        chosen = None if is_void() else await memory.load(wait, -1, attempt.number + 1, slots, limit_s)
        if chosen is not None or is_stopped():
            return chosen
        if not is_void():
            why = "the nodes cannot get a checkpoint from each other's memory"
            attempt.log.tell("not_in_place", attempt=attempt.number, why=why)
            attempt.regrouping = None
            attempt.stop_all(None, why, attempt.job.grace_s)
    await pump(attempt.is_over)
    return None


def _copied_after(attempt: Attempt) -> int:
    """Return the step after which all ranks copied the state for ranks that join; 0 if none join, or a rank failed."""
    joins = attempt.joining and attempt.stop is not None and attempt.story.failed_at is None
    return (attempt.stop_at or 0) if joins else 0
