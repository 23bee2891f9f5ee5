"""Fork a process for one task, and follow its messages, its progress and its standard error in the parent.

    pipe        JSON lines, one per message
    page        jobs/node/page.py: the process raises `beats` whenever it begins an action, so a hang can be detected
    last words  the end of its standard error (an anonymous file): C++ messages before an abort, stacks if stuck

The process dies with its parent, which must have no threads when it forks.
"""

import faulthandler
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NoReturn

import torch

from muster.jobs.basics.reading import Lines
from muster.jobs.machine import linux
from muster.jobs.node.leftovers import state_of
from muster.jobs.node.page import Page
from muster.jobs.world.failures import is_lost_connection

CHUNK: Final = 1 << 16
MOST_WORDS: Final = 400  # limit in characters for the last words in a message
MOST_COPIED: Final = 1 << 16  # limit in bytes for the copy of its standard error in the rank's log
DUMP_S: Final = 1.0
DUMP_POLL_S: Final = 0.02
STANDARD_ERROR: Final = 2
STOPPED: Final = ("T", "t")
FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$', re.MULTILINE)
NOISE: Final = re.compile(r"^(\[W|frame #|Exception raised from|\s*$)")  # lines of C++ stacks, which hide the message

Tell = Callable[[dict[str, Any]], None]
Work = Callable[[Tell, Page], None]
How = Literal["done", "raised", "died", "silent"]


@dataclass(frozen=True)
class Ended:
    """How the process ended.

    `done`: it finished its work. `raised`: it raised an exception. `died`: it was ended by a signal, or exited early.
    `silent`: it was killed because it made no progress for too long, or exceeded its time limit.
    """

    how: How
    time: float  # unix seconds
    beats: int = 0
    message: str = ""
    lost: bool = False  # True: caused by the loss of another rank
    stopped: bool = False  # silent because a signal (such as SIGSTOP) had stopped it


class Forked:
    """A worker process, forked from this one."""

    def __init__(self, work: Work) -> None:
        self.page = Page()
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self._lines = Lines()
        self._words = linux.memory_file("last-words")
        self._pipe, writing = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(work, parent, writing, self)
        os.close(writing)

    def followed(self, hear: Tell, is_over: Callable[[], bool], poll_s: float) -> Ended:
        """Pass the process's messages to `hear` until it ends, or kill it once `is_over()`; return how it ended.

        `is_over` is called at least every `poll_s` seconds, after all messages so far were processed.
        """
        while (messages := self.told(poll_s)) is not None:
            for message in messages:
                hear(message)
            if is_over():
                return self.buried(silent=True)
        return self.buried(silent=False)

    def told(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Wait at most `timeout_s` for messages and return them; None once the process has ended."""
        if not select.select([self._pipe], [], [], timeout_s)[0]:
            return []
        data = os.read(self._pipe, CHUNK)
        if not data:
            return None
        messages = [json.loads(line) for line in self._lines.of(data)]
        for message in messages:
            self.error = message.get("raised", self.error)
            self.is_done = self.is_done or "done" in message
        return messages

    def buried(self, *, silent: bool) -> Ended:
        """Reap the process, after killing it if it is `silent`, and return how it ended.

        The process's standard error is copied to our own.
        """
        beats, where, stopped = self.page.beats, "", False
        if silent:
            stopped = state_of(self.pid) in STOPPED
            where = "" if stopped else self._where()
            linux.kill_quietly(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        words = self._last_words()
        os.close(self._pipe)
        os.close(self._words)
        self.page.close()
        made = Ended("done", time.time(), beats)
        code = os.waitstatus_to_exitcode(status)
        if self.error is not None:
            return replace(made, how="raised", **self.error)
        if self.is_done and (silent or code == 0):
            return made
        if silent:
            return replace(made, how="silent", message=where, stopped=stopped)
        how = f"was killed by {linux.signal_name(-code)}" if code < 0 else f"ended with code {code}"
        said = f"{how}; last words: {words}" if words else how
        # C++ aborts on an uncaught error. NCCL's watchdog also aborts when it has lost a peer.
        lost = -code == signal.SIGABRT and is_lost_connection(RuntimeError(words))
        return replace(made, how="died", message=said, lost=lost)

    def _where(self) -> str:
        """Make the process write its stacks; return the innermost call of the main thread, which is written last."""
        before = os.fstat(self._words).st_size
        linux.kill_quietly(self.pid, signal.SIGQUIT)
        deadline = time.monotonic() + DUMP_S
        text, seen = "", None
        while text != seen and time.monotonic() < deadline:  # repeat until no more text arrives
            time.sleep(DUMP_POLL_S)
            seen, text = text or None, os.pread(self._words, CHUNK, before).decode(errors="replace")
        stack = text.rpartition("(most recent call first):")[2]
        found = FRAME.search(stack)
        return f"{'/'.join(found[1].split('/')[-2:])}:{found[2]} {found[3]}" if found else ""

    def _last_words(self) -> str:
        """Return the end of the process's standard error as one line, and copy the text to our own standard error."""
        size = os.fstat(self._words).st_size
        text = os.pread(self._words, MOST_COPIED, max(0, size - MOST_COPIED)).decode(errors="replace")
        if text:
            with suppress(OSError):  # the disk may be full; the message of `Ended` contains the text, too
                sys.stderr.write(text)
                sys.stderr.flush()
        said = " ".join(line for line in text.splitlines() if not NOISE.match(line))
        return " ".join(said.split())[-MOST_WORDS:]


def _run_child(work: Work, parent: int, writing: int, process: Forked) -> NoReturn:
    """Run the work in the forked child, then exit. The child must never return into the parent's code."""
    code = 1
    try:
        linux.die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which then ends this child
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # do not inherit the parent's handler
        # no core files: they take GBs each
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.dup2(process._words, STANDARD_ERROR)
        faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)
        os.close(process._pipe)
        # After a fork, torch recreates its thread pool on first use. If autograd's threads all use it first at the same
        # time, one of them may fail with "Invalid thread pool!", so recreate the pool here.
        torch.set_num_threads(torch.get_num_threads())

        def tell(message: dict[str, Any]) -> None:
            data = memoryview((json.dumps(message) + "\n").encode())
            while data:
                data = data[os.write(writing, data) :]

        try:
            work(tell, process.page)
            tell({"done": True})
            code = 0
        except Exception as error:
            text = " ".join(str(error).split())[:MOST_WORDS]
            message, lost = f"{type(error).__name__}: {text}", is_lost_connection(error)
            print(message, file=sys.stderr) if lost else traceback.print_exc()  # the stack of a victim does not help
            tell({"raised": {"message": message, "lost": lost, "time": time.time()}})
    finally:
        with suppress(OSError):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(code)  # without the interpreter's cleanup, in which a broken process group may abort
