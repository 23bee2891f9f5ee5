"""The files and command lines of a box, in full."""

from pathlib import Path

import pytest

from muster.cloudlab.box import slurm, texts
from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.plan import BoxNodePlan, node_plan
from muster.cloudlab.box.spec import BoxSpec

GOLDEN = Path(__file__).parent / "golden"
PATHS = BoxPaths.of("four")
SPEC = BoxSpec(name="four", nodes=4, slurm=True, number=7)
MEMORY_MB = 24105
PROGRAMS = {name: f"/usr/sbin/{name}" for name in ("sshd", "munged", "slurmctld", "slurmd")}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slurm.conf", slurm.slurm_conf(SPEC, PATHS, MEMORY_MB)),
        ("ssh_config", texts.ssh_config(SPEC, PATHS)),
        ("sshd_config", texts.sshd_config(PATHS)),
    ],
)
def test_files_are_the_golden_ones_in_full(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("nodes", "part"),
    [
        (1, "NodeName=node0 NodeAddr=10.10.1.1 CPUs=4 RealMemory=24105 State=UNKNOWN\n"),  # without brackets
        (4, "RealMemory=6026 "),  # nodes claim a share of the memory, and some in any case
        (64, "RealMemory=4000 "),
    ],
)
def test_slurm_conf_names_nodes_and_their_memory(nodes: int, part: str) -> None:
    assert part in slurm.slurm_conf(BoxSpec(nodes=nodes, slurm=True, number=1), PATHS, MEMORY_MB)


def test_cgroup_conf_is_the_same_on_every_machine() -> None:
    assert (
        slurm.cgroup_conf() == "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"
    )


def test_sshd_argv_gives_logins_their_variables_in_one_setting() -> None:
    node = PATHS.node("node1")
    session = {"SLURM_CONF": "/box/slurm.conf", "FAKETIME": "+180s"}
    assert texts.sshd_argv("/usr/sbin/sshd", PATHS, node, session) == [
        "/usr/sbin/sshd",
        "-D",
        "-e",
        "-f",
        "/var/lib/muster/box-four/sshd_config",
        "-h",
        "/var/lib/muster/box-four/nodes/node1/host_key",
        "-o",
        'SetEnv="SLURM_CONF=/box/slurm.conf" "FAKETIME=+180s"',
    ]
    assert texts.sshd_argv("/usr/sbin/sshd", PATHS, node, {})[-2] == "-h"


def test_hosts_file_names_all_nodes_and_the_host() -> None:
    assert texts.hosts_file(SPEC, "laptop") == (
        "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
        "10.10.7.253 head\n10.10.7.1 node0\n10.10.7.2 node1\n10.10.7.3 node2\n10.10.7.4 node3\n"
        "10.10.7.254 gateway laptop\n::ffff:10.10.7.253 head-v6\n"
        "::ffff:10.10.7.1 node0-v6\n::ffff:10.10.7.2 node1-v6\n::ffff:10.10.7.3 node2-v6\n::ffff:10.10.7.4 node3-v6\n"
    )
    assert "\n10.10.7.254 gateway\n" in texts.hosts_file(SPEC, "node1"), "a host does not take the name of a node"


def test_known_hosts_has_name_and_address_and_no_comment() -> None:
    found = texts.known_hosts(SPEC, {"node0": "ssh-ed25519 AAAA node0\n", "head": "ssh-ed25519 BBBB head\n"})
    assert found == "node0,10.10.7.1 ssh-ed25519 AAAA\nhead,10.10.7.253 ssh-ed25519 BBBB\n"


def test_passwd_gives_root_another_home_and_leaves_the_others() -> None:
    text = "root:x:0:0:root:/root:/bin/bash\nalice:x:1000:1000:,,,:/home/alice:/bin/sh\n"
    assert texts.passwd(text, "/box/home") == text.replace(":/root:", ":/box/home:")


def test_exec_argv() -> None:
    found = texts.exec_argv("/usr/bin/nsenter", 12, ["echo", "a b"], folder="/here", environment={"HOME": "/box/home"})
    assert found == [
        "/usr/bin/nsenter",
        "--target",
        "12",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--pid",
        "--",
        "env",
        "--chdir=/here",
        "HOME=/box/home",
        "echo",
        "a b",
    ]


def test_plan_of_a_node_and_of_the_head() -> None:
    plan = node_plan(SPEC, PATHS, "node2", PROGRAMS, anew=True)
    assert plan.netns == "/run/netns/muster-four-node2"
    assert dict(plan.binds).keys() == {str(PATHS.hosts), "/var/lib/muster/box-four/nodes/node2/passwd"}
    assert [service.name for service in plan.services] == ["sshd", "slurmd"]
    assert plan.services[1].argv == ("/usr/sbin/slurmd", "-D", "-c", "-N", "node2")
    assert plan.services[1].environment["SLURM_CONF"] == "/var/lib/muster/box-four/slurm.conf"
    head = node_plan(SPEC, PATHS, "head", PROGRAMS, anew=True)
    assert [(service.name, service.detaches) for service in head.services] == [
        ("sshd", False),
        ("munged", True),
        ("slurmctld", False),
    ]
    assert head.services[2].argv == ("/usr/sbin/slurmctld", "-D", "-c")
    assert node_plan(SPEC, PATHS, "head", PROGRAMS, anew=False).services[2].argv == ("/usr/sbin/slurmctld", "-D")


def test_private_storage_is_one_more_bind_and_not_on_the_head() -> None:
    spec = BoxSpec(name="four", slurm=True, number=7, private_runs="/data/runs")
    bind = ("/var/lib/muster/box-four/nodes/node0/runs", "/data/runs")
    assert bind in node_plan(spec, PATHS, "node0", PROGRAMS, anew=True).binds
    assert "/data/runs" not in dict(node_plan(spec, PATHS, "head", PROGRAMS, anew=True).binds).values()


def test_a_plan_reads_back_as_it_was_written() -> None:
    for node in SPEC.members:
        plan = node_plan(SPEC, PATHS, node, PROGRAMS, anew=True)
        assert BoxNodePlan.from_json(plan.to_json()) == plan
