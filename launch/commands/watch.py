"""`muster watch`: a live view of a run, its nodes and its ranks, read from the run folder alone."""

import argparse
import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Final

from muster.launch.common import options, rankset

if TYPE_CHECKING:
    from muster.launch.look.watch.frame import ViewChoice
    from muster.launch.look.watch.keys import Terminal
    from muster.launch.look.watch.watched import RunReader, WatchedRun

REFRESH_S: Final = 1.0
SHARE: Final = 0.04  # share of a core; if reading and drawing take longer, frames are drawn less often
ALL: Final = 1 << 11  # maximum number of ranks whose steps are read for the first frame
WIDE: Final = 120  # number of columns used if the terminal's width is unknown


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster watch`."""
    parser.epilog = "muster watch                                    watch the newest run; q quits"
    options.add_run(parser)
    parser.add_argument("--once", action="store_true", help="print one frame and exit (the default without a terminal)")
    parser.add_argument("--ranks", metavar="LIST", help="show only these ranks, such as 0,8-15")
    parser.add_argument("--json", action="store_true", help="print a line of JSON each second until the run is over")


def run(args: argparse.Namespace) -> int:
    """Show a run until it is over or the user quits."""
    from muster.launch.look.watch.frame import ViewChoice
    from muster.launch.look.watch.watched import RunReader

    watch = RunReader(options.the_run(args))
    watched = watch.look(sweep=ALL)
    count = max(1, len(watched.ranks))
    ranks = None if args.ranks is None else rankset.parse(args.ranks, option="--ranks", count=count)
    choice = ViewChoice(ranks=ranks)
    if args.json:
        return _records(watch, watched, once=args.once)
    if not args.once and not watched.state.is_over and sys.stdout.isatty():
        found = _live(watch, choice)
        if found is None:
            return 0
        watched, choice = found
    _print(watched, choice)
    return 0


def _records(watch: "RunReader", watched: "WatchedRun", *, once: bool) -> int:
    while True:
        print(json.dumps(watched.to_json()), flush=True)
        if once or watched.state.is_over:
            return 0
        time.sleep(REFRESH_S)
        watched = watch.look()


def _print(watched: "WatchedRun", choice: "ViewChoice") -> None:
    """Print one frame with all its rows."""
    from muster.launch.common import screen
    from muster.launch.look.watch.frame import draw

    width = shutil.get_terminal_size((WIDE, 0)).columns
    console = screen.live(sys.stdout)
    for line in draw(watched, choice, width, None).lines:
        console.print(line, no_wrap=True, crop=False, soft_wrap=True)


def _live(watch: "RunReader", choice: "ViewChoice") -> "tuple[WatchedRun, ViewChoice] | None":
    """Draw frames until the run is over, or return None if the user quits."""
    from muster.launch.look.watch.keys import Suspended, opened, stand_still

    while True:
        try:
            with opened() as terminal:
                return _frames(watch, choice, terminal)
        except Suspended:
            stand_still()
        except (KeyboardInterrupt, EOFError):
            return None


def _frames(watch: "RunReader", choice: "ViewChoice", terminal: "Terminal") -> "tuple[WatchedRun, ViewChoice] | None":
    from muster.launch.look.watch.frame import draw

    shown: frozenset[int] = choice.ranks or frozenset()
    while True:
        began, began_cpu_s = time.monotonic(), time.process_time()
        watched = watch.look(shown)
        if watched.state.is_over:
            return watched, choice
        keys: str | None = ""
        due = 0.0
        while keys is not None:
            for key in keys:
                if key == "q":
                    return None
                choice = _moved(choice, key, terminal.size()[1])
            frame = draw(watched, choice, *terminal.size())
            shown, choice = frame.ranks, frame.choice
            terminal.show(frame.lines)
            due = due or began + max(REFRESH_S, (time.process_time() - began_cpu_s) / SHARE)
            keys = terminal.keys(max(0.0, due - time.monotonic()))


def _moved(choice: "ViewChoice", key: str, height: int) -> "ViewChoice":
    from dataclasses import replace

    steps = {"j": 1, "k": -1, " ": height // 2, "b": -(height // 2), "g": -choice.top, "G": 1 << 30}
    if key in ("r", "n"):
        return replace(choice, view={"r": "ranks", "n": "nodes"}[key], top=0)
    return replace(choice, top=max(0, choice.top + steps.get(key, 0)))
