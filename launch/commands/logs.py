"""`muster logs`: the merged output of the ranks, each line prefixed with its rank.

Without -f, lines are ordered by attempt, then by rank. With -f, existing lines come first in that order, then new lines
as they are written, including those of files that appear later, until the run ends.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from muster.jobs.basics import terminal
from muster.jobs.basics.errors import UsageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import options, rankset
from muster.launch.common.follow import LineFollower, decoded, offset_of_last
from muster.launch.common.ranklogs import is_coloured, log_files, prefix
from muster.launch.records.runrows import node_of_rank
from muster.launch.records.runstate import DIRECT, RunState, read_state

POLL_S: Final = 0.1
STATE_EVERY_S: Final = 1.0
STREAMS: Final = {"out": ("out",), "err": ("err",), "both": ("out", "err")}


@dataclass(frozen=True)
class LineFilter:
    """The criteria for lines to print; None matches every line."""

    ranks: frozenset[int] | None
    nodes: frozenset[int] | None
    attempts: frozenset[int] | None
    first_attempt: int
    streams: tuple[str, ...]
    pattern: re.Pattern[str] | None
    tail: int | None


class LogLine(NamedTuple):
    """One complete line of a rank's output."""

    rank: int
    node: int | None
    attempt: int
    stream: str
    line: str


@dataclass
class Logs:
    """A reader of the chosen log files of a run. It opens new files as they appear."""

    run: RunDir
    choice: LineFilter
    files: dict[tuple[int, int, str], LineFollower] = field(default_factory=dict)
    nodes: dict[int, dict[int, int]] = field(default_factory=dict)

    def read(self, *, over: bool) -> Iterator[LogLine]:
        """Yield new complete lines and, if the run is over, unterminated last lines."""
        newest = self._discover()
        for (attempt, rank, stream), follower in sorted(self.files.items(), key=_out_first):
            node = self.nodes[attempt].get(rank)
            if self.choice.nodes is not None and node not in self.choice.nodes:
                continue
            for line in follower.poll():
                yield LogLine(rank, node, attempt, stream, decoded(line))
            if over or attempt < newest:
                for line in follower.flush():
                    yield LogLine(rank, node, attempt, stream, decoded(line))

    def are_past(self) -> bool:
        """Return whether a later attempt follows all chosen ones, so that no more lines will come."""
        chosen = self.choice.attempts
        return chosen is not None and max(chosen) < max(self.run.attempt_numbers(), default=0)

    def _discover(self) -> int:
        """Add log files that have appeared; return the number of the newest attempt."""
        attempts = self.run.attempt_numbers()
        for attempt in attempts:
            chosen = self.choice.attempts
            if attempt < self.choice.first_attempt or (chosen is not None and attempt not in chosen):
                continue
            folder = self.run.attempt(attempt).path
            for rank, stream, name in log_files(folder):
                key = (attempt, rank, stream)
                if key not in self.files and stream in self.choice.streams and self._has_rank(rank):
                    self.files[key] = self._open(folder / name)
            known = self.nodes.setdefault(attempt, {})
            if any(number == attempt and rank not in known for number, rank, _ in self.files):
                known.update(node_of_rank(self.run, attempt))
        return max(attempts, default=0)

    def _has_rank(self, rank: int) -> bool:
        return self.choice.ranks is None or rank in self.choice.ranks

    def _open(self, path: Path) -> LineFollower:
        offset = 0 if self.choice.tail is None else offset_of_last(path, self.choice.tail)
        return LineFollower(path, offset=offset, on_restart=_say_restarted)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster logs`."""
    parser.epilog = (
        "muster logs --rank 3                            rank 3 of the newest run\n"
        "muster logs RUN -f                              print lines as they are written"
    )
    options.add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines until the run ends")
    parser.add_argument("--rank", metavar="0,8-15", help="only these ranks (default: all)")
    parser.add_argument("--node", metavar="0,2", help="only ranks of these nodes")
    parser.add_argument(
        "--attempt", metavar="N|all", help="one attempt, or all (default: the newest and any later ones)"
    )
    parser.add_argument("--grep", metavar="RE", help="only lines that match this regular expression")
    parser.add_argument("--stream", choices=tuple(STREAMS), default="both", help="standard output, error, or both")
    tail = options.whole("--tail", least=0)
    parser.add_argument("--tail", metavar="N", type=tail, help="start with the last N lines of each file")
    parser.add_argument("--raw", action="store_true", help="print lines unchanged, without prefix")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the chosen lines; with -f, until the run ends."""
    folder = options.the_run(args)
    state = read_state(folder)
    nodes = {each.rank: each.node for each in state.ranks if each.node is not None}
    logs = Logs(folder, choose(args, folder, state), nodes={state.attempt or 0: nodes})
    printer = Printer(raw=args.raw, as_json=args.json, pattern=logs.choice.pattern)
    seen_at, written = time.monotonic(), _size(folder.events)
    printer.show(logs.read(over=state.is_over))
    while args.follow and not state.is_over and not logs.are_past():
        time.sleep(POLL_S)
        if _size(folder.events) != written or time.monotonic() - seen_at >= STATE_EVERY_S:
            # Read the state before the lines, so that lines written before the end are not missed.
            seen_at, written = time.monotonic(), _size(folder.events)
            state = read_state(folder)
        printer.show(logs.read(over=state.is_over))
    if not logs.files:
        print(f"muster: {folder.run_id}: {_why_empty(state)}", file=sys.stderr)
    return 0


def choose(args: argparse.Namespace, folder: RunDir, state: RunState) -> LineFilter:
    """Return the filter that the options describe.

    Raises:
        UsageError: if the run does not have a chosen rank, node or attempt, or the pattern is invalid.
    """
    attempts = folder.attempt_numbers()
    return LineFilter(
        ranks=None
        if args.rank is None
        else rankset.parse(args.rank, option="--rank", count=_world_size(folder, state)),
        nodes=None if args.node is None else rankset.parse(args.node, option="--node", count=_nodes(folder, state)),
        attempts=_attempts(args.attempt, attempts),
        first_attempt=0 if args.attempt is not None else max(attempts, default=0),
        streams=STREAMS[args.stream],
        pattern=_pattern(args.grep),
        tail=args.tail,
    )


class Printer:
    """A printer of log lines on standard output."""

    def __init__(self, *, raw: bool, as_json: bool, pattern: re.Pattern[str] | None) -> None:
        self.raw = raw
        self.as_json = as_json
        self.pattern = pattern
        self.coloured = is_coloured(sys.stdout)
        self.attempt: int | None = None
        self._output = terminal.raw(sys.stdout)  # `show` escapes lines itself unless --raw is set
        self.prefixes: dict[tuple[int, int | None], str] = {}

    def show(self, lines: Iterable[LogLine]) -> None:
        """Print the lines that match the pattern, and note changes of attempt on standard error."""
        for line in lines:
            text = line.line if self.raw else terminal.last_state(line.line)
            if self.pattern is not None and not self.pattern.search(text):
                continue
            if line.attempt != self.attempt:
                self._say_attempt(line.attempt)
            self._output.write(self._render(line, text) + "\n")
        sys.stdout.flush()

    def _say_attempt(self, attempt: int) -> None:
        if self.attempt is not None:
            sys.stdout.flush()
            print(f"muster: attempt {attempt}", file=sys.stderr)
        self.attempt = attempt

    def _render(self, line: LogLine, text: str) -> str:
        if self.as_json:
            record = {"rank": line.rank, "node": line.node, "attempt": line.attempt, "stream": line.stream}
            return json.dumps({**record, "line": text})
        if self.raw:
            return text
        key = (line.rank, line.node)
        if key not in self.prefixes:
            self.prefixes[key] = prefix(*key, coloured=self.coloured)
        return self.prefixes[key] + text


def _world_size(folder: RunDir, state: RunState) -> int:
    """Return the largest number of ranks in any attempt; an attempt may have fewer ranks than the one before."""
    found = [rank for attempt in folder.attempt_numbers() for rank, _, _ in log_files(folder.attempt(attempt).path)]
    return max(state.world_size or 1, *(rank + 1 for rank in found), 1)


def _nodes(folder: RunDir, state: RunState) -> int:
    """Return the largest number of nodes in any attempt."""
    found = [max(node_of_rank(folder, attempt).values(), default=0) for attempt in folder.attempt_numbers()]
    return max(state.nodes or 1, *(node + 1 for node in found), 1)


def _out_first(item: tuple[tuple[int, int, str], LineFollower]) -> tuple[int, int, bool]:
    (attempt, rank, stream), _ = item
    return attempt, rank, stream == "err"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _attempts(given: str | None, there: list[int]) -> frozenset[int] | None:
    if given is None or given == "all":
        return None
    if not given.isdecimal() or int(given) not in there:
        valid = rankset.fold(there) or "none yet"
        raise UsageError(f"--attempt: this run has no attempt {given!r} (valid: {valid}, or all)")
    return frozenset({int(given)})


def _pattern(given: str | None) -> re.Pattern[str] | None:
    if given is None:
        return None
    try:
        return re.compile(given)
    except re.error as error:
        raise UsageError(
            f"--grep: {given!r} is not a valid regular expression: {error}; put \\ before ( [ * + ? ."
        ) from error


def _why_empty(state: RunState) -> str:
    if state.transport == DIRECT:
        return "no rank has a log file, because the run was started directly; look at the output of its launcher"
    return "none of the chosen ranks has written anything" + ("" if state.is_over else " yet; add -f to wait")


def _say_restarted(path: Path) -> None:
    sys.stdout.flush()
    print(f"muster: {path.name} was truncated or replaced; reading it again from the start", file=sys.stderr)
