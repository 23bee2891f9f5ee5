"""A rank as its keeper holds it: its process, the group that it leads, its report pipe, the page they share.

A rank of ours runs a function of ours in a fork. A program of the user's counts as one as soon as its page says that
it has opened a session; until then nothing is known of it but its process.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NoReturn

from muster.jobs.basics.reading import Lines, parse_json
from muster.jobs.machine import linux
from muster.jobs.node import leftovers, page, rank_start
from muster.jobs.node.page import Page, Phase

CHUNK: Final = 1 << 16  # the capacity of a pipe: one read empties it
LONGEST: Final = 1 << 13  # of a report; what is longer is none


class RankProcess:
    """A rank that has been started; `ours`: it runs a function of ours, in a fork."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        self.rank: int = start["rank"]
        self.ours = not start.get("argv")
        self.start = start
        # A rank that saves outlives a scheduler's SIGTERM, to save once more; it is asked to end by another signal.
        self.deaf = self.ours and linux.has_scheduler() and bool(start.get("payload", {}).get("saving"))
        self.pid = 0
        self.page = Page() if self.ours else Page.inheritable()
        self.sent = 0  # the last signal we sent it
        self.failure: dict[str, Any] = {}
        self._lines = Lines(LONGEST)
        self.pipe, self._writer = os.pipe()
        os.set_blocking(self.pipe, False)

    @property
    def asks(self) -> signal.Signals:
        """The signal that asks it to end."""
        return signal.SIGINT if self.deaf or self.page.deaf else signal.SIGTERM

    @property
    def has_session(self) -> bool:
        """True when its page tells how far it is."""
        return self.ours or self.page.session != 0

    def become(self) -> NoReturn:
        """Be the rank: in the fresh child."""
        os.close(self.pipe)
        page.own = self.page
        if self.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank_start.become(self.start, self._writer, self.page.descriptor)

    def born(self, pid: int) -> None:
        """Take its process over: in the keeper."""
        self.pid = pid
        os.close(self._writer)
        self.page.close_descriptor()
        with suppress(PermissionError, ProcessLookupError):  # it runs its program, or is dead already
            os.setpgid(pid, pid)  # as it does itself: whoever is first, an order to stop finds the group

    def close(self) -> None:
        """Give back what this process holds of it."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
            self.page.close()

    def reports(self) -> list[dict[str, Any]] | None:
        """Return what it has reported since the last call; None: it will report no more. Its failure is kept.

        A line that is no report is dropped: a program of the user's may write anything.
        """
        try:
            data = os.read(self.pipe, CHUNK)
        except BlockingIOError:
            return []
        if not data:
            return None
        reports = [report for line in self._lines.of(data) if (report := _report(line)) is not None]
        self.failure = next((each for each in reversed(reports) if each["report"] == "failed"), self.failure)
        return [each for each in reports if each["report"] != "failed"]

    def send(self, number: signal.Signals) -> None:
        """Signal its whole group."""
        with suppress(PermissionError):  # all of it is somebody else's by now (sudo): the sweep will tell
            linux.kill_quietly(self.pid, number, group=True)

    def looked(self) -> list[Any]:
        """Say how far it is: [rank, phase, steps, beats, slowest_s, held, tells].

        A program whose steps are over may do anything, for as long as it likes: it tells no more than before them.
        """
        seen, phase, tells = self.page, self.page.phase, self.has_session
        if not self.ours and phase is Phase.END:
            phase, tells = Phase.START, False
        return [self.rank, phase.word, seen.steps, seen.beats, seen.slowest_s, seen.held, tells]

    def dump(self) -> str:
        """Have it write its stacks, if SIGQUIT does that - a program may die of it; return its state."""
        pid = self.pid
        if not self.ours and self.page.session in linux.descendants(self.pid):
            pid = self.page.session  # a script of the user's may have started it
        state = leftovers.state_of(pid)
        if self.ours or (self.page.dumps and pid == self.page.session):
            linux.kill_quietly(pid, signal.SIGQUIT)  # before it goes on: so it is seen where it stood still
            linux.kill_quietly(pid, signal.SIGCONT)
        return state

    def ending(self, status: int, ended: float) -> dict[str, Any]:
        """Say how it ended, by the status that wait(2) gave and the time (unix seconds)."""
        code = os.waitstatus_to_exitcode(status)
        return {
            "exited": self.rank,
            "code": code if code >= 0 else None,
            "signal": linux.signal_name(-code) if code < 0 else None,
            "sent": linux.signal_name(self.sent) if self.sent else None,
            "ended": self.failure.get("time", ended),
            "failure": self.failure,
            "steps": self.page.steps if self.has_session else None,
        }


def _report(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("report"), str) else None
