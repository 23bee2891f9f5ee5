"""The smoke test of `muster check`: gloo between two pretend nodes, and the networks that NCCL's log names."""

import json
from pathlib import Path

import pytest

from muster.launch.check.smoke import networks_in
from muster.launch.cli import main

pytestmark = pytest.mark.command

JOB = "name: look\nnodes: 2\nenv: {MARK: '1'}\ncommand: ['true']\n"


def run(tmp_path: Path, text: str, *options: str) -> int:
    (tmp_path / "job.yaml").write_text(text)
    return main(["check", str(tmp_path / "job.yaml"), "--runs", str(tmp_path / "runs"), *options])


@pytest.mark.slow
@pytest.mark.ranks
def test_two_nodes_exchange_data_and_the_interface_is_reported(tmp_path: Path, capsys) -> None:
    (tmp_path / "runs").mkdir()
    assert run(tmp_path, JOB, "--smoke", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    smoke = found["smoke"]
    assert (found["code"], smoke["backend"], smoke["why"], len({*smoke["hosts"]})) == (0, "gloo", "", 2)
    assert smoke["busbw"] > 0
    assert smoke["settings"] == {"GLOO_SOCKET_IFNAME": "lo"}
    assert smoke["interfaces"][0] == "lo"
    assert not list((tmp_path / "runs").glob("smoke*"))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_wrong_interface_fails_the_test_and_is_named(tmp_path: Path, capsys) -> None:
    assert run(tmp_path, JOB.replace("MARK: '1'", "GLOO_SOCKET_IFNAME: nowhere"), "--smoke") == 78
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("smoke test failed: gloo between ")
    assert "nowhere" in last
    assert not list(tmp_path.glob("runs/smoke*"))


@pytest.mark.slow
def test_it_needs_two_nodes_and_cpu_nodes_are_tested_only_on_request(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(tmp_path, JOB.replace("nodes: 2", "nodes: 1"), "--smoke") == 2
    assert "--smoke: tests two nodes, but this job has one" in capsys.readouterr().err
    assert run(tmp_path, JOB) == 0
    assert "smoke" not in capsys.readouterr().out


SOCKET = """\
n1:100:100 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =eth1
n1:100:100 [0] NCCL INFO Bootstrap: Using eth1:10.10.1.1<0>
n1:100:112 [0] NCCL INFO NET/IB : No device found.
n1:100:112 [0] NCCL INFO NET/IB : Using [RO]; OOB eth1:10.10.1.1<0>
n1:100:112 [0] NCCL INFO Failed to initialize NET plugin IB
n1:100:112 [0] NCCL INFO NET/Socket : Using [0]eth1:10.10.1.1<0> [1]eth2:fe80::1%eth2<0>
n1:100:112 [0] NCCL INFO Using network Socket
"""
INFINIBAND = """\
n1:100:100 [0] NCCL INFO Bootstrap : Using ib0:192.168.0.7<0>
n1:100:112 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/RoCE [RO]; OOB ib0:192.168.0.7<0>
n1:100:112 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
n1:100:112 [0] NCCL INFO Initialized NET plugin IB
n1:100:112 [0] NCCL INFO Assigned NET plugin IB to comm
n1:100:112 [0] NCCL INFO Using network IB
"""


@pytest.mark.parametrize(
    ("log", "networks"),
    [
        (SOCKET, {"Bootstrap": "eth1", "NET/Socket": "eth1 eth2"}),
        (INFINIBAND, {"Bootstrap": "ib0", "NET/IB": "mlx5_0:1/IB mlx5_3:1/RoCE"}),
        ("no word of it\n", {}),
    ],
)
def test_the_log_of_nccl_names_its_networks(log: str, networks: dict[str, str]) -> None:
    assert networks_in(log.splitlines()) == networks
