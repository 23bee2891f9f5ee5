"""One agent started once more, over every transport: the new one is heard, and nothing more of the lost one."""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.basics.handshake import node_key
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.site import SshSettings
from muster.launch.common.processes import start_ticks
from muster.launch.transports.base import Transport
from muster.launch.transports.dialled import Dialled, Starter
from muster.launch.transports.local import Local
from muster.launch.transports.pdsh import pdsh_transport
from muster.launch.transports.srun import srun_transport
from muster.launch.transports.ssh import Ssh
from muster.launch.transports.submitit import Submitit
from muster.launch.wire.keys import KEY
from muster.launch.wire.messages import Bye
from support.agents import Gate

pytestmark = pytest.mark.command

DEADLINE_S = 30.0
AGENT = shlex.join(module_argv(sys.executable, "muster.launch.agent"))


async def lose_and_restart(transport: Transport, slot: int, nodes: int = 2) -> None:
    """Start, kill the agent of one node, start it again: of that node nothing more is told. Then let all of them go."""
    gate = Gate()
    await transport.start(gate)
    met = {}
    for _ in range(nodes):
        channel, hello = await gate.hello()
        met[channel.node] = (channel, hello)
    channel, hello = met[slot]
    os.kill(hello.pid, signal.SIGKILL)
    while start_ticks(hello.pid) is not None:
        await asyncio.sleep(0.02)
    channel.close()
    await transport.restart(slot, gate)
    met[slot] = await gate.hello()
    assert (met[slot][0].node, met[slot][1].pid != hello.pid) == (slot, True)
    assert [node for node, _ in gate.failures].count(slot) <= 1  # its own end, seen before it was started again
    for channel, _ in met.values():
        await channel.send(Bye(0))
    await transport.close([])
    # They end by themselves; of a pdsh that may wait for a lost node nobody waits for long.
    while any(start_ticks(hello.pid) is not None for _, hello in met.values()):
        await asyncio.sleep(0.02)
    for channel, _ in met.values():
        channel.close()


async def test_local_starts_a_pretend_nodes_agent_again() -> None:
    await lose_and_restart(Local(2, python=sys.executable), 1)


def played_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an ssh and a pdsh first on PATH that run their command here."""
    (folder / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    (folder / "pdsh").write_text(
        '#!/bin/sh\nwhile [ "$1" != -w ]; do shift; done\nn=0\n'
        'for host in $(echo "$2" | tr , " "); do sh -c "$(echo "$3" | sed "s/%n/$n/; s/%%/%/g")" & n=$((n+1)); done\n'
        "wait\n"
    )
    for name in ("ssh", "pdsh"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


HOSTS = [Host("n0", "127.0.0.1", None, Login("n0")), Host("n1", "127.0.0.1", None, Login("n1"))]


async def test_ssh_starts_it_by_a_new_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played_ssh(tmp_path, monkeypatch)
    made = Ssh(HOSTS, HostSet(tuple(HOSTS), ""), SshSettings(), python=sys.executable, code=None, fanout=1)
    await lose_and_restart(made, 1)


async def test_pdsh_starts_it_by_a_pdsh_of_its_own_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_ssh(tmp_path, monkeypatch)
    made = pdsh_transport(
        HOSTS,
        HostSet(tuple(HOSTS), ""),
        SshSettings(),
        run=RunDir(tmp_path),
        python=sys.executable,
        code=None,
        fanout=0,
    )
    assert made.starter is not None
    argv = made.starter.argv("1.2.3.4:5", 1)
    assert argv[:5] == ["pdsh", "-R", "ssh", "-w", "n1"]
    assert argv[-1].endswith("--node 1")
    await lose_and_restart(made, 1)


async def test_an_ssh_that_waits_for_a_host_in_vain_is_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = Ssh(HOSTS[:1], HostSet(tuple(HOSTS[:1]), ""), SshSettings(), python=sys.executable, code=None, fanout=1)
    gate = Gate()
    await made.start(gate)
    before = made._started._entries[0].child
    await made.restart(0, gate)
    assert before.ended.done()
    assert gate.failures == []
    await made.close([0])


# Whose word counts --------------------------------------------------------------------------------------------------


def told(name: str, code: int, errors: Sequence[str]) -> MusterError:
    return UnreachableError(f"{name or 'all'} {code}")


async def test_what_the_first_program_says_late_of_a_restarted_node_does_not_count(tmp_path: Path) -> None:
    """pdsh tells of a dead node's ssh when that times out: the node may have a new agent by then."""
    late = f"mkfifo {tmp_path}/go; read word <{tmp_path}/go; echo 'pc1: ssh exited with exit code 255' >&2; exit 1"
    one = f'exec {AGENT} --node 0 --connect "$1" --secret-file {tmp_path}/token'
    starter = Starter(
        argv=lambda connect, slot: ["sh", "-c", late if slot is None else one, "sh", connect],
        names={"pc1": 0, "pc2": 1},
        explain=told,
    )
    transport = Dialled("pdsh", 2, run=RunDir(tmp_path), starter=starter, towards="127.0.0.1")
    gate = Gate()
    await transport.start(gate)
    await transport.restart(0, gate)
    channel, _ = await gate.hello()
    assert channel.node == 0
    (tmp_path / "go").write_text("word\n")
    assert await gate.until_failed(1) == [(1, "pc2 1")]
    await channel.send(Bye(0))
    await transport.close([1])
    channel.close()


# By hand, Slurm, submitit -------------------------------------------------------------------------------------------


async def test_by_hand_somebody_is_asked_to_paste_the_line_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [*module_argv(sys.executable, "muster.launch.agent"), "--node", "0"]
    transport = Dialled(
        "hand", 2, run=RunDir(tmp_path), starter=None, listen="127.0.0.1", secret="printed", own_agent=own
    )

    async def paste() -> asyncio.subprocess.Process:
        connect = f"127.0.0.1:{transport._listener.port}"
        line = [*module_argv(sys.executable, "muster.launch.agent"), "--node", "1", "--connect", connect]
        return await asyncio.create_subprocess_exec(*line, env={**os.environ, KEY: node_key("printed", 1)})

    gate = Gate()
    await transport.start(gate)
    first, _ = await gate.hello()
    before = await paste()
    second, _ = await gate.hello()
    before.kill()
    await before.wait()
    second.close()
    await transport.restart(1, gate)
    assert "node 1 is lost; paste the same line there again" in capsys.readouterr().err
    again = await paste()
    third, _ = await gate.hello()
    assert third.node == 1
    await transport.restart(0, gate)  # node 0's is ours
    fourth, _ = await gate.hello()
    assert fourth.node == 0
    for channel in (third, fourth):
        await channel.send(Bye(0))
    assert await again.wait() == 0
    await transport.close([])
    for channel in (first, third, fourth):
        channel.close()


def test_slurm_starts_it_by_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in {"ID": "7", "NODELIST": "n[1-3]", "NUM_NODES": "3", "CPUS_PER_NODE": "4(x3)"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    made = srun_transport(["n1", "n2", "n3"], run=RunDir(tmp_path), python="/py", code=None, alone="requeue")
    assert made.starter is not None
    every, one = (made.starter.argv("1.2.3.4:5", slot) for slot in (None, 2))
    assert every[1:3] == ["--nodes=3", "--ntasks=3"]
    assert every[-2:] == ["--node", "slurm"]
    assert one[1:3] == ["--nodes=1", "--ntasks=1"]
    assert "--nodelist=n3" in one
    assert one[-2:] == ["--node", "2"]
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(every) & set(one)


async def test_submitit_starts_each_agent_only_once(tmp_path: Path) -> None:
    transport = Submitit(["n1", "n2"], run=RunDir(tmp_path), python="/py", code=None)
    with pytest.raises(RefusedError, match=r"node 1: submitit starts a node's agent only once; continue on fewer"):
        await transport.restart(1, Gate())
