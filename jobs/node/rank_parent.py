"""The rank parent, a fork of the warm process, starts and stops the ranks of one node for the agent.

The agent and the rank parent exchange JSON lines over one socket. From the agent:

    {"do": "store", "attempt": n}   with a listening socket attached: serve the attempt's store on it
    {"do": "start", "attempt": n, "ranks": [RankStart...]}    with "adopt": r, rank r of the last attempt continues;
                                                              "steps": those of the checkpoint it loads, or null
    {"do": "start", "attempt": n, "joins": true, "ranks": [RankStart...]}    also start these, which wait for an order;
                                                              those of an earlier attempt end
    {"do": "stop", "attempt": n, "grace_s": 5.0}    SIGTERM to every rank's group, SIGKILL after the grace, then sweep.
                                                    The group of a program has the grace even if its leader ends first
    {"do": "look"}                  report the progress of every rank
    {"do": "hold"}                  every rank waits before its next step (jobs/node/page.py)
    {"do": "stop_at", "steps": n, "regroups": false}   after this many steps every rank saves and ends, or waits
    {"do": "dump"}                  every rank whose SIGQUIT handler does so writes its stacks to its standard error

Messages to the agent carry the number of the attempt: started, report (jobs/node/reports.py), exited, swept, looked,
dumped, broken; and, once, ready. When the socket closes, the rank parent stops its ranks (SIGTERM, 1 s, SIGKILL) and
ends. Ranks die with the rank parent (PR_SET_PDEATHSIG). Processes that ranks leave behind become children of the rank
parent (subreaper) and are killed. The next attempt may start once the previous one is swept.
"""

import faulthandler
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from muster.jobs.basics import exits
from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.reading import Lines
from muster.jobs.hosts.ranks import MEMORY
from muster.jobs.machine import linux
from muster.jobs.node import leftovers
from muster.jobs.node.rank_process import RankProcess

ORPHAN_GRACE_S: Final = 1.0
KILL_S: Final = 2.0  # how long to wait until a killed rank is dead; after that it is only reported
CHUNK: Final = 1 << 16
MAX_FDS: Final = 4
STDERR: Final = 2  # descriptor of standard error in every child, even if it is redirected


class RankParent:
    """The parent of one node's ranks, from the first start to the last sweep, over all attempts."""

    def __init__(self, agent: socket.socket) -> None:
        self.agent = agent
        self.agent_gone = False
        self.lines = Lines()
        self.passed: list[int] = []
        self.attempt = 0
        self.ranks: dict[int, RankProcess] = {}
        self.orphaned: list[RankProcess] = []  # programs whose leader has ended, such as a shell, but not their group
        self.stubborn: dict[int, int] = {}  # {pid: rank} of ranks that survived SIGKILL so far
        self.dead: dict[int, dict[str, Any]] = {}  # {rank: how it ended} of this attempt
        self.store = 0
        self.kill_at: float | None = None
        self.killed = False
        self.memory: set[str] = set()  # folders in memory that the agent has made for the ranks
        self.selector = selectors.DefaultSelector()

    def run(self) -> NoReturn:
        """Serve the agent until its socket is closed and no process is left."""
        linux.adopt_orphans()
        # Installed before the forks. The handler is in C, so it also works in a new rank, or while the GIL is held.
        faulthandler.register(signal.SIGQUIT, file=STDERR, all_threads=True)
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.agent, selectors.EVENT_READ, self._read_agent)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, CHUNK))
        self._send({"ready": os.getpid()})
        while not self.agent_gone or self.ranks or self.orphaned:
            timeout_s = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            for key, _ in self.selector.select(timeout_s):
                key.data()
            self._reap()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._kill_all()
        self._sweep()
        for path in self.memory:  # a killed agent could not delete its folder
            shutil.rmtree(path, ignore_errors=True)
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
        handlers = {
            "store": self._start_store,
            "start": self._start,
            "stop": self._on_stop,
            "look": self._look,
            "hold": self._hold,
            "stop_at": self._stop_at,
            "dump": self._dump,
        }
        for line in self.lines.of(data):
            message = json.loads(line)
            handlers[message["do"]](message)

    def _start_store(self, message: dict[str, Any]) -> None:
        self.attempt = message.get("attempt", 0)
        if self.store:  # the last attempt was not stopped, because its ranks ended by themselves
            linux.kill_quietly(self.store, signal.SIGKILL)
        listening = socket.socket(fileno=self.passed.pop(0))
        if "torch" not in sys.modules:
            descriptor = listening.fileno()
            argv = [
                *module_argv(sys.executable, "muster.jobs.node.store"),
                "--fd",
                str(descriptor),
                "--parent",
                str(os.getpid()),
            ]
            self.store = subprocess.Popen(argv, pass_fds=[descriptor], stdin=subprocess.DEVNULL).pid
            listening.close()
            return
        rank_parent = os.getpid()
        self.store = os.fork()
        if self.store == 0:
            deaf = signal.getsignal(signal.SIGTERM)
            self._forget_parent(rank_parent)
            signal.signal(signal.SIGTERM, deaf)
            from muster.jobs.node.store import serve

            serve(listening)
            os._exit(0)
        listening.close()

    def _start(self, message: dict[str, Any]) -> None:
        """Start the ranks of an attempt. Ranks of the last attempt continue if this one adopts them, else they end."""
        attempt = message.get("attempt", 0)
        adopted = [start for start in message["ranks"] if start.get("adopt") is not None]
        if self.ranks and not adopted and not message.get("joins"):
            what = f"attempt {attempt} cannot start while ranks of attempt {self.attempt} are running"
            self._send({"broken": what, "code": exits.INFRASTRUCTURE})
            return
        for rank in self.orphaned:  # of an attempt that was never stopped
            rank.send(signal.SIGKILL)
        self.orphaned = []
        joins = message.get("joins") and attempt == self.attempt
        self.attempt, self.kill_at, self.killed, self.stubborn = attempt, None, False, {}
        dead = [] if joins else self._adopt(adopted)
        self.memory |= {start["env"][MEMORY] for start in message["ranks"] if MEMORY in start["env"]}
        rank_parent = os.getpid()
        for start in message["ranks"]:
            if start.get("adopt") is not None:
                continue
            rank = RankProcess(start)
            pid = os.fork()
            if pid == 0:
                self._forget_parent(rank_parent)
                rank.become()
            rank.born(pid)
            self.ranks[pid] = rank
            self.selector.register(rank.pipe, selectors.EVENT_READ, lambda rank=rank: self._read_reports(rank))
        self._send({"started": [[rank.rank, rank.pid] for rank in self.ranks.values()], "time": time.time()})
        for ending in dead:
            self._send(ending)

    def _adopt(self, starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Let ranks of the last attempt continue, and kill its other ranks.

        Return how those ended that have died meanwhile.
        """
        before = {rank.rank: rank for rank in self.ranks.values()}
        chosen = {start["adopt"]: start for start in starts}
        for rank in before.values():
            if rank.rank not in chosen:
                rank.send(signal.SIGKILL)
                self._let_go(rank)
        self.ranks = {pid: rank for pid, rank in self.ranks.items() if rank.rank in chosen}
        gone: dict[str, Any] = {"code": None, "signal": "SIGKILL", "sent": None, "failure": {}, "steps": None}
        gone["ended"] = time.time()
        dead = [
            # the steps behind the checkpoint from which the others continue are those of the last attempt
            {**self.dead.get(each, gone), **_steps_of(start), "exited": start["rank"]}
            for each, start in chosen.items()
            if each not in before
        ]
        for each, start in chosen.items():
            if each in before:
                before[each].adopt(start)
        self.dead = {}
        return dead

    def _forget_parent(self, rank_parent: int) -> None:
        """Undo, in a fresh child, the settings that only the rank parent needs."""
        linux.die_with_parent(rank_parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.agent.close()
        self.selector.close()
        for rank in self.ranks.values():
            rank.close()

    def _on_stop(self, message: dict[str, Any]) -> None:
        if not self.ranks:  # the attempt has not started on this node
            self.attempt = message.get("attempt", self.attempt)
        self._stop(message["grace_s"])

    # The shared pages -----------------------------------------------------------------------------------------------

    def _look(self, _: dict[str, Any]) -> None:
        self._send({"looked": [rank.looked() for rank in self.ranks.values()]})

    def _hold(self, _: dict[str, Any]) -> None:
        for rank in self.ranks.values():
            rank.page.hold = 1

    def _stop_at(self, message: dict[str, Any]) -> None:
        for rank in self.ranks.values():
            rank.page.stop(message["steps"], regroups=message.get("regroups", False))

    def _dump(self, _: dict[str, Any]) -> None:
        self._send({"dumped": {rank.rank: rank.dump() for rank in self.ranks.values()}})

    # Ranks ----------------------------------------------------------------------------------------------------------

    def _read_reports(self, rank: RankProcess) -> None:
        if rank.pipe < 0:  # closed since the selector returned
            return
        reports = rank.reports()
        if reports is None:
            self.selector.unregister(rank.pipe)
            return
        for report in reports:
            current = report.pop("attempt", self.attempt) == self.attempt  # else its numbers are those of another one
            if current or report["report"] == "saved":
                self._send({"report": report, "rank": rank.rank})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if rank := self.ranks.get(pid):
                rank.leader_ended(status)
            elif pid == self.store:
                self.store = 0
                if self.ranks:
                    what = f"the store process ended with code {os.waitstatus_to_exitcode(status)}"
                    self._send({"broken": what, "code": exits.INFRASTRUCTURE})
        ended = {pid: rank for pid, rank in self.ranks.items() if rank.has_ended}
        self.ranks = {pid: rank for pid, rank in self.ranks.items() if pid not in ended}
        for rank in ended.values():
            self._bury(rank)
        before, self.orphaned = self.orphaned, [rank for rank in self.orphaned if rank.has_group]
        if self.ranks or self.orphaned or self.agent_gone:
            return
        if self.kill_at is not None:
            self._finish_stop()
        elif ended or before:
            self._sweep(leave_store=True)

    def _bury(self, rank: RankProcess) -> None:
        """Report the end of a rank. Its data loaders and background children end with it.

        A program that ended with an error may have been a shell, and its child may be saving. So the rest of its group
        gets the grace time, as the other ranks do.
        """
        if rank.pipe in self.selector.get_map():
            self._read_reports(rank)
        if rank.ours or self.killed or (rank.succeeded and self.kill_at is None):
            rank.send(signal.SIGKILL)
        else:
            self.orphaned.append(rank)
        self.dead[rank.rank] = rank.ending()
        self._send(self.dead[rank.rank])
        self._let_go(rank)

    def _let_go(self, rank: RankProcess) -> None:
        if rank.pipe in self.selector.get_map():
            self.selector.unregister(rank.pipe)
        rank.close()

    # Stopping -------------------------------------------------------------------------------------------------------

    def _stop(self, grace_s: float) -> None:
        self._reap()  # reap first, so that a rank that died by itself is not reported as stopped
        for rank in self.ranks.values():
            rank.sent = rank.sent or rank.asks
            rank.send(rank.asks)
            rank.send(signal.SIGCONT)  # so that a suspended rank receives the signal
        for rank in self.orphaned:
            rank.send(signal.SIGTERM)
            rank.send(signal.SIGCONT)
        if not self.killed:
            kill_at = time.monotonic() + grace_s
            self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def _kill_all(self) -> None:
        """Kill the remaining ranks. If they were killed before, stop waiting for them."""
        if self.killed:
            for rank in self.ranks.values():
                self._let_go(rank)
            self.stubborn = {pid: rank.rank for pid, rank in self.ranks.items()}
            self.ranks, self.orphaned = {}, []
            if not self.agent_gone:
                self._finish_stop()
            return
        self.killed, self.kill_at = True, time.monotonic() + KILL_S  # SIGCHLD wakes the loop earlier
        for rank in (*self.ranks.values(), *self.orphaned):
            rank.sent = signal.SIGKILL
            rank.send(signal.SIGKILL)

    def _finish_stop(self) -> None:
        self.kill_at, self.killed = None, False
        swept = self._sweep()
        left = [{**each, "rank": self.stubborn.get(each["pid"])} for each in leftovers.described(swept.left)]
        self._send({"swept": swept.count, "left": left})

    def _sweep(self, *, leave_store: bool = False) -> leftovers.SweepResult:
        """Kill descendants until none is left, or the remaining ones cannot be killed."""
        leave = [self.store] if leave_store and self.store else []
        limit_s = 0.0 if self.stubborn else leftovers.LIMIT_S  # do not wait for these ranks again
        swept = leftovers.sweep(os.getpid(), leave=leave, limit_s=limit_s)
        if not leave_store or self.store in swept.buried:
            self.store = 0
        return swept

    def _send(self, message: dict[str, Any]) -> None:
        if self.agent_gone:
            return
        try:
            self.agent.sendall((json.dumps({**message, "attempt": self.attempt}) + "\n").encode())
        except (BrokenPipeError, ConnectionError):
            return  # `_read_agent` will find the socket closed, and stop the ranks


def _steps_of(start: Mapping[str, Any]) -> dict[str, int]:
    return {} if start.get("steps") is None else {"steps": start["steps"]}
