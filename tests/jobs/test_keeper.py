"""The keeper and its warm process, as an agent sees them: real processes, commanded over a socket."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import ranks
from launch.processes import kill_all, of_run, start_ticks
from support.live import wait_until

pytestmark = pytest.mark.ranks

DEADLINE_S = 20.0
SLEEP = ["sleep", "1000"]
STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
"""
# Two that escape: one in a session of its own, one that forked twice for that; both deaf, and not of the rank's group.
ESCAPES = (
    STUBBORN
    + """
waiting, ready = os.pipe()
for forks in (1, 2):
    if os.fork() == 0:
        os.setsid()
        if forks == 2 and os.fork():
            os._exit(0)
        os.write(ready, b".")
        time.sleep(1000)
count = 0
while count < 2:
    count += len(os.read(waiting, 2))
print("ready", flush=True)
"""
)


class Warm:
    """A warm process with its keepers; this is their agents."""

    def __init__(self, folder: Path, keepers: int, preload: str) -> None:
        self.folder = folder
        self.run_id = f"keeper-{os.getpid()}-{time.monotonic_ns()}"
        pairs = [socket.socketpair() for _ in range(keepers)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        argv = [sys.executable, "-I", "-m", "jobs.warm", "--fds", ",".join(map(str, descriptors)), "--preload", preload]
        self.said = (folder / "warm.err").open("w+")
        self.process = subprocess.Popen(
            argv, pass_fds=descriptors, env={**os.environ, ranks.RUN_ID: self.run_id}, stderr=self.said
        )
        self.agents = []
        for ours, theirs in pairs:
            theirs.close()
            ours.settimeout(DEADLINE_S)
            self.agents.append(ours)
        self.readers = [ours.makefile("rb") for ours in self.agents]
        self.keepers: list[int] = []

    def next(self, key: str, keeper: int = 0) -> dict[str, Any]:
        """Return the next message, which must be of this kind."""
        message: dict[str, Any] = json.loads(self.readers[keeper].readline())
        assert key in message, message
        return message

    def wait_for_keepers(self) -> "Warm":
        self.keepers = [self.next("ready", keeper)["ready"] for keeper in range(len(self.agents))]
        return self

    def tell(self, message: dict[str, Any], keeper: int = 0) -> None:
        self.agents[keeper].sendall((json.dumps(message) + "\n").encode())

    def out(self, rank: int) -> Path:
        return self.folder / f"{rank}.out"

    def err(self, rank: int) -> Path:
        return self.folder / f"{rank}.err"

    def rank(self, rank: int, argv: list[str] | None = None, *, code: str = "", **fields: Any) -> dict[str, Any]:
        """Describe a rank that runs a program, or Python code in the fork itself."""
        what = {"argv": argv} if argv is not None else {"call": "builtins:exec", "payload": code}
        start = {"rank": rank, "env": {}, "workdir": str(self.folder), "cores": [], "threads": 1, **what}
        return {**start, "out": str(self.out(rank)), "err": str(self.err(rank)), **fields}

    def start(self, *starts: dict[str, Any], keeper: int = 0) -> dict[int, int]:
        """Start ranks; return their pids."""
        self.tell({"do": "start", "ranks": list(starts)}, keeper)
        return dict(self.next("started", keeper)["started"])

    def end_of(self, *numbers: int, keeper: int = 0) -> list[dict[str, Any]]:
        """Wait until these ranks have ended; return their records in rank order."""
        records = [self.next("exited", keeper) for _ in numbers]
        assert sorted(record["exited"] for record in records) == sorted(numbers)
        return sorted(records, key=lambda record: record["exited"])

    def wait_for_output(self, rank: int, text: str = "ready\n") -> None:
        path = self.out(rank)
        wait_until(lambda: path.is_file() and path.read_text() == text, f"{text!r} from rank {rank}")

    def left(self) -> list[int]:
        return of_run(self.run_id)

    def close(self) -> None:
        for each in (*self.readers, *self.agents):
            each.close()

    def kill(self) -> None:
        """Leave nothing behind, whatever the test has shown."""
        self.close()
        self.process.kill()
        self.process.wait()
        kill_all(self.left(), term_s=0.0)
        self.said.close()


def state_of(pid: int) -> str:
    """The letter of proc(5): S waits, T stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def make_warm(tmp_path: Path) -> Iterator[Callable[..., Warm]]:
    """Return a function that starts a warm process which imports nothing."""
    made: list[Warm] = []

    def make(keepers: int = 1, preload: str = "") -> Warm:
        made.append(Warm(tmp_path, keepers, preload))
        return made[-1]

    yield make
    for warm in made:
        warm.kill()


@pytest.fixture
def warm(make_warm: Callable[..., Warm]) -> Warm:
    """A warm process with one keeper that is ready."""
    return make_warm().wait_for_keepers()


# How ranks end --------------------------------------------------------------------------------------------------------


def test_every_end_is_told_once_with_its_code_or_signal_and_time(warm: Warm) -> None:
    began = time.time()
    pids = warm.start(
        warm.rank(4, ["true"]),
        warm.rank(5, ["bash", "-c", "exit 3"]),
        warm.rank(6, ["bash", "-c", "kill -SEGV $$"]),
        warm.rank(7, code="raise SystemExit(9)"),
        warm.rank(8, code="raise ValueError('mine')"),
    )
    assert sorted(pids) == [4, 5, 6, 7, 8]
    records = warm.end_of(4, 5, 6, 7, 8)
    assert [record["code"] for record in records] == [0, 3, None, 9, 1]
    assert [record["signal"] for record in records] == [None, None, "SIGSEGV", None, None]
    assert all(record["sent"] is None and record["failure"] == {} for record in records)
    assert all(began <= record["ended"] <= time.time() for record in records)
    assert "ValueError: mine" in warm.err(8).read_text()
    assert not any(map(start_ticks, pids.values()))


def test_a_rank_that_hears_term_is_stopped_at_once_and_a_deaf_one_is_killed_after_the_grace(warm: Warm) -> None:
    warm.start(warm.rank(0, code=STUBBORN + "print('ready')\ntime.sleep(1000)"), warm.rank(1, SLEEP))
    warm.wait_for_output(0)
    stopped_at = time.time()
    warm.tell({"do": "stop", "grace_s": 0.4})
    first, second = warm.next("exited"), warm.next("exited")
    assert {**first, "ended": 0.0} == {
        "exited": 1,
        "code": None,
        "signal": "SIGTERM",
        "sent": "SIGTERM",
        "ended": 0.0,
        "failure": {},
    }
    assert (second["exited"], second["signal"], second["sent"]) == (0, "SIGKILL", "SIGKILL")
    assert second["ended"] - stopped_at >= 0.4
    assert warm.next("swept") == {"swept": 0}


def test_a_second_stop_can_only_shorten_the_grace(warm: Warm) -> None:
    warm.start(warm.rank(0, code=STUBBORN + "print('ready')\ntime.sleep(1000)"))
    warm.wait_for_output(0)
    for grace_s in (1000.0, 0.0, 1000.0):
        warm.tell({"do": "stop", "grace_s": grace_s})
    assert warm.end_of(0)[0]["signal"] == "SIGKILL"
    assert warm.next("swept") == {"swept": 0}


def test_a_frozen_rank_still_hears_that_it_is_to_stop(warm: Warm) -> None:
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print("ready")
time.sleep(1000)
"""
    pids = warm.start(warm.rank(0, code=code))
    warm.wait_for_output(0)
    os.kill(pids[0], signal.SIGSTOP)
    warm.tell({"do": "stop", "grace_s": 1000.0})
    (record,) = warm.end_of(0)
    assert (record["code"], record["signal"], record["sent"]) == (7, None, "SIGTERM")


def test_a_rank_that_had_died_by_itself_when_the_order_to_stop_came_does_not_look_stopped(warm: Warm) -> None:
    """Both waited for the keeper: the order was read first, and the signal of the dead rank counted as our own."""
    code = "import time; print('ready'); time.sleep(1000)"
    pids = warm.start(warm.rank(0, code=code), warm.rank(1, code=code))
    warm.wait_for_output(0)
    warm.wait_for_output(1)
    (keeper,) = warm.keepers
    wait_until(lambda: state_of(keeper) == "S", "the keeper to wait")
    os.kill(keeper, signal.SIGSTOP)
    wait_until(lambda: state_of(keeper) == "T", "the keeper to stand still")
    os.kill(pids[0], signal.SIGTERM)
    wait_until(lambda: start_ticks(pids[0]) is None, "the end of rank 0")
    warm.tell({"do": "stop", "grace_s": 5.0})
    os.kill(keeper, signal.SIGCONT)
    died, stopped = warm.end_of(0, 1)
    assert (died["signal"], died["sent"]) == ("SIGTERM", None)
    assert (stopped["signal"], stopped["sent"]) == ("SIGTERM", "SIGTERM")


def test_an_order_to_stop_right_behind_the_order_to_start_reaches_every_rank(warm: Warm) -> None:
    """A rank made its group itself, and so the signal to a group that was not there yet was lost."""
    (core, *_) = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(warm.keepers[0], [core])  # so that it goes on while what it forks has to wait
    os.sched_setscheduler(warm.keepers[0], os.SCHED_BATCH, os.sched_param(0))
    starts = [warm.rank(rank, SLEEP) for rank in range(16)]
    orders = [{"do": "start", "ranks": starts}, {"do": "stop", "grace_s": 1000.0}]
    warm.agents[0].sendall("".join(json.dumps(order) + "\n" for order in orders).encode())
    warm.next("started")
    assert [(record["signal"], record["sent"]) for record in warm.end_of(*range(16))] == [("SIGTERM", "SIGTERM")] * 16


def test_stopping_when_nothing_runs_is_answered(warm: Warm) -> None:
    warm.tell({"do": "stop", "grace_s": 5.0})
    assert warm.next("swept") == {"swept": 0}


# What ranks leave behind ----------------------------------------------------------------------------------------------


def test_what_a_stopped_rank_leaves_behind_is_swept_and_counted(warm: Warm) -> None:
    warm.start(warm.rank(0, code=ESCAPES + "time.sleep(1000)"))
    warm.wait_for_output(0)
    assert len(warm.left()) == 5  # warm, keeper, rank, and two that escaped
    warm.tell({"do": "stop", "grace_s": 0.0})
    warm.end_of(0)
    assert warm.next("swept") == {"swept": 2}
    assert len(warm.left()) == 2


def test_what_a_rank_leaves_behind_when_it_is_done_is_killed_without_an_order(warm: Warm) -> None:
    warm.start(warm.rank(0, code=ESCAPES), warm.rank(1, ["true"]))
    warm.end_of(0, 1)
    wait_until(lambda: len(warm.left()) == 2, "the end of all but warm process and keeper")
    warm.start(warm.rank(2, ["true"]))  # and it goes on
    assert warm.end_of(2)[0]["code"] == 0


def test_the_group_of_a_rank_that_ended_is_killed_while_others_run(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, ["bash", "-c", "sleep 1000 & echo $!"]), warm.rank(1, SLEEP))
    warm.end_of(0)
    child = int(warm.out(0).read_text())
    wait_until(lambda: start_ticks(child) is None, "the end of the child")
    assert start_ticks(pids[1]) is not None


@pytest.mark.parametrize("how", ["close", "kill the agent's end"])
def test_when_the_socket_closes_everything_ends_the_stubborn_too(how: str, warm: Warm) -> None:
    warm.start(warm.rank(0, code=ESCAPES + "time.sleep(1000)"), warm.rank(1, SLEEP))
    warm.wait_for_output(0)
    if how == "close":
        warm.close()
    else:
        warm.agents[0].shutdown(socket.SHUT_RDWR)
    assert warm.process.wait(timeout=DEADLINE_S) == 0
    assert warm.left() == []


def test_a_killed_keeper_takes_its_ranks_along_and_the_warm_process_buries_what_they_left(make_warm) -> None:
    warm = make_warm(keepers=2).wait_for_keepers()
    keepers = warm.keepers
    first = warm.start(warm.rank(0, code=ESCAPES + "time.sleep(1000)"), warm.rank(1, SLEEP))
    second = warm.start(warm.rank(2, SLEEP), keeper=1)
    warm.wait_for_output(0)
    os.kill(keepers[0], signal.SIGKILL)
    wait_until(lambda: sorted(warm.left()) == sorted([warm.process.pid, keepers[1], second[2]]), "the others alone")
    assert not any(map(start_ticks, first.values()))
    warm.tell({"do": "stop", "grace_s": 5.0}, keeper=1)
    assert warm.end_of(2, keeper=1)[0]["signal"] == "SIGTERM"
    os.kill(keepers[1], signal.SIGKILL)
    assert warm.process.wait(timeout=DEADLINE_S) == 0
    assert warm.left() == []


def test_ranks_die_with_their_keeper_even_where_no_warm_process_is_left_to_bury_them(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, code=STUBBORN + "print('ready')\ntime.sleep(1000)"), warm.rank(1, SLEEP))
    warm.wait_for_output(0)
    warm.process.kill()
    warm.process.wait()
    assert all(map(start_ticks, pids.values()))  # the keeper goes on without it
    os.kill(warm.keepers[0], signal.SIGKILL)
    wait_until(lambda: not any(map(start_ticks, pids.values())), "the end of the ranks")


# What a rank is given -------------------------------------------------------------------------------------------------


def test_output_is_appended_to_the_ranks_own_two_files(warm: Warm) -> None:
    warm.out(0).write_text("of an earlier attempt\n")
    say = ["bash", "-c", "echo to out $0; echo to err $0 >&2"]
    for word in ("one", "two"):
        warm.start(warm.rank(0, [*say, word]), warm.rank(1, [*say, word]))
        warm.end_of(0, 1)
    assert warm.out(0).read_text() == "of an earlier attempt\nto out one\nto out two\n"
    assert warm.err(0).read_text() == warm.err(1).read_text() == "to err one\nto err two\n"
    assert warm.out(1).read_text() == "to out one\nto out two\n"


def test_the_environment_of_a_program_is_what_it_was_told_byte_for_byte(warm: Warm) -> None:
    """One keeper for all examples; the program is `cat`, which changes nothing."""
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    names = text.map(lambda name: "X_" + name.replace("=", "_"))

    @settings(max_examples=25, deadline=None)
    @given(env=st.dictionaries(names, text, max_size=5))
    def holds(env: dict[str, str]) -> None:
        warm.out(0).unlink(missing_ok=True)
        warm.start(warm.rank(0, ["cat", "/proc/self/environ"], env=env))
        assert warm.end_of(0)[0]["code"] == 0
        pairs = warm.out(0).read_bytes().split(b"\0")
        found = dict(pair.split(b"=", 1) for pair in pairs if pair.startswith(b"X_"))
        assert found == {name.encode(): value.encode() for name, value in env.items()}

    holds()


def test_arguments_reach_a_program_as_they_are(warm: Warm) -> None:
    words = ["two words", "$HOME", "it's\n", "größe 🚀", "", "*"]
    warm.start(warm.rank(0, ["printf", "%s\\0", *words]))
    warm.end_of(0)
    assert warm.out(0).read_bytes() == b"".join(word.encode() + b"\0" for word in words)


def test_a_program_starts_clean_three_files_no_ignored_signal_a_group_of_its_own(warm: Warm) -> None:
    code = """
import os
print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1], os.readlink("/proc/self/fd/0"))
print(os.getpgrp() == os.getpid())
"""
    (core, *_) = sorted(os.sched_getaffinity(0))
    warm.start(
        warm.rank(0, [sys.executable, "-I", "-c", code]),
        warm.rank(1, ["grep", "-E", "SigIgn|SigBlk", "/proc/self/status"]),
        warm.rank(2, ["bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}"]),
        warm.rank(3, ["grep", "Cpus_allowed_list", "/proc/self/status"], cores=[core]),
        warm.rank(4, ["pwd"], workdir="/"),
    )
    warm.end_of(0, 1, 2, 3, 4)
    assert warm.out(0).read_text() == "[0, 1, 2] /dev/null\nTrue\n"
    assert [line.split()[1] for line in warm.out(1).read_text().splitlines()] == ["0" * 16] * 2
    assert (warm.out(2).read_text(), warm.err(2).read_text()) == (f"y\n{128 + signal.SIGPIPE}\n", "")
    assert warm.out(3).read_text().split() == ["Cpus_allowed_list:", str(core)]
    assert warm.out(4).read_text() == "/\n"


def test_a_rank_of_ours_is_a_fork_that_can_import_what_the_warm_process_has(make_warm) -> None:
    warm = make_warm(preload="colorsys").wait_for_keepers()
    warm.start(warm.rank(0, code="import os, sys; print('colorsys' in sys.modules, os.environ['A'])", env={"A": "b"}))
    warm.end_of(0)
    assert warm.out(0).read_text() == "True b\n"


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "kind", "message"),
    [
        (
            ["no-such-program-at-all"],
            *(127, "FileNotFoundError"),
            "command not found: 'no-such-program-at-all'; give its full path, or set PATH under env",
        ),
        (["/etc/passwd"], 126, "PermissionError", "cannot run '/etc/passwd': Permission denied"),
        (["/"], 126, "PermissionError", "cannot run '/': Permission denied"),
    ],
)
def test_a_program_that_cannot_be_run_is_told_as_a_shell_would(argv, code, kind, message, warm: Warm) -> None:
    warm.start(warm.rank(0, argv))
    (record,) = warm.end_of(0)
    assert (record["code"], record["signal"]) == (code, None)
    assert (record["failure"]["kind"], record["failure"]["message"]) == (kind, message)
    assert record["failure"]["peer"] is False
    assert record["ended"] == record["failure"]["time"]
    assert warm.err(0).read_text() == f"muster: {message}\n"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workdir": "/no/such/folder"}, "[Errno 2] No such file or directory: '/no/such/folder'"),
        ({"env": {"A": "nul \0"}}, "embedded null byte"),
        ({"env": {"A=B": "x"}}, "illegal environment variable name"),
        ({"cores": [100_000]}, "[Errno 22] Invalid argument"),
    ],
)
def test_a_rank_that_cannot_have_what_it_was_promised_is_refused_with_the_reason(fields, said, warm: Warm) -> None:
    warm.start(warm.rank(3, ["true"], **fields))
    (record,) = warm.end_of(3)
    assert record["code"] == 78
    assert record["failure"]["message"] == f"rank 3 cannot start: {said}"
    assert warm.err(3).read_text() == f"muster: rank 3 cannot start: {said}\n"


def test_without_a_place_for_its_output_a_rank_is_refused_too(warm: Warm) -> None:
    gone = str(warm.folder / "gone" / "0.out")
    warm.start(warm.rank(0, ["true"], out=gone))
    (record,) = warm.end_of(0)
    assert record["code"] == 78
    assert record["failure"]["message"] == f"rank 0 cannot start: [Errno 2] No such file or directory: '{gone}'"


def test_reports_are_forwarded_in_order_and_the_failed_one_comes_with_the_exit(warm: Warm) -> None:
    code = """
import os, sys
from jobs.reports import Reporter
reporter = Reporter(os.environ)
reporter.arrived()
reporter.joined()
reporter.progress(step=1, steps=2, loss=0.5, rate=3.0, unit="samples/s")
reporter.failed(RuntimeError("größe\\n lost \U0001f680"), peer=True)
sys.exit(4)
"""
    began = time.time()
    warm.start(warm.rank(2, code=code))
    reports = [warm.next("report") for _ in range(3)]
    progress = {"report": "progress", "step": 1, "steps": 2, "loss": 0.5, "rate": 3.0, "unit": "samples/s"}
    assert [each["rank"] for each in reports] == [2] * 3
    assert [each["report"] for each in reports] == [{"report": "arrived"}, {"report": "joined"}, progress]
    (record,) = warm.end_of(2)
    assert record["code"] == 4
    failure = record["failure"]
    assert (failure["kind"], failure["message"], failure["peer"]) == ("RuntimeError", "größe lost 🚀", True)
    assert began <= failure["time"] == record["ended"] <= time.time()


def test_the_time_of_a_failure_is_when_the_rank_noticed_it_not_when_it_had_ended(warm: Warm) -> None:
    code = """
import os, sys, time
from jobs.reports import Reporter
Reporter(os.environ).failed(ValueError("early"), peer=False)
print("ready")
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(4)
"""
    warm.start(warm.rank(0, code=code))
    warm.wait_for_output(0)
    let_go = time.time()
    (warm.folder / "go").touch()
    (record,) = warm.end_of(0)
    assert record["ended"] < let_go


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("this.is_no_package", "No module named 'this.is_no_package'; 'this' is not a package"),
        ("antigravity.", "Empty module name"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_to_every_agent_and_ends_the_warm_process(
    module: str, said: str, make_warm
) -> None:
    warm = make_warm(keepers=2, preload=module)
    for keeper in (0, 1):
        broken = warm.next("broken", keeper)["broken"]
        assert broken.startswith(f"{sys.executable}: ")
        assert broken.endswith("; run ./setup.sh, or name an interpreter that has it in the site file")
        assert said in broken or module == "antigravity."
        assert warm.readers[keeper].readline() == b""
    assert warm.process.wait(timeout=DEADLINE_S) == 78
