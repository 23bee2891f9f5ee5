"""Rounds of disjoint pairs in which every node meets every other node. The functions are pure; the module does not
import torch.

This is the circle method of round-robin tournaments (Kirkman, 1847): node 0 stays, all other nodes move by one position
per round, and opposite positions form pairs.

    n = 6, round 0      0 1 2        round 1      0 5 1
                        5 4 3                     4 3 2
"""

import random

Round = list[tuple[int, int]]


def rounds(nodes: int) -> list[Round]:
    """Return the n - 1 rounds of n nodes. If n is odd, return n rounds; in each of them, one node rests.

    Pairs are (a, b) with a < b; every pair occurs once. With fewer than two nodes, there are no rounds.
    """
    if nodes < 2:
        return []
    positions = list(range(nodes + nodes % 2))  # an odd number gets a dummy position, whose partner rests
    found = []
    for _ in range(len(positions) - 1):
        half = len(positions) // 2
        opposite = zip(positions[:half], reversed(positions[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in opposite if max(pair) < nodes])
        positions[1:] = [positions[-1], *positions[1:-1]]
    return found


def orders(nodes: int, repetitions: int, key: str) -> list[list[Round]]:
    """Return the rounds once per repetition, each time in another order. All ranks with the same key get the same
    orders.

    So a drift during the measurement affects other rounds in each repetition, and shows as spread, not as a slow link.
    """
    found = []
    for repetition in range(repetitions):
        once = rounds(nodes)
        random.Random(f"{key}/{repetition}").shuffle(once)
        found.append(once)
    return found
