"""The agent before any rank: real processes that greet, and end when nobody holds them any more."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.boot import module_argv
from muster.launch import agent
from muster.launch.common.processes import start_ticks
from muster.launch.wire.codec import decode
from muster.launch.wire.messages import FROM_AGENT, Beat, Bye, Hello
from support.agents import LOOPBACK, port_of

pytestmark = [pytest.mark.command, pytest.mark.slow]

TEXT = st.characters(exclude_categories=["Cs"])


# The greeting ---------------------------------------------------------------------------------------------------------


def test_the_first_line_says_which_process_this_is_and_what_its_node_has(start_agent) -> None:
    started = start_agent("--node", "3", CUDA_VISIBLE_DEVICES="GPU-a,1", GLOO_SOCKET_IFNAME="eth7")
    hello = started.greeted()
    pid = started.process.pid
    assert (hello.pid, hello.pid_start) == (pid, start_ticks(pid))
    assert hello.host == socket.gethostname()
    assert hello.python == "{}.{}.{}".format(*sys.version_info[:3])
    assert set(hello.cores) == os.sched_getaffinity(0)
    assert hello.gpus == ("GPU-a", "1")
    assert hello.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert hello.environ["PATH"] == os.environ["PATH"]
    assert "NCCL_SOCKET_IFNAME" not in hello.environ


def test_it_finds_torch_without_importing_it(start_agent) -> None:
    started = start_agent("--node", "0")
    assert started.greeted().torch is True
    started.send(Beat(1.0))  # then it has imported whatever it imports before ranks
    started.receive()
    assert "libtorch" not in Path(f"/proc/{started.process.pid}/maps").read_text()


def test_over_ssh_it_tells_the_address_that_it_was_reached_by(start_agent) -> None:
    assert start_agent("--node", "0", SSH_CONNECTION="10.0.0.9 50000 10.0.0.1 22").greeted().address == "10.0.0.1"
    assert start_agent("--node", "0", SSH_CONNECTION="").greeted().address == ""


def test_in_a_task_of_slurm_it_is_the_node_that_slurm_says(start_agent, listening) -> None:
    connect = f"{LOOPBACK}:{port_of(listening)}"
    started = start_agent("--node", "slurm", "--connect", connect, SLURM_NODEID="5", SLURMD_NODENAME="n5")
    assert started.accept(listening) == 5
    assert started.greeted().slurm_name == "n5"


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


def test_its_own_words_are_the_greeting_that_the_supervisor_reads() -> None:
    """It spells the message by hand, and imports none of the code that reads it."""
    assert isinstance(decode(agent.line(agent.hello("10.0.0.1")), FROM_AGENT), Hello)


def test_a_variable_that_is_no_text_does_not_keep_it_from_greeting(start_agent) -> None:
    started = start_agent("--node", "0", PATH="/opt/\udcff:/usr/bin")  # the byte ff
    assert started.greeted().environ["PATH"] == "/opt/?:/usr/bin"


# Its end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialled", [False, True])
@pytest.mark.parametrize("polite", [False, True])
def test_it_ends_when_told_to_and_when_its_channel_does(start_agent, listening, dialled: bool, polite: bool) -> None:
    started = start_agent("--node", "0", *(["--connect", f"{LOOPBACK}:{port_of(listening)}"] if dialled else []))
    if dialled:
        started.accept(listening)
    started.greeted()
    if polite:
        started.send(Bye(7))
    else:
        started.hang_up()
    assert started.end() == (0, "")


@pytest.mark.parametrize(("polite", "code"), [(True, 7), (False, 69)])
def test_one_that_was_started_by_hand_ends_as_the_run_does(start_agent, listening, polite: bool, code: int) -> None:
    started = start_agent("--node", "0", "--connect", f"{LOOPBACK}:{port_of(listening)}", "--end-as", "run")
    started.accept(listening)
    started.greeted()
    if polite:
        started.send(Bye(7))
    else:
        started.hang_up()
    ended, said = started.end()
    assert ended == code
    first, second = said.splitlines()
    assert f"node 0 tries to reach node 0 at {LOOPBACK}:{port_of(listening)} until " in first
    assert second.endswith(": node 0 has reached node 0 and waits for the other nodes")


@pytest.mark.parametrize("reached", [False, True])
def test_ctrl_c_before_the_run_begins_ends_one_that_was_started_by_hand(start_agent, listening, reached) -> None:
    connect = f"{LOOPBACK}:{port_of(listening)}"
    started = start_agent("--node", "2", "--connect", connect, "--end-as", "run")
    if reached:
        started.accept(listening)
        started.greeted()
        started.process.send_signal(signal.SIGINT)
    else:
        with listening.accept()[0] as connection:
            connection.recv(1)  # it greets, and is not answered
            started.process.send_signal(signal.SIGINT)
            started.process.wait()
    code, said = started.end()
    assert code == 130
    assert said.splitlines()[-1] == f"muster agent on {socket.gethostname()}: stopped by Ctrl-C before the run began"


def test_a_supervisor_that_gives_no_sign_for_the_lease_is_left(start_agent, listening) -> None:
    lease_s = 1.0
    started = start_agent("--node", "4", "--connect", f"{LOOPBACK}:{port_of(listening)}", "--lease-s", str(lease_s))
    started.accept(listening)
    started.greeted()
    until = time.monotonic() + 1.5 * lease_s
    while time.monotonic() < until:  # each beat renews it
        started.send(Beat(1.5))
        assert started.receive().sent == 1.5
    assert started.end() == (0, "muster agent of node 4: the supervisor was silent for 1 s\n")


def test_time_in_which_the_agent_itself_stood_still_is_no_silence_of_the_supervisor(start_agent, listening) -> None:
    lease_s = 2.0
    started = start_agent("--node", "4", "--connect", f"{LOOPBACK}:{port_of(listening)}", "--lease-s", str(lease_s))
    started.accept(listening)
    started.greeted()
    started.send(Beat(1.0))
    started.receive()
    started.process.send_signal(signal.SIGSTOP)
    time.sleep(2 * lease_s)
    started.process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for us as if it had not been away
        started.process.wait(lease_s / 4)
    started.send(Beat(2.0))
    heartbeat = started.receive()
    assert heartbeat.sent == 2.0
    assert heartbeat.late_s > lease_s


def test_ctrl_c_and_a_closing_terminal_are_the_supervisors_to_answer(start_agent) -> None:
    started = start_agent("--node", "0")
    started.greeted()
    started.send(Beat(1.0))
    started.receive()
    for number in (signal.SIGINT, signal.SIGHUP):
        started.process.send_signal(number)
    started.send(Beat(2.0))
    assert started.receive().sent == 2.0


def test_one_whose_supervisor_went_before_its_first_word_ends_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = [*module_argv(sys.executable, "muster.launch.agent"), "--node", "0"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.PIPE, timeout=30)
    os.close(writing)
    assert (done.returncode, done.stderr) == (69, b"")
