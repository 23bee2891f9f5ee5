"""The queue of a run's events: an error in the background must not disappear."""

import asyncio

from muster.launch.supervision.inbox import Inbox, TaskFailed


async def fail(error: Exception) -> None:
    raise error


def test_an_error_in_the_background_becomes_an_event() -> None:
    async def heard() -> TaskFailed:
        inbox, error = Inbox(), ValueError("a fault of Muster")
        inbox.spawn(fail(error))
        event = await inbox.next()
        assert isinstance(event, TaskFailed)
        assert event.error is error
        return event

    asyncio.run(heard())


def test_a_cancelled_coroutine_is_no_error() -> None:
    async def nothing_heard() -> None:
        inbox = Inbox()
        inbox.spawn(asyncio.Event().wait())  # type: ignore[arg-type]
        await asyncio.sleep(0)  # it has begun
        inbox.close(0)
        inbox.put(TaskFailed(ValueError("the only event")))
        await asyncio.sleep(0)
        event = await inbox.next()
        assert isinstance(event, TaskFailed)
        assert str(event.error) == "the only event"

    asyncio.run(nothing_heard())
