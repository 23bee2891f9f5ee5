"""Which messages of a node's ranks are joined, which are not, and that their order stays."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from muster.launch.node.gathering import MOST_EXITS, Gathering
from muster.launch.wire.messages import Exited, Exits, FromAgent, Report
from support.messages import exited

RANKS = 4


class Told:
    """A gathering that keeps the messages it sends; `late` counts how often it asked for a later flush."""

    def __init__(self) -> None:
        self.sent: list[FromAgent] = []
        self.late = 0
        self.gathering = Gathering(0, self._tell, self._flush_late)

    async def _tell(self, message: FromAgent) -> None:
        self.sent.append(message)

    def _flush_late(self) -> None:
        self.late += 1

    async def said(self, what: str, *ranks: int) -> None:
        for rank in ranks:
            await self.gathering.report(rank, {"report": what}, RANKS)  # type: ignore[typeddict-item, misc]


def played(play: Callable[[Told], Coroutine[Any, Any, None]]) -> list[FromAgent]:
    told = Told()
    asyncio.run(play(told))
    return told.sent


def of(what: str, *ranks: int) -> Report:
    return Report(0, ranks, {"report": what})  # type: ignore[arg-type, misc]


def stopped(rank: int) -> Exited:
    return exited(rank, None, signal="SIGTERM", sent="SIGTERM")


def test_the_arrival_of_all_ranks_is_one_message_at_once() -> None:
    async def play(told: Told) -> None:
        await told.said("arrived", 2, 0, 1)
        assert (told.sent, told.late) == ([], 1)
        await told.said("arrived", 3)
        assert told.sent == [of("arrived", 2, 0, 1, 3)]
        await told.said("joined", 0, 1, 2, 3)

    assert played(play)[1:] == [of("joined", 0, 1, 2, 3)]


def test_ranks_that_arrive_late_follow_in_a_message_of_their_own() -> None:
    async def play(told: Told) -> None:
        await told.said("arrived", 0, 1)
        await told.gathering.flush()  # GATHER_S later
        await told.said("arrived", 2, 3)

    assert played(play) == [of("arrived", 0, 1), of("arrived", 2, 3)]


def test_another_report_is_sent_at_once_and_does_not_overtake_the_arrivals() -> None:
    async def play(told: Told) -> None:
        await told.said("joined", 0, 1)
        await told.said("first_step", 0)

    assert played(play) == [of("joined", 0, 1), of("first_step", 0)]


def test_the_arrival_at_the_next_rendezvous_is_not_mixed_with_its_end() -> None:
    async def play(told: Told) -> None:
        await told.said("arrived", 0, 1)
        await told.said("joined", 0)
        await told.gathering.flush()

    assert played(play) == [of("arrived", 0, 1), of("joined", 0)]


def test_a_rank_that_ends_by_itself_is_reported_at_once() -> None:
    failed = exited(1, 1)

    async def play(told: Told) -> None:
        await told.said("joined", 0, 1)
        await told.gathering.exited(stopped(0))
        await told.gathering.exited(failed)
        assert told.late == 2

    assert played(play) == [of("joined", 0, 1), stopped(0), failed]


def test_ranks_that_were_stopped_are_reported_together_in_messages_of_bounded_size() -> None:
    async def play(told: Told) -> None:
        for rank in range(MOST_EXITS + 2):
            await told.gathering.exited(stopped(rank))
        await told.gathering.flush()

    first, rest = played(play)
    assert isinstance(first, Exits)
    assert isinstance(rest, Exits)
    assert [each.rank for each in (*first.ranks, *rest.ranks)] == list(range(MOST_EXITS + 2))
