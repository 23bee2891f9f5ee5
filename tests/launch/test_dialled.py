"""Transports whose agents dial back, with a shell in the place of pdsh: who is let in, and whose failure is told."""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.site import SshSettings
from muster.launch.common.processes import start_ticks
from muster.launch.transports.dialled import Dialled, Starter
from muster.launch.transports.pdsh import pdsh_transport
from muster.launch.wire.keys import KEY, SECRET
from muster.launch.wire.messages import Bye
from support.agents import Gate

pytestmark = [pytest.mark.command, pytest.mark.slow]

DEADLINE_S = 30.0
AGENT = shlex.join(module_argv(sys.executable, "muster.launch.agent"))


def told(name: str, code: int, errors: Sequence[str]) -> MusterError:
    return UnreachableError(f"{name or 'all'} {code} {'|'.join(errors)}")


def shell(script: str) -> Callable[[str, int | None], list[str]]:
    """A starter's argv: a script that finds where agents are to dial in $1."""
    return lambda connect, _: ["sh", "-c", script, "sh", connect]


def dialled(folder: Path, nodes: int, script: str, **fields: Any) -> Dialled:
    starter = Starter(argv=shell(script), explain=told, **fields)
    return Dialled("test", nodes, run=RunDir(folder), starter=starter, towards="127.0.0.1")


def by_hand(folder: Path) -> Dialled:
    """Two nodes whose lines were printed; node 0's agent is started here."""
    own = [*module_argv(sys.executable, "muster.launch.agent"), "--node", "0"]
    return Dialled("hand", 2, run=RunDir(folder), starter=None, listen="127.0.0.1", secret="printed", own_agent=own)


async def pasted(transport: Dialled, node: int, **variables: str) -> asyncio.subprocess.Process:
    """Start an agent as a pasted line does."""
    connect = ",".join(transport._listener.addresses)
    line = [
        *module_argv(sys.executable, "muster.launch.agent"),
        "--node",
        str(node),
        "--connect",
        connect,
        "--end-as",
        "run",
    ]
    without = {name: value for name, value in os.environ.items() if name not in (KEY, SECRET)}
    return await asyncio.create_subprocess_exec(*line, env={**without, **variables}, stderr=asyncio.subprocess.PIPE)


# Who is let in --------------------------------------------------------------------------------------------------------

BOTH = f'for node in 0 1; do {AGENT} --node $node --connect "$1" --secret-file token & done; wait'


async def test_the_agents_that_a_program_starts_dial_back_and_end_when_they_are_let_go(tmp_path: Path) -> None:
    gate, run_dir = Gate(), RunDir(tmp_path)
    transport = dialled(tmp_path, 2, f"cd {shlex.quote(str(tmp_path))}; {BOTH}")
    await transport.start(gate)
    assert run_dir.token.stat().st_mode & 0o777 == 0o600
    met = [await gate.hello() for _ in range(2)]
    assert sorted(channel.node for channel, _ in met) == [0, 1]
    for channel, _ in met:
        await channel.send(Bye(0))
    await transport.close([])
    assert not run_dir.token.exists()
    assert [start_ticks(hello.pid) for _, hello in met] == [None, None]
    for channel, _ in met:
        channel.close()


async def test_the_secret_stands_in_the_programs_environment_too_and_nowhere_else_of_it(tmp_path: Path) -> None:
    gate = Gate()
    transport = dialled(tmp_path, 1, f'{AGENT} --node 0 --connect "$1"', replaces={"PATH": os.environ["PATH"]})
    await transport.start(gate)
    channel, hello = await gate.hello()
    environ = Path(f"/proc/{hello.pid}/environ").read_bytes()
    assert sorted(each.partition(b"=")[0].decode() for each in environ.split(b"\0") if each) in (
        sorted(["PATH", SECRET, "PWD"]),
        sorted(["PATH", SECRET, "PWD", "OLDPWD"]),
        sorted(["PATH", SECRET, "PWD", "SHLVL", "_"]),  # where sh is bash
    )
    await channel.send(Bye(0))
    await transport.close([])
    channel.close()


async def test_by_hand_nobody_can_be_node_0_over_the_port(tmp_path: Path) -> None:
    """Its agent is ours, over pipes: a line of another node must not take its place, nor one with the secret."""
    transport, gate = by_hand(tmp_path), Gate()
    await transport.start(gate)
    channel, _ = await gate.hello()
    other = await pasted(transport, 0, **{SECRET: "printed"})
    await other.communicate()
    assert other.returncode == 78
    assert gate.channels.empty()
    await channel.send(Bye(0))
    await transport.close([1])
    channel.close()


# Whose failure is told ------------------------------------------------------------------------------------------------

# Recorded from pdsh 2.34 with hosts pc1 and pc2; the words of ssh stand before those on its end.
RECORDED = """\
pc2: ssh: connect to host pc2 port 22: Connection refused
unrelated chatter
pdsh@login: pc2: ssh exited with exit code 255
pc1: bash: line 1: /no/python: No such file or directory
pdsh@login: pc1: ssh exited with exit code 127
"""


def says(text: str) -> str:
    return f"printf %s {shlex.quote(text)} >&2; "


async def test_a_nodes_failure_is_told_when_the_program_tells_it_and_not_at_its_end(tmp_path: Path) -> None:
    gate = Gate()
    transport = dialled(tmp_path, 3, says(RECORDED) + "sleep 1000", names={"pc1": 0, "pc2": 1, "pc3": 2})
    await transport.start(gate)
    assert await gate.until_failed(2) == [
        (1, "pc2 255 ssh: connect to host pc2 port 22: Connection refused"),
        (0, "pc1 127 bash: line 1: /no/python: No such file or directory"),
    ]
    await transport.close([0, 1])


async def test_at_its_end_every_node_is_told_of(tmp_path: Path) -> None:
    """The gate keeps the first word on a node; what was said of it alone comes before what was said at all."""
    gate = Gate()
    transport = dialled(tmp_path, 2, says("pc1: half a word\nno host at all\n") + "exit 3", names={"pc1": 0, "pc2": 1})
    await transport.start(gate)
    assert await gate.until_failed(2) == [
        (0, "pc1 3 half a word"),
        (1, "pc2 3 pc1: half a word|no host at all"),
    ]
    await transport.close([])


async def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    starter = Starter(argv=lambda connect, _: ["/no/such/pdsh"], explain=told)
    transport = Dialled("pdsh", 1, run=RunDir(tmp_path), starter=starter, towards="127.0.0.1")
    with pytest.raises(RefusedError, match="/no/such/pdsh: cannot be run here: No such file or directory"):
        await transport.start(Gate())
    await transport.close([0])


async def test_one_that_would_wait_for_a_lost_node_is_ended(tmp_path: Path) -> None:
    gate = Gate()
    transport = dialled(tmp_path, 1, "echo ready; exec sleep 1000", names={"pc1": 0})
    await transport.start(gate)
    await transport.close([0])
    with pytest.raises(asyncio.QueueEmpty):
        gate.channels.get_nowait()
    assert transport._started._entries[0].child.ended.done()


# What pdsh calls its hosts --------------------------------------------------------------------------------------------


def hosts(*targets: str) -> list[Host]:
    return [Host(f"n{number}", "", None, Login(target)) for number, target in enumerate(targets)]


@pytest.mark.parametrize(
    ("targets", "labels"),
    [
        (["pc1", "pc2"], ["pc1", "pc2"]),
        (["pc1.example.org", "pc2.example.org"], ["pc1", "pc2"]),  # it leaves out what all share
        (["pc1.example.org", "pc1.example.net"], ["pc1.example.org", "pc1.example.net"]),
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
    ],
)
async def test_what_pdsh_says_of_a_host_is_taken_for_that_host(
    tmp_path: Path, targets: list[str], labels: list[str]
) -> None:
    """`labels` were seen in its output."""
    nodes = hosts(*targets)
    run_dir = RunDir(tmp_path)
    hosts_ = HostSet(tuple(nodes), "")
    made = pdsh_transport(nodes, hosts_, SshSettings(), run=run_dir, python="/opt/py", code=None, fanout=0)
    assert made.starter is not None
    lines = [
        f"{each}: word {number}\npdsh@login: {each}: ssh exited with exit code 3\n"
        for number, each in enumerate(labels)
    ]
    said = "".join(lines)
    starter = Starter(argv=shell(says(said) + "sleep 1000"), names=made.starter.names, explain=made.starter.explain)
    gate = Gate()
    transport = Dialled("pdsh", len(nodes), run=RunDir(tmp_path), starter=starter, towards="127.0.0.1")
    await transport.start(gate)
    assert await gate.until_failed(len(nodes)) == [
        (number, f"n{number}: the agent ended with code 3: word {number}") for number in range(len(nodes))
    ]
    await transport.close([0])


@pytest.mark.cluster
def test_real_pdsh_labels_hosts_as_was_recorded() -> None:
    for targets, labels in (
        ("pc1.example.org,pc2.example.org", {"pc1", "pc2"}),
        ("pc1.example.org,pc1.example.net", {"pc1.example.org", "pc1.example.net"}),
        ("alice@10.0.0.1,10.0.0.2", {"10.0.0.1", "10.0.0.2"}),
    ):
        argv = ["pdsh", "-R", "exec", "-w", targets, "sh", "-c", "echo word"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20)
        assert {line.partition(": ")[0] for line in done.stdout.splitlines()} == labels
