"""A real box: what a node is, how it is reached, and what it shares."""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.cloudlab.box.control import Box, box_up
from muster.cloudlab.box.hosts import box_hosts
from muster.cloudlab.box.make import make
from muster.cloudlab.box.spec import BoxSpec
from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.hosts.placement import Host, Login
from support.boxes import leftovers, ssh

pytestmark = [pytest.mark.command, pytest.mark.cluster]


def test_every_node_has_its_own_name_address_home_links_and_processes(box: Box) -> None:
    seen = {}
    line = "hostname; echo $HOME; ls /sys/class/net; ip -4 -o addr show eth1 | awk '{print $4}'; ls -d /proc/[0-9]*"
    for node in box.state.spec.members:
        name, home, *rest = ssh(box, node, line).stdout.split()
        assert name == node
        assert Path(home) == box.paths.node(node).home
        assert rest[:3] == ["eth1", "lo", f"{box.state.spec.address(node)}/24"]
        seen[node] = rest[3:]
        assert "/proc/1" in rest
        assert len(rest) < 15  # the host has many more
    assert len(seen) == 5


def test_nodes_reach_each_other_by_name_and_by_ssh_and_themselves_by_loopback(box: Box) -> None:
    assert ssh(box, "node0", "ssh node3 'ssh node1 hostname'").stdout == "node1\n"
    assert ssh(box, "node2", "getent hosts node1").stdout.split() == [box.state.spec.address("node1"), "node1"]
    listening = box.exec("node2", ["python3", "-c", "import socket; socket.create_server(('127.0.0.1', 0)).close()"])
    assert (listening.returncode, listening.stderr) == (0, "")


def test_the_client_configuration_reaches_names_and_addresses_and_notices_a_wrong_host_key(
    box: Box, tmp_path: Path
) -> None:
    config, address = box.paths.ssh_config, box.state.spec.address("node1")
    for target in ("node1", address):
        out = subprocess.run(["ssh", "-F", config, target, "hostname"], capture_output=True, text=True, check=False)
        assert (out.returncode, out.stdout, out.stderr) == (0, "node1\n", "")
    other = box.paths.known_hosts.read_text().splitlines()
    known = tmp_path / "known_hosts"
    key = next(line.split()[1:] for line in other if line.startswith("node2,"))
    known.write_text(f"node1,{address} {' '.join(key)}\n")
    wrong = ["ssh", "-F", str(config), "-o", f"UserKnownHostsFile={known}", "node1", "true"]
    out = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert out.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in out.stderr


def test_pdsh_reaches_all_nodes(box: Box) -> None:
    environment = {**os.environ, "PDSH_SSH_ARGS_APPEND": f"-F {box.paths.ssh_config}"}
    argv = ["pdsh", "-R", "ssh", "-w", "node[0-3]", "hostname"]
    out = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False, timeout=20)
    assert sorted(out.stdout.splitlines()) == [f"node{k}: node{k}" for k in range(4)]


def test_exec_runs_in_the_current_folder_with_the_nodes_home_and_gives_the_code(box: Box, tmp_path: Path) -> None:
    out = box.exec("node1", ["sh", "-c", "hostname; pwd; echo $HOME; exit 7"], folder=str(tmp_path))
    assert out.returncode == 7
    assert out.stdout.splitlines() == ["node1", str(tmp_path), str(box.paths.node("node1").home)]
    assert box.exec("node1", ["sh", "-c", "kill -9 $$"]).returncode == -9
    words = ["a b", "c'd", '"', "$HOME", "%h", "ü\n", ""]
    out = box.exec("node2", ["python3", "-c", "import sys; print(sys.argv[1:])", *words])
    assert out.stdout == f"{words}\n"


def test_all_nodes_see_the_same_files_but_not_the_same_shared_memory(box: Box, tmp_path: Path) -> None:
    box.exec("node0", ["sh", "-c", f"echo hello > {tmp_path}/file; echo hello > /dev/shm/file"])
    assert box.exec("node3", ["cat", f"{tmp_path}/file"]).stdout == "hello\n"
    assert box.exec("node3", ["ls", "/dev/shm"]).stdout == ""
    assert not Path("/dev/shm/file").exists()


def test_private_storage_gives_each_node_its_own_run_root(new_name: Callable[[], str], tmp_path: Path) -> None:
    name, runs = new_name(), tmp_path / "deep" / "runs"
    with box_up(BoxSpec(name=name, nodes=2, private_runs=str(runs))) as box:
        for node in ("node0", "node1"):
            box.exec(node, ["sh", "-c", f"hostname > {runs}/who"])
        assert [box.exec(node, ["cat", f"{runs}/who"]).stdout for node in ("node0", "node1")] == ["node0\n", "node1\n"]
        assert list(runs.iterdir()) == []
        box.exec("node0", ["touch", f"{tmp_path}/shared"])
    assert (tmp_path / "shared").exists()
    assert not (tmp_path / "deep").exists()  # made for the box, and empty


def test_boxes_stand_beside_each_other(box: Box, new_name: Callable[[], str]) -> None:
    name = new_name()
    with box_up(BoxSpec(name=name, nodes=2)) as other:
        assert other.state.spec.network != box.state.spec.network
        assert ssh(other, "node1", "hostname").stdout == "node1\n"
        assert ssh(box, "node1", "hostname").stdout == "node1\n"
        with pytest.raises(RefusedError, match=f"box {name} exists already.*muster box down --name {name}"):
            make(BoxSpec(name=name))
        number = other.state.spec.number
    assert leftovers(name, number) == []
    assert ssh(box, "node1", "hostname").stdout == "node1\n"


def test_a_box_is_a_set_of_hosts(box: Box) -> None:
    found, spec = box_hosts(box.name), box.state.spec
    assert found.hosts[1] == Host("node1", spec.address("node1"), login=Login("node1"))
    assert [host.name for host in found.hosts] == ["node0", "node1", "node2", "node3"]
    assert found.origin == f"box {box.name}"
    assert found.ssh_options == ("-F", str(box.paths.ssh_config))
    assert found.environment == {"SLURM_CONF": str(box.paths.slurm_conf)}
    with pytest.raises(UsageError, match="there is no box nowhere "):
        box_hosts("nowhere")


def test_a_node_without_slurm_and_one_that_is_not_there(box: Box) -> None:
    with pytest.raises(UsageError, match=f"box {box.name} has no 'node9'; it has node0 to node3 and head"):
        box.exec("node9", ["true"])


def test_a_skewed_clock_is_what_logins_see(new_name: Callable[[], str]) -> None:
    with box_up(BoxSpec(name=new_name(), nodes=2, clocks={"node1": "+180s"})) as box:
        offsets = {}
        for node in ("node0", "node1"):
            before = time.time()
            there = float(ssh(box, node, "python3 -c 'import time; print(time.time())'").stdout)
            offsets[node] = (there - before, there - time.time())
        assert offsets["node0"][0] >= 0 >= offsets["node0"][1]
        assert offsets["node1"][0] >= 180 >= offsets["node1"][1]
        inside = float(box.exec("node1", ["date", "+%s.%N"]).stdout)
        assert 170 < inside - time.time() < 190


def test_the_host_is_in_the_network_of_the_box(box: Box) -> None:
    gateway = box.state.spec.bridge_address
    with socket.create_server((gateway, 0)) as server:
        line = (
            f"import socket; print(socket.create_connection(('gateway', {server.getsockname()[1]})).getpeername()[0])"
        )
        assert box.exec("node0", ["python3", "-c", line]).stdout == f"{gateway}\n"
