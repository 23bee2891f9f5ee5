"""A rank as its parent sees it: its process, the process group that it leads, report pipe, shared page and orders.

A rank of a `train:` or `bench:` job is a fork that runs a function of Muster. A user's program is treated in the same
way once its page shows an open session. Until then, only its process is watched.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NoReturn

from muster.jobs.basics import exits
from muster.jobs.basics.reading import Lines, parse_json
from muster.jobs.machine import linux
from muster.jobs.node import leftovers, orders, page, rank_start
from muster.jobs.node.orders import Orders
from muster.jobs.node.page import Page, Phase

CHUNK: Final = 1 << 16  # the capacity of a pipe, so that one read empties it
LONGEST: Final = 1 << 13  # maximum bytes of a report; longer lines are dropped


class RankProcess:
    """A started rank. `ours`: it runs a function of Muster in a fork."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        self.rank: int = start["rank"]
        self.ours = not start.get("argv")
        self.start = start
        # A rank that saves checkpoints ignores a scheduler's SIGTERM, to save once more. SIGINT asks it to end.
        self.deaf = self.ours and linux.has_scheduler() and bool(start.get("payload", {}).get("saving"))
        self.pid = 0
        self.page = Page() if self.ours else Page.inheritable()
        self.sent = 0  # the last signal that was sent to the rank
        self.failure: dict[str, Any] = {}
        self._status: int | None = None  # of wait(2), once the leader of the group has ended
        self._ended_at = 0.0
        self._lines = Lines(LONGEST)
        self.pipe, self._writer = os.pipe()
        os.set_blocking(self.pipe, False)
        self._orders, self._obeys = socket.socketpair()

    @property
    def asks(self) -> signal.Signals:
        """The signal that asks the rank to end."""
        return signal.SIGINT if self.deaf or self.page.deaf else signal.SIGTERM

    @property
    def has_session(self) -> bool:
        """True if the page shows the progress of the rank."""
        return self.ours or self.page.session != 0

    @property
    def has_ended(self) -> bool:
        """True once the leader of the group has ended.

        A scheduler's SIGTERM ends a shell, but not a session below it that ignores the signal to save first. Such a
        rank ends with its session.
        """
        if self._status is None:
            return False
        by_term = os.waitstatus_to_exitcode(self._status) in (-signal.SIGTERM, exits.SIGNAL_BASE + signal.SIGTERM)
        if not (by_term and self.page.deaf and self.page.session):
            return True
        try:
            return os.getpgid(self.page.session) != self.pid
        except ProcessLookupError:
            return True

    @property
    def has_group(self) -> bool:
        """True while a process of the group is left."""
        try:
            os.killpg(self.pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)  # it belongs to another user (sudo)
        return True

    @property
    def succeeded(self) -> bool:
        """True if the leader has ended with 0."""
        return self._status == 0

    def leader_ended(self, status: int) -> None:
        """Record the status of wait(2) for the leader of the group."""
        self._status, self._ended_at = status, time.time()

    def become(self) -> NoReturn:
        """Become the rank. Called in the fresh child."""
        os.close(self.pipe)
        self._orders.close()
        page.own = self.page
        if self.ours:
            orders.own = Orders(self._obeys.detach())
        else:
            self._obeys.close()
        if self.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank_start.become(self.start, self._writer, self.page.descriptor)

    def born(self, pid: int) -> None:
        """Set up the parent's side after the fork."""
        self.pid = pid
        os.close(self._writer)
        self._obeys.close()
        self.page.close_descriptor()
        with suppress(PermissionError, ProcessLookupError):  # the child has called exec, or is dead
            os.setpgid(pid, pid)  # the child calls this too, so a stop signal always finds the group

    def close(self) -> None:
        """Close this process's descriptors and its mapping of the page."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
            self.page.close()
            self._orders.close()

    def adopt(self, start: Mapping[str, Any]) -> None:
        """Tell this running rank to continue as another rank, in the next attempt."""
        self.rank, self.start, self.sent, self.failure = start["rank"], start, 0, {}
        self.page.renew(start.get("steps"))
        with suppress(OSError):  # a rank that has just died is reaped later
            self._orders.sendall((json.dumps(start) + "\n").encode())

    def reports(self) -> list[dict[str, Any]] | None:
        """Return the reports since the last call, or None if the pipe is closed. A "failed" report goes to `failure`.

        Lines that are not reports are dropped, because a user's program may write anything to the pipe.
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
        """Send a signal to the whole process group of the rank."""
        with suppress(PermissionError):  # the group now belongs to another user (sudo); the sweep reports it
            linux.kill_quietly(self.pid, number, group=True)

    def looked(self) -> list[Any]:
        """Return the rank's progress: [rank, phase, steps, beats, slowest_s, held, has_session].

        After its last step, a program with a session may run anything for any length of time. It then counts as a
        program without a session.
        """
        shared, phase, has_session = self.page, self.page.phase, self.has_session
        if not self.ours and phase is Phase.END:
            phase, has_session = Phase.START, False
        return [self.rank, phase.word, shared.steps, shared.beats, shared.slowest_s, shared.held, has_session]

    def dump(self) -> str:
        """Send SIGQUIT if it makes the rank write its stacks and does not kill it; return the state of the process."""
        pid = self.pid
        if not self.ours and self.page.session in linux.descendants(self.pid):
            pid = self.page.session  # a descendant may have opened the session
        state = leftovers.state_of(pid)
        if self.ours or (self.page.dumps and pid == self.page.session):
            linux.kill_quietly(pid, signal.SIGQUIT)  # before SIGCONT, so that the stacks show where it was suspended
            linux.kill_quietly(pid, signal.SIGCONT)
        return state

    def ending(self) -> dict[str, Any]:
        """Describe how the rank ended."""
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        return {
            "exited": self.rank,
            "code": code if code >= 0 else None,
            "signal": linux.signal_name(-code) if code < 0 else None,
            "sent": linux.signal_name(self.sent) if self.sent else None,
            "ended": self.failure.get("time", self._ended_at),
            "failure": self.failure,
            "steps": self.page.steps if self.has_session else None,
        }


def _report(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("report"), str) else None
