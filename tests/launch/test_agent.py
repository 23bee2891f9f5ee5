"""The agent before any rank: real processes that greet, dial, answer, and end when nobody holds them any more."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import network
from jobs.boot import module_argv
from jobs.files import write_text
from jobs.rundir import RunDir
from launch import agent
from launch.fingerprint import fingerprint
from launch.processes import start_ticks

LOOPBACK = "127.0.0.1"
TEXT = st.characters(exclude_categories=["Cs"])
DEADLINE_S = 20.0


class Started:
    """An agent that this test has started, and the two streams of its channel."""

    def __init__(self, *options: str, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("SSH_CONNECTION", agent.TOKEN)}
        argv = [*module_argv(sys.executable, "launch.agent"), *options]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, **variables},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.writer: IO[bytes] = self.process.stdin
        self.reader: IO[bytes] = self.process.stdout
        self.connection: socket.socket | None = None

    def accept(self, server: socket.socket) -> dict[str, Any]:
        """Take the connection that it dials; return the first message, which shows the token."""
        server.settimeout(DEADLINE_S)
        self.connection, _ = server.accept()
        self.connection.settimeout(DEADLINE_S)
        stream = self.connection.makefile("rwb", buffering=0)
        self.reader = self.writer = stream  # type: ignore[assignment]
        return self.receive()

    def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        self.writer.flush()

    def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.reader.readline())
        return message

    def hang_up(self) -> None:
        """End the channel from this side."""
        self.writer.close()
        if self.connection is not None:
            self.connection.close()

    def end(self) -> tuple[int, str]:
        """Wait for its end; return the code and what it said on standard error."""
        assert self.process.stderr is not None
        code = self.process.wait(DEADLINE_S)
        return code, self.process.stderr.read().decode()

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr, self.writer, self.connection):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """Return a function that starts an agent: its options, and variables of its environment."""
    made: list[Started] = []

    def begin(*options: str, **variables: str) -> Started:
        made.append(Started(*options, **variables))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A port that listens; the supervisor's."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        yield listening


def port_of(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


def closed_port() -> int:
    """A port where nothing listens."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        return port_of(listening)


# The greeting ---------------------------------------------------------------------------------------------------------


def test_the_first_line_says_which_node_this_is_and_what_it_has(start) -> None:
    started = start("--node", "3", CUDA_VISIBLE_DEVICES="GPU-a,1", GLOO_SOCKET_IFNAME="eth7")
    hello = started.receive()
    pid = started.process.pid
    assert (hello["did"], hello["node"], hello["pid"], hello["pid_start"]) == ("hello", 3, pid, start_ticks(pid))
    assert hello["host"] == socket.gethostname()
    assert hello["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert set(hello["cores"]) == os.sched_getaffinity(0)
    assert hello["gpus"] == ["GPU-a", "1"]
    assert hello["environ"]["GLOO_SOCKET_IFNAME"] == "eth7"
    assert hello["environ"]["PATH"] == os.environ["PATH"]
    assert "NCCL_SOCKET_IFNAME" not in hello["environ"]


def test_it_finds_torch_without_importing_it(start) -> None:
    started = start("--node", "0")
    assert started.receive()["torch"] is True
    started.send(do="beat", sent=1.0)  # then it has imported whatever it imports before ranks
    started.receive()
    assert "libtorch" not in Path(f"/proc/{started.process.pid}/maps").read_text()


def test_over_ssh_it_tells_the_address_that_it_was_reached_by(start) -> None:
    assert start("--node", "0", SSH_CONNECTION="10.0.0.9 50000 10.0.0.1 22").receive()["address"] == "10.0.0.1"
    assert start("--node", "0", SSH_CONNECTION="").receive()["address"] == ""


def test_in_a_task_of_slurm_it_is_the_node_that_slurm_says(start) -> None:
    assert start("--node", "slurm", SLURM_NODEID="5", SLURMD_NODENAME="n5").receive()["node"] == 5


def test_without_a_choice_of_gpus_it_counts_the_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ["null", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"]
    monkeypatch.setattr("os.listdir", lambda path: names)
    assert agent.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert agent.visible_gpus() == []


PLAIN = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(TEXT),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(TEXT), inner, max_size=4),
    max_leaves=8,
)


@given(message=st.dictionaries(st.text(TEXT), PLAIN, max_size=4))
def test_its_own_json_is_json(message: dict[str, Any]) -> None:
    """It writes the greeting itself, for the standard library's json takes as long to import as all else."""
    spelt = agent.line(message)
    assert spelt.endswith(b"\n")
    assert spelt.count(b"\n") == 1
    assert json.loads(spelt) == message


def test_a_variable_that_is_no_text_does_not_keep_it_from_greeting(start) -> None:
    started = start("--node", "0", PATH="/opt/\udcff:/usr/bin")  # the byte ff
    assert started.receive()["environ"]["PATH"] == "/opt/?:/usr/bin"


# Dialling -------------------------------------------------------------------------------------------------------------


def test_it_dials_and_shows_the_token_that_only_its_environment_holds(start, server) -> None:
    started = start("--node", "1", "--connect", f"{LOOPBACK}:{port_of(server)}", MUSTER_TOKEN="secret")
    assert started.accept(server) == {"token": "secret"}
    hello = started.receive()
    assert (hello["node"], hello["address"]) == (1, LOOPBACK)
    assert b"secret" not in Path(f"/proc/{started.process.pid}/cmdline").read_bytes()


def test_the_token_may_stand_in_a_file(start, server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    connect = ("--connect", f"{LOOPBACK}:{port_of(server)}", "--token-file", str(tmp_path / "token"))
    assert start("--node", "0", *connect).accept(server) == {"token": "from-a-file"}


def test_a_token_file_that_this_node_cannot_see_is_said_with_what_to_do(start, server, tmp_path: Path) -> None:
    missing = tmp_path / "elsewhere" / "token"
    connect = f"{LOOPBACK}:{port_of(server)}"
    code, said = start("--node", "0", "--connect", connect, "--token-file", str(missing)).end()
    assert code == 78
    assert said == (
        f"muster agent on {socket.gethostname()}: cannot read {missing}: No such file or directory; over this "
        "transport the run folder must be on storage that every node sees: choose one with --runs DIR, or use "
        "--on ssh\n"
    )


def test_of_several_addresses_it_takes_the_one_that_answers(start, server) -> None:
    connect = f"{LOOPBACK}:{closed_port()},{LOOPBACK}:{port_of(server)}"
    assert start("--node", "0", "--connect", connect).accept(server) == {"token": ""}


def test_it_goes_on_dialling_until_somebody_listens(start) -> None:
    port = closed_port()
    started = start("--node", "0", "--connect", f"{LOOPBACK}:{port}", "--dial-timeout-s", "50")
    started.process.poll()
    with socket.create_server((LOOPBACK, port)) as listening:
        assert started.accept(listening) == {"token": ""}


def test_a_refused_dial_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    servers: list[socket.socket] = []
    monkeypatch.setattr("time.sleep", lambda _: servers.append(socket.create_server((LOOPBACK, port))))
    with agent.dial([f"{LOOPBACK}:{port}"], DEADLINE_S) as connection, servers[0]:
        assert len(servers) == 1
        assert connection.getpeername() == (LOOPBACK, port)


def test_a_connection_to_itself_is_no_answer(monkeypatch: pytest.MonkeyPatch, server) -> None:
    """Of a port in the ephemeral range a dialler may get the very number that it dials: TCP's simultaneous open."""
    itself = socket.socket()
    itself.bind((LOOPBACK, 0))
    itself.connect(itself.getsockname())
    real = socket.create_connection
    answers = iter([lambda *_, **__: itself, real])
    monkeypatch.setattr("socket.create_connection", lambda *args, **keys: next(answers)(*args, **keys))
    with agent.dial([f"{LOOPBACK}:{port_of(server)}"], DEADLINE_S) as connection:
        assert connection is not itself
        assert connection.getpeername() == server.getsockname()
    itself.close()


def test_it_gives_up_at_its_deadline_and_says_whom_it_called(start) -> None:
    first, second = closed_port(), closed_port()
    connect = f"{LOOPBACK}:{first},{LOOPBACK}:{second}"
    code, said = start("--node", "0", "--connect", connect, "--dial-timeout-s", "0.3").end()
    assert code == 69
    assert said == (
        f"muster agent on {socket.gethostname()}: no supervisor at {LOOPBACK}:{first} or {LOOPBACK}:{second} within "
        "0.3 s: Connection refused\n"
    )


def test_one_that_nobody_listens_to_any_more_stops_dialling(start) -> None:
    """Its pdsh was ended by Ctrl-C, and with it the ssh that held its standard error."""
    started = start("--node", "0", "--connect", f"{LOOPBACK}:{closed_port()}", "--dial-timeout-s", "1000")
    started.process.stderr.close()
    assert started.process.wait(DEADLINE_S) == 69


# Its end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialled", [False, True])
@pytest.mark.parametrize("polite", [False, True])
def test_it_ends_when_told_to_and_when_its_channel_does(start, server, dialled: bool, polite: bool) -> None:
    started = start("--node", "0", *(["--connect", f"{LOOPBACK}:{port_of(server)}"] if dialled else []))
    if dialled:
        started.accept(server)
    started.receive()
    if polite:
        started.send(do="bye", code=7)
    else:
        started.hang_up()
    assert started.end() == (0, "")


@pytest.mark.parametrize(("polite", "code"), [(True, 7), (False, 69)])
def test_one_that_was_started_by_hand_ends_as_the_run_does(start, server, polite: bool, code: int) -> None:
    started = start("--node", "0", "--connect", f"{LOOPBACK}:{port_of(server)}", "--token", "t", "--end-as", "run")
    assert started.accept(server) == {"token": "t"}
    started.receive()
    if polite:
        started.send(do="bye", code=7)
    else:
        started.hang_up()  # so does one that is refused for its token
    assert started.end() == (code, "")


def test_a_supervisor_that_gives_no_sign_for_the_lease_is_left(start, server) -> None:
    lease_s = 1.0
    started = start("--node", "4", "--connect", f"{LOOPBACK}:{port_of(server)}", "--lease-s", str(lease_s))
    started.accept(server)
    started.receive()
    until = time.monotonic() + 1.5 * lease_s
    while time.monotonic() < until:  # each beat renews it
        started.send(do="beat", sent=1.5)
        assert started.receive()["sent"] == 1.5
    assert started.end() == (0, "muster agent of node 4: the supervisor was silent for 1 s\n")


def test_ctrl_c_and_a_closing_terminal_are_the_supervisors_to_answer(start) -> None:
    import signal

    started = start("--node", "0")
    started.receive()
    started.send(do="beat", sent=1.0)
    started.receive()
    for number in (signal.SIGINT, signal.SIGHUP):
        started.process.send_signal(number)
    started.send(do="beat", sent=2.0)
    assert started.receive()["sent"] == 2.0


def test_one_whose_supervisor_went_before_its_first_word_ends_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = [*module_argv(sys.executable, "launch.agent"), "--node", "0"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.PIPE, timeout=30)
    os.close(writing)
    assert (done.returncode, done.stderr) == (69, b"")


# Before the start -----------------------------------------------------------------------------------------------------


def test_a_beat_is_answered_with_both_times_of_this_clock(start) -> None:
    started = start("--node", "0")
    started.receive()
    began = time.time()
    started.send(do="beat", sent=7.25)
    answer = started.receive()
    assert (answer["did"], answer["sent"]) == ("heartbeat", 7.25)
    assert began <= answer["heard"] <= answer["time"] <= time.time()


def test_the_port_that_it_prepares_is_bound_before_it_is_told(start) -> None:
    started = start("--node", "0")
    started.receive()
    started.send(do="prepare", bind=LOOPBACK)
    prepared = started.receive()
    with socket.create_connection((LOOPBACK, prepared["port"]), timeout=DEADLINE_S):
        pass  # it waits in the backlog
    assert prepared == {
        "did": "prepared",
        "port": prepared["port"],
        "addresses": [list(route) for route in network.own_addresses()],
    }


def reach(started: Started, run: RunDir, *, port: int, iface: str | None = None) -> dict[str, Any]:
    started.receive()
    started.send(do="reach", address=LOOPBACK, port=port, iface=iface, run=str(run.path), nonce="the nonce")
    return started.receive()


def test_it_tries_the_way_to_the_master_and_the_run_folder(start, server, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_text(run.nonce("supervisor"), "the nonce")
    assert reach(start("--node", "0"), run, port=port_of(server)) == {
        "did": "reached",
        "interface": "lo",
        "address": LOOPBACK,
        "why": "",
        "code": fingerprint(),
        "storage": "shared",
        "run": str(tmp_path),
        "storage_why": "",
    }


def test_a_master_that_cannot_be_reached_is_said_with_the_kernels_reason(start, tmp_path: Path) -> None:
    said = reach(start("--node", "0"), RunDir(tmp_path), port=closed_port())
    assert (said["why"], said["storage"]) == ("Connection refused", "apart")


def test_a_network_of_the_users_choice_comes_before_the_route(start, server, tmp_path: Path) -> None:
    name, address = network.own_addresses()[0]
    said = reach(start("--node", "0"), RunDir(tmp_path), port=port_of(server), iface=name)
    assert (said["interface"], said["address"]) == (name, address)


# Goes wrong -----------------------------------------------------------------------------------------------------------


def test_what_goes_wrong_in_an_order_is_told_and_does_not_end_the_agent(start, tmp_path: Path) -> None:
    started = start("--node", "0")
    started.receive()
    started.send(do="prepare", bind="203.0.113.1")  # an address of nobody (RFC 5737)
    broken = started.receive()
    assert broken["did"] == "broken"
    assert "Cannot assign requested address" in broken["broken"]
    started.send(do="beat", sent=1.0)
    assert started.receive()["did"] == "heartbeat"
