"""The keeper: parent of one node's ranks, forked from the warm process, commanded by the node's agent.

JSON lines over one socket. From the agent:

    {"do": "store"}                 with a listening socket attached: serve the attempt's store on it
    {"do": "start", "ranks": [RankStart...]}
    {"do": "stop", "grace_s": 5.0}  TERM to every rank's group, KILL after the grace, then sweep what is left

To the agent: ready, started, report (jobs/reports.py), exited, swept, broken. When the socket closes, the keeper stops
its ranks (TERM, 1 s, KILL) and ends. Ranks die with their keeper (PR_SET_PDEATHSIG); what they leave behind becomes
the keeper's child (subreaper) and is killed. A keeper runs one attempt at a time.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from jobs import linux, rank_start
from jobs.boot import module_argv

ORPHAN_GRACE_S: Final = 1.0
CHUNK: Final = 1 << 16
MAX_FDS: Final = 4


@dataclass
class Rank:
    """A running rank: its process (which leads its group) and the reading end of its report pipe."""

    rank: int
    pid: int
    pipe: int
    unread: bytes = b""
    failure: dict[str, Any] = field(default_factory=dict)
    sent: int = 0  # the last signal we sent it


class Keeper:
    """One node's ranks, from start to the last swept process."""

    def __init__(self, agent: socket.socket) -> None:
        self.agent = agent
        self.agent_gone = False
        self.unread = b""
        self.passed: list[int] = []
        self.ranks: dict[int, Rank] = {}
        self.store = 0
        self.kill_at: float | None = None
        self.selector = selectors.DefaultSelector()

    def run(self) -> NoReturn:
        """Serve the agent until its socket closes and no process is left."""
        linux.adopt_orphans()
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.agent, selectors.EVENT_READ, self._read_agent)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, CHUNK))
        self._tell({"ready": os.getpid()})
        while not (self.agent_gone and not self.ranks):
            timeout_s = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            for key, _ in self.selector.select(timeout_s):
                key.data()
            self._reap()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._kill_all()
        self._sweep()
        os._exit(0)

    # From the agent -------------------------------------------------------------------------------------------------

    def _read_agent(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.agent, CHUNK, MAX_FDS)
        except ConnectionError:
            data, descriptors = b"", []
        self.passed += descriptors
        if not data:
            self.selector.unregister(self.agent)
            self.agent_gone = True
            self._stop(ORPHAN_GRACE_S)
            return
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            {"store": self._start_store, "start": self._start, "stop": self._on_stop}[message["do"]](message)

    def _start_store(self, message: dict[str, Any]) -> None:
        listening = socket.socket(fileno=self.passed.pop(0))
        if "torch" not in sys.modules:
            descriptor = listening.fileno()
            argv = [*module_argv(sys.executable, "jobs.store"), "--fd", str(descriptor), "--parent", str(os.getpid())]
            self.store = subprocess.Popen(argv, pass_fds=[descriptor], stdin=subprocess.DEVNULL).pid
            listening.close()
            return
        keeper = os.getpid()
        self.store = os.fork()
        if self.store == 0:
            self._forget_parent(keeper)
            from jobs.store import serve

            serve(listening)
            os._exit(0)
        listening.close()

    def _start(self, message: dict[str, Any]) -> None:
        self.kill_at = None
        keeper = os.getpid()
        for start in message["ranks"]:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._forget_parent(keeper)
                os.close(reader)
                rank_start.become(start, writer)
            with contextlib.suppress(PermissionError, ProcessLookupError):  # it runs its program, or is dead already
                os.setpgid(pid, pid)  # as it does itself: whoever is first, an order to stop finds the group
            os.close(writer)
            os.set_blocking(reader, False)
            rank = Rank(start["rank"], pid, reader)
            self.ranks[pid] = rank
            self.selector.register(reader, selectors.EVENT_READ, lambda rank=rank: self._read_reports(rank))
        self._tell({"started": [[rank.rank, rank.pid] for rank in self.ranks.values()], "time": time.time()})

    def _forget_parent(self, keeper: int) -> None:
        """Undo, in a fresh child, what belongs to the keeper alone."""
        linux.die_with_parent(keeper)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self.agent.close()
        self.selector.close()
        for rank in self.ranks.values():
            os.close(rank.pipe)

    def _on_stop(self, message: dict[str, Any]) -> None:
        self._stop(message["grace_s"])

    # Ranks ----------------------------------------------------------------------------------------------------------

    def _read_reports(self, rank: Rank) -> None:
        if rank.pipe < 0:  # buried since the selector saw it
            return
        try:
            data = os.read(rank.pipe, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(rank.pipe)
            return
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if report["report"] == "failed":
                rank.failure = report
            else:
                self._tell({"report": report, "rank": rank.rank})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if rank := self.ranks.pop(pid, None):
                self._bury(rank, status)
            elif pid == self.store:
                self.store = 0
                if self.ranks:
                    self._tell({"broken": f"the store process ended with code {os.waitstatus_to_exitcode(status)}"})
        if not self.ranks and self.kill_at is not None and not self.agent_gone:
            self._finish_stop()

    def _bury(self, rank: Rank, status: int) -> None:
        ended = time.time()
        if rank.pipe in self.selector.get_map():
            self._read_reports(rank)  # one read empties a pipe: CHUNK is its capacity
        if rank.pipe in self.selector.get_map():
            self.selector.unregister(rank.pipe)
        os.close(rank.pipe)
        rank.pipe = -1
        linux.kill_quietly(rank.pid, signal.SIGKILL, group=True)  # its data loaders and background children
        code = os.waitstatus_to_exitcode(status)
        self._tell(
            {
                "exited": rank.rank,
                "code": code if code >= 0 else None,
                "signal": linux.signal_name(-code) if code < 0 else None,
                "sent": linux.signal_name(rank.sent) if rank.sent else None,
                "ended": rank.failure.get("time", ended),
                "failure": rank.failure,
            }
        )
        if not self.ranks and self.kill_at is None:
            self._sweep(leave_store=True)

    # Stopping -------------------------------------------------------------------------------------------------------

    def _stop(self, grace_s: float) -> None:
        self._reap()  # a rank that has died by itself must not look stopped
        for rank in self.ranks.values():
            rank.sent = rank.sent or signal.SIGTERM
            linux.kill_quietly(rank.pid, signal.SIGTERM, group=True)
            linux.kill_quietly(rank.pid, signal.SIGCONT, group=True)  # a frozen rank may still hear it
        kill_at = time.monotonic() + grace_s
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def _kill_all(self) -> None:
        self.kill_at = time.monotonic() + ORPHAN_GRACE_S  # look again: SIGCHLD wakes us before that
        for rank in self.ranks.values():
            rank.sent = signal.SIGKILL
            linux.kill_quietly(rank.pid, signal.SIGKILL, group=True)

    def _finish_stop(self) -> None:
        self.kill_at = None
        self._tell({"swept": self._sweep()})

    def _sweep(self, *, leave_store: bool = False) -> int:
        """Kill every process below us until none is left; return how many there were."""
        leave = [self.store] if leave_store and self.store else []
        swept: set[int] = set()
        while left := linux.descendants(os.getpid(), leave=leave):
            for pid in left:
                linux.kill_quietly(pid, signal.SIGKILL)
            swept.update(left)
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # until a child is dead
            self._reap_orphans()
        self.store = self.store if leave_store else 0
        return len(swept)

    def _reap_orphans(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return

    def _tell(self, message: dict[str, Any]) -> None:
        if self.agent_gone:
            return
        try:
            self.agent.sendall((json.dumps(message) + "\n").encode())
        except (BrokenPipeError, ConnectionError):
            return  # the reading side sees the end of the socket next and stops the ranks
