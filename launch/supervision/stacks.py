"""Find the ranks of a hung job that are not where the others wait, from the stacks that the ranks wrote. Pure.

A rank writes the Python stacks of all its threads with faulthandler, innermost call first, its main thread last:

    Thread 0x00007f2a (most recent call first):
      File "/usr/lib/python3.11/threading.py", line 327 in wait
    Current thread 0x00007f3b (most recent call first):
      File ".../torch/distributed/distributed_c10d.py", line 3006 in all_reduce
      File ".../ddp/all_reduce.py", line 23 in _mean

    the rank is stopped                 by a signal                                    to blame
    it waits                            innermost in a collective, or for its device   another rank is to blame
    it is in a backward                 computing or waiting in C++, which is unknown  treated as waiting
    it is anywhere else                                                                to blame, if others wait
"""

import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.launch.node.dumping import FRAME, THREAD

STANDS_STILL: Final = ("T", "t")
COLLECTIVE: Final = re.compile(r"/torch/distributed/|/torch/nn/parallel/distributed\.py$")
BACKWARD: Final = re.compile(r"/torch/autograd/(graph|__init__)\.py$")
DEVICE: Final = re.compile(r"/torch/(cuda|accelerator)/")
# A call into C has no frame, so a waiting call is recognized by its source line in Python.
WAITING_LINE: Final = re.compile(r"\.(wait|synchronize|barrier|item|tolist|cpu|numpy)\(|\bdist\.\w+\(")
INTERNAL: Final = re.compile(r"/torch/|/contextlib\.py$")
NAMED: Final = 4  # maximum number of ranks that a message describes one by one
SHOWN_PARTS: Final = 3  # number of components shown of the end of a path

Source = Callable[[str, int], str]


@dataclass(frozen=True)
class Frame:
    """One call in a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = self.file.rpartition("/site-packages/")[2].split("/")
        return f"{'/'.join(path[-SHOWN_PARTS:])}:{self.line} {self.function}"


@dataclass(frozen=True)
class Whereabouts:
    """The place where one rank is. `call`: where it waits; `frame`: the innermost frame of its own code."""

    frame: Frame | None
    stands: bool = False
    waits: bool = False
    call: str = ""
    state: str = "?"
    steps: int | None = None

    def __str__(self) -> str:
        if self.frame is None:
            return f"it wrote no stack (process state {self.state})"
        return f"it {'waits in ' + self.call if self.call else 'is'} at {self.frame}"

    @property
    def sentence(self) -> str:
        """The rank's place and step count; ranks at the same place may differ in their step counts."""
        return str(self) + (f" after {self.steps} steps" if self.steps is not None else "")

    @property
    def place(self) -> tuple[str, Frame | None, int | None]:
        """The rank's position, for comparison with other ranks."""
        return self.call, self.frame, self.steps


@dataclass(frozen=True)
class Blamed:
    """The ranks to blame, lowest first (none if unknown), and the reason as text."""

    ranks: tuple[int, ...]
    text: str


def line_of(file: str, number: int) -> str:
    """Return a line of a source file, "" if the file is not here. Do not trust the name, which comes from a node."""
    return linecache.getline(file, number) if file.endswith(".py") and Path(file).is_file() else ""


def absent(dumps: Mapping[int, Mapping[str, Any]], source: Source = line_of) -> Blamed:
    """Find the ranks that are not where the others wait.

    `dumps`: {rank: {"state", "lines", "steps"?}}, from the agents' `Stacks`. `source(file, number)` returns a
    line of a source file, "" if it is not available.
    """
    if not dumps:
        return Blamed((), "no rank sent its stacks")
    found = {rank: whereabouts(dumps[rank], source) for rank in sorted(dumps)}
    if still := [rank for rank, each in found.items() if each.stands]:
        return Blamed(tuple(still), _each(still, lambda rank: f"is suspended by a signal: {found[rank]}"))
    waiting = {rank: each for rank, each in found.items() if each.waits}
    if busy := [rank for rank in found if rank not in waiting]:
        if waiting:
            where = _meeting(waiting)
            return Blamed(tuple(busy), _each(busy, lambda rank: f"did not reach {where}: {found[rank]}"))
        if len(found) == 1:
            return Blamed(tuple(busy), _each(busy, lambda rank: f"is the only rank: {found[rank]}"))
    return _odd_ones(found, all_wait=not busy)


def whereabouts(dump: Mapping[str, Any], source: Source) -> Whereabouts:
    """Parse one rank's dump."""
    stacks = threads(dump["lines"])
    state, steps = str(dump.get("state", "?")), dump.get("steps")
    stands = state in STANDS_STILL
    if not stacks:
        return Whereabouts(None, stands, state=state, steps=steps)
    main = stacks[-1]
    call = _call(main, source)
    if call == "backward":  # on a GPU, backward runs hooks in other threads
        hooks = (stack for stack in stacks[:-1] if COLLECTIVE.search(stack[0].file))
        main = next(hooks, main)
        call = _call(main, source)
    frame = next((each for each in main if not INTERNAL.search(each.file)), main[0])
    return Whereabouts(frame, stands, waits=bool(call), call=call, state=state, steps=steps)


def threads(lines: Iterable[str]) -> list[list[Frame]]:
    """Parse faulthandler's output: the frames of each thread that has any, innermost first, the main thread last."""
    stacks: list[list[Frame]] = []
    for line in lines:
        if THREAD.match(line):
            stacks.append([])
        elif stacks and (match := FRAME.match(line)):
            number = int(match[2]) if match[2].isdecimal() else 0
            stacks[-1].append(Frame(match[1], number, match[3]))
    return [stack for stack in stacks if stack]


def _call(stack: Sequence[Frame], source: Source) -> str:
    """Name the call in which a thread waits; "" if it is working."""
    inner = stack[0]
    if COLLECTIVE.search(inner.file):
        return inner.function
    if BACKWARD.search(inner.file):
        return "backward"
    if DEVICE.search(inner.file):
        return inner.function
    match = WAITING_LINE.search(source(inner.file, inner.line)) if not INTERNAL.search(inner.file) else None
    return match[0].lstrip(".").rstrip("(") if match else ""


def _odd_ones(found: Mapping[int, Whereabouts], *, all_wait: bool) -> Blamed:
    """Blame the ranks that are not where the majority is. Without a majority, blame the leading ranks."""
    (place, count), *others = Counter(each.place for each in found.values()).most_common()
    if not others:
        where = next(iter(found.values()))
        return Blamed((), f"all {count} ranks report the same place: {where}; check the network and the devices")
    if 2 * count > len(found):
        odd = [rank for rank, each in found.items() if each.place != place]
    else:
        farthest = max(each.steps or 0 for each in found.values())
        odd = [rank for rank, each in found.items() if (each.steps or 0) == farthest]
    if len(odd) == len(found):
        return Blamed(
            (), _each(list(found), lambda rank: f"is in a different place than the others: {found[rank].sentence}")
        )
    they = next(each for rank, each in found.items() if rank not in odd)
    does = "waits" if all_wait else "is"
    text = _each(
        odd,
        lambda rank: (
            f"{does} in a different place than the others: {found[rank].sentence}; another rank: {they.sentence}"
        ),
    )
    return Blamed(tuple(odd), text)


def _meeting(waiting: Mapping[int, Whereabouts]) -> str:
    """Describe where most of the waiting ranks wait."""
    (call, frame, _), count = Counter(each.place for each in waiting.values()).most_common(1)[0]
    return f"{call} ({frame}), where {count} wait{'s' * (count == 1)}"


def _each(ranks: Sequence[int], say: Callable[[int], str]) -> str:
    said = [f"rank {rank} {say(rank)}" for rank in ranks[:NAMED]]
    more = f"; and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return "; ".join(said) + more
