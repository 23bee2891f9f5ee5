"""Compute how many messages between two ranks can be in transit (sent, but not yet received) if no send ever waits.

    rank 0   F0 >a F1 >a F2 >a <g B0 F3 >a <g B1 ...      before its first <g, none of the three >a may be received;
    rank 1   <a F0 B0 >g <a F1 B1 >g ...                  at the fourth >a, g proves that one has been received

A rank with room for that many messages never waits to send. So a host that blocks on its own device (to allocate memory
or load a kernel) blocks no other rank, and is not blocked forever (`pipe/wires/peers.py`).
"""

from collections.abc import Sequence
from itertools import accumulate

from muster.pipe.schedules.programs import Key, Receive, Send, Step

Way = tuple[int, int]  # (source rank, target rank)


def backlogs(ranks: Sequence[Sequence[Step]]) -> dict[Way, int]:
    """Return the largest number of messages in transit for every pair of ranks, whatever the timing.

    `ranks` lists each rank's steps: all steps of a program, or only its forwards. A rank knows the progress of others
    only from the messages it receives; vector clocks track this (Fidge 1988, Mattern 1989).
    """
    count = len(ranks)
    received = {
        (source, target): [0, *accumulate(isinstance(step, Receive) and step.peer == source for step in ranks[target])]
        for source in range(count)
        for target in range(count)
    }
    known = [[0] * count for _ in ranks]  # known[a][b]: number of steps of rank b that a knows to be complete
    sent: dict[Way, int] = {}
    most: dict[Way, int] = {}
    sender_clocks: dict[Key, list[int]] = {}  # the sender's vector clock, by message
    progressed = True
    while progressed:
        progressed = False
        for rank, steps in enumerate(ranks):
            while known[rank][rank] < len(steps):
                step = steps[known[rank][rank]]
                if isinstance(step, Receive):
                    clock = sender_clocks.get(step.key)
                    if clock is None:
                        break
                    known[rank] = [max(pair) for pair in zip(known[rank], clock, strict=True)]
                known[rank][rank] += 1
                progressed = True
                if isinstance(step, Send):
                    way = rank, step.peer
                    sent[way] = sent.get(way, 0) + 1
                    most[way] = max(most.get(way, 0), sent[way] - received[way][known[rank][step.peer]])
                    sender_clocks[step.key] = list(known[rank])
    assert all(known[rank][rank] == len(steps) for rank, steps in enumerate(ranks)), "the program deadlocks"
    return most
