"""The output of `muster run` while a run is in progress: the plan, rank 0's lines, a progress line, the outcome.

With --tee, it includes the lines of every rank. The ranks' standard output goes to standard output. Their standard
error and Muster's own lines go to standard error.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from muster.jobs.basics.terminal import cut, last_state, rank_line, raw
from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import rankset, screen
from muster.launch.common.ranklogs import is_coloured, prefix
from muster.launch.plan.plan import NodePlan
from muster.launch.records.advice import for_run
from muster.launch.records.verdict import Verdict

MOST_SHOWN: Final = 1 << 20  # characters of one message, so that it does not block the event loop
MOST_LISTED: Final = 256  # ranks of the plan


class Console:
    """A printer of plain lines and, if standard error is a terminal, of a progress line below them."""

    def __init__(self, *, quiet: bool = False, ranks: bool = True, tee: bool = False) -> None:
        self.quiet = quiet
        self.tee = tee  # show the lines of every rank, each prefixed with its rank
        self.ranks = ranks  # show the lines of ranks; False if nobody reads this output
        self._progress: Any = None
        self._task: Any = None
        self._terminal = sys.stderr.isatty() and not quiet

    def say(self, text: str) -> None:
        """Print one line from Muster itself."""
        if not self.quiet:
            self._print(text, sys.stderr)

    def plan(self, run_path: str, nodes: list[NodePlan], master: str) -> None:
        """Print which rank runs on which node."""
        self.say(f"run {run_path}")
        self.say(f"{'rank':>6}  {'node':>4}  {'host':<20}  cores")
        ranks = [(node.placement, rank) for node in nodes for rank in node.ranks]
        for place, rank in ranks[:MOST_LISTED]:
            self.say(f"{rank.rank:>6}  {place.node_rank:>4}  {place.host:<20}  {','.join(map(str, rank.cores))}")
        if (more := len(ranks) - MOST_LISTED) > 0:
            self.say(f"   ...  and {counted(more, 'more rank')}: attempt-000/placement.json in the run folder")
        self.say(f"master {master}")
        if self._terminal and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self.say("closing this terminal ends the run; muster submit starts one that continues without it")

    def lines(self, stream: str, lines: Sequence[str], rank: int = 0) -> None:
        """Print lines of rank 0, or of every rank with --tee. Cut long lines, and drop lines beyond MOST_SHOWN."""
        if self.quiet or not self.ranks:
            return
        target = raw(sys.stdout if stream == "out" else sys.stderr)
        mark = prefix(rank, coloured=is_coloured(target)) if self.tee else ""
        found: list[str] = []
        room = MOST_SHOWN
        for line in map(cut, lines):
            room -= len(line)
            if room < 0:  # no agent of ours sends so much at once
                found.append(f"… ({len(lines) - len(found)} more lines)")
                break
            found.append(mark + (last_state(line) if self.tee else rank_line(line)))
        if found:
            self._print("\n".join(found), target)

    def progress(self, report: Mapping[str, Any]) -> None:
        """Update the progress line from a report."""
        if not self._terminal:
            return
        if self._progress is None:
            self._start_progress(report.get("steps"))
        loss = f"loss {report['loss']:.4f}" if "loss" in report else ""
        rate = f"{report['rate']:,.0f} {report.get('unit', 'steps/s')}" if "rate" in report else ""
        text = "  ".join(filter(None, (loss, rate)))
        self._progress.update(self._task, completed=report["step"], total=report.get("steps"), text=text)

    def _print(self, text: str, stream: TextIO) -> None:
        """Print a line. If that fails (`| head` has ended, or the disk is full), the run continues."""
        try:
            if self._progress is not None and stream.isatty():
                from rich.text import Text

                self._progress.console.print(Text.from_ansi(text), highlight=False, soft_wrap=True)
            else:
                print(text, file=stream, flush=True)
        except OSError as error:
            # The stream still buffers the text and would fail again at every flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is raw(sys.stdout):
                self.say(
                    f"muster: standard output is lost ({error.strerror}); the run continues, and its logs are kept"
                )

    def _start_progress(self, steps: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(),
            console=screen.live(),
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("training", total=steps, text="")
        self._progress.start()

    def end(self, verdict: Verdict, seconds: float, run: RunDir, next_step: str) -> None:
        """Print the outcome: the last lines of the rank that failed first, the verdict, the victims, and advice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        hidden = self.quiet  # the lines of rank 0 were not shown
        self.quiet = self.quiet and verdict.code == 0  # a failure is always shown
        if verdict.code == 0:
            self.say(f"done in {seconds:.1f} s: {verdict.message} · {run.command('status')}")
            return
        if verdict.first is not None and (hidden or not (self.tee or verdict.first.rank == 0)):
            for line in verdict.first.last_lines:
                self.say(f"  {line}")
        self.say(f"muster: {verdict.message}")
        ranks = rankset.fold(each.rank for each in verdict.victims if each.rank is not None)
        if verdict.first is not None and ranks:
            self.say(f"  stopped as a consequence: rank {ranks}")
        self.say(f"  {verdict.name}, exit code {verdict.code} after {seconds:.1f} s · {run.command('why')}")
        if next_step:
            self.say(f"  {for_run(next_step, run)}")
