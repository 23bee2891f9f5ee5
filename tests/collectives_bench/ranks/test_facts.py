"""What a host says of itself, where files are there and where they are missing."""

import os
import socket

import pytest

from muster.collectives_bench.ranks import facts
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.machine import free
from muster.jobs.machine import hardware as machine

ENV = RankEnv(3, 4, 1, 2, 1, 2, "127.0.0.1", 29500)


def test_this_host():
    found = facts.host_facts(ENV, {"OMP_NUM_THREADS": "1", "HOME": "/root"})
    assert (found.node, found.ranks, found.host) == (1, 2, socket.gethostname())
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.interface == "lo"
    assert found.mtu is not None
    assert found.mtu >= 1500
    assert found.speed_mbit is None
    assert found.memory_bytes > 2**28
    assert found.cpu
    assert found.kernel == os.uname().release


def test_only_variables_that_change_numbers_are_told():
    environ = {
        "NCCL_ALGO": "Ring",
        "GLOO_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "4",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MALLOC_ARENA_MAX": "1",
        "MUSTER_SECRET": "secret",
        "PATH": "/bin",
    }
    assert list(facts.host_facts(ENV, environ).environment) == [
        "GLOO_SOCKET_IFNAME",
        "MALLOC_ARENA_MAX",
        "NCCL_ALGO",
        "OMP_NUM_THREADS",
        "TORCH_CPP_LOG_LEVEL",
    ]


@pytest.mark.parametrize(
    ("environ", "backend", "interface"),
    [
        ({"GLOO_SOCKET_IFNAME": "far1"}, "gloo", "far1"),
        ({"GLOO_SOCKET_IFNAME": "far1,far2", "NCCL_SOCKET_IFNAME": "=ib0"}, "nccl", "ib0"),
        ({"GLOO_SOCKET_IFNAME": "far1,far2"}, "nccl", "far1"),
        ({"NCCL_SOCKET_IFNAME": "l"}, "nccl", "lo"),
        ({"NCCL_SOCKET_IFNAME": "^docker0,veth"}, "nccl", "lo"),
        ({}, "gloo", "lo"),
    ],
)
def test_the_interface_is_the_one_that_was_told_else_the_one_to_the_master(environ, backend, interface):
    assert facts.interface_of(ENV, environ, backend) == interface


def test_a_master_nobody_knows_leaves_the_interface_empty():
    env = RankEnv(0, 1, 0, 1, 0, 1, "no-such-host.invalid", 1)
    found = facts.host_facts(env, {})
    assert (found.interface, found.mtu, found.speed_mbit) == ("", None, None)


def test_nothing_is_guessed_where_files_are_missing(tmp_path, monkeypatch):
    files = {machine: ("CPU_INFO", "NVIDIA"), free: ("MEMORY_INFO",), facts: ("CONGESTION", "GOVERNORS")}
    for module, names in files.items():
        for name in names:
            monkeypatch.setattr(module, name, tmp_path / "missing")
    found = facts.host_facts(ENV, {})
    assert (found.cpu, found.memory_bytes, found.congestion_control) == (os.uname().machine, 0, "")
    assert (found.governor, found.gpus) == ("", [])


def test_gpus_are_named_by_the_driver_without_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "NVIDIA", tmp_path)
    for bus in ("0000:1b:00.0", "0000:04:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 62\n")
    assert facts.host_facts(ENV, {}).gpus == ["NVIDIA H200", "NVIDIA H200"]


def test_governors_of_our_own_cores_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "GOVERNORS", tmp_path)
    for core in os.sched_getaffinity(0):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text("powersave\n")
    assert facts.host_facts(ENV, {}).governor == "powersave"
