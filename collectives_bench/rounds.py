"""Rounds of disjoint pairs, so that every node meets every other and no node is in two pairs at once. Pure, torch-free.

The circle method of round-robin tournaments (Kirkman, 1847): node 0 stays, the others move on by one seat a round, and
who sits opposite each other plays.

    n = 6, round 0      0 1 2        round 1      0 5 1
                        5 4 3                     4 3 2
"""

import random

Round = list[tuple[int, int]]


def rounds(nodes: int) -> list[Round]:
    """Return the n - 1 rounds of n nodes, or the n rounds of an odd n, in each of which another node rests.

    Pairs are (a, b) with a < b; every pair comes once. Fewer than two nodes have no rounds.
    """
    if nodes < 2:
        return []
    seats = list(range(nodes + nodes % 2))  # the last one of an odd number is an empty seat: who meets it rests
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in opposite if max(pair) < nodes])
        seats[1:] = [seats[-1], *seats[1:-1]]
    return found


def orders(nodes: int, repetitions: int, key: str) -> list[list[Round]]:
    """Return the rounds once for each repetition, each time in another order; the same on every rank for one key.

    What drifts while it is measured then hits other rounds each time, and shows as spread instead of as a slow link.
    """
    found = []
    for repetition in range(repetitions):
        once = rounds(nodes)
        random.Random(f"{key}/{repetition}").shuffle(once)
        found.append(once)
    return found
