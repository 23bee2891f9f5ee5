"""How many messages may lie on a way at once, sent and not yet received, if no send ever waits.

    rank 0   F0 >a F1 >a F2 >a <g B0 F3 >a <g B1 ...      before the first <g rank 1 may have received none of three;
    rank 1   <a F0 B0 >g <a F1 B1 >g ...                  before the fourth >a it has received one: g says so

A rank that has room for as many never waits with a send, so a host that waits for its device at any place - while it
takes memory, or loads a kernel - waits only for messages whose senders need nothing of it (`pipe/wires/peers.py`).
"""

from collections.abc import Sequence
from itertools import accumulate

from muster.pipe.schedules.programs import Key, Receive, Send, Step

Way = tuple[int, int]  # from a rank, to a rank


def backlogs(ranks: Sequence[Sequence[Step]]) -> dict[Way, int]:
    """Return for every way the most messages on it at once, however long anything takes.

    `ranks` has each rank's steps, of a program or of its forwards. What a rank knows of the others' progress came with
    what it received: vector clocks (Fidge 1988, Mattern 1989).
    """
    count = len(ranks)
    received = {
        (source, target): [0, *accumulate(isinstance(step, Receive) and step.peer == source for step in ranks[target])]
        for source in range(count)
        for target in range(count)
    }
    known = [[0] * count for _ in ranks]  # steps of each rank that are over, as far as a rank can know
    sent: dict[Way, int] = {}
    most: dict[Way, int] = {}
    told: dict[Key, list[int]] = {}  # with each message: what its sender knew
    went_on = True
    while went_on:
        went_on = False
        for rank, steps in enumerate(ranks):
            while known[rank][rank] < len(steps):
                step = steps[known[rank][rank]]
                if isinstance(step, Receive):
                    news = told.get(step.key)
                    if news is None:
                        break
                    known[rank] = [max(pair) for pair in zip(known[rank], news, strict=True)]
                known[rank][rank] += 1
                went_on = True
                if isinstance(step, Send):
                    way = rank, step.peer
                    sent[way] = sent.get(way, 0) + 1
                    most[way] = max(most.get(way, 0), sent[way] - received[way][known[rank][step.peer]])
                    told[step.key] = list(known[rank])
    assert all(known[rank][rank] == len(steps) for rank, steps in enumerate(ranks)), "no proved program"
    return most
