"""What an agent says of its node: every fact within a deadline, or why not."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.boot import module_argv
from muster.jobs.machine import free
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.fingerprint import fingerprint
from muster.launch.node import nodefacts
from muster.launch.node.nodefacts import facts, run_probes
from muster.launch.wire.codec import decode, encode
from muster.launch.wire.messages import FROM_AGENT, Inspect, Inspected

pytestmark = [pytest.mark.command, pytest.mark.slow]


def test_a_node_says_what_it_is_and_has() -> None:
    found = facts()
    assert found["failed"] == {}
    assert found["python"] == sys.version.split()[0]
    assert found["code"] == fingerprint()
    assert found["host"] == socket.gethostname()
    assert 1 <= found["cores"] <= len(os.sched_getaffinity(0))
    assert 0 < found["memory"]["available_mib"] <= found["memory"]["total_mib"]
    assert found["limits"]["open_files"] > 0


def test_what_is_found_can_be_sent(run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = Inspect(peer="127.0.0.1", port=server.getsockname()[1])
        for request in (Inspect(), peer, Inspect(run=str(run.path), nonce="the nonce", mark="3"), Inspect(run="/no")):
            sent = Inspected(0, facts(request))
            received = decode(encode(sent), FROM_AGENT)
            assert json.loads(encode(received)) == json.loads(encode(sent))


def test_torch_is_looked_for_and_not_imported() -> None:
    code = "import sys; from muster.launch.node.nodefacts import facts; facts(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_without_torch_the_version_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise nodefacts.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(nodefacts.metadata, "version", missing)
    assert nodefacts.version("torch") is None


def test_the_same_facts_come_from_the_command_line() -> None:
    done = subprocess.run(module_argv(sys.executable, "muster.launch.node.nodefacts"), capture_output=True, text=True)
    assert f'"code": "{fingerprint()}"' in done.stdout, done.stderr


def test_a_probe_that_hangs_or_fails_takes_nothing_from_the_others() -> None:
    never = threading.Event()

    def broken() -> None:
        raise ZeroDivisionError

    def refused() -> None:
        raise PermissionError(13, "Permission denied")

    probes: dict[str, Callable[[], Any]] = {"slow": never.wait, "good": lambda: 7, "broken": broken, "refused": refused}
    found = run_probes(probes, deadline_s=1.0)
    never.set()
    assert found == {
        "good": 7,
        "failed": {
            "slow": "took longer than 1 s",
            "broken": "ZeroDivisionError",
            "refused": "[Errno 13] Permission denied",
        },
    }


# What it has ----------------------------------------------------------------------------------------------------------


def tool(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program called nvidia-smi first in PATH."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_named_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "printf 'NVIDIA H200\\nNVIDIA H200\\n'", monkeypatch)
    assert nodefacts.gpus() == ["NVIDIA H200", "NVIDIA H200"]


def test_a_broken_driver_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", monkeypatch)
    assert facts()["failed"] == {"gpus": "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"}


def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(nodefacts, "DEADLINE_S", 0.3)
    assert "gpus" in facts()["failed"]


@pytest.mark.parametrize(
    ("groups", "files", "cores", "total"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 2, None),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000"}, 1, None),
        ("0::/a\n", {"a/memory.max": str(512 << 20), "a/memory.current": str(128 << 20)}, None, (512, 384)),
        ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "5"}, None, None),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, 1, None),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None, None),
        (
            "4:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": str(1 << 30), "memory/x/memory.usage_in_bytes": str(2 << 30)},
            None,
            (1024, 0),
        ),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000)}, None, None),
    ],
)
def test_control_groups_limit_cores_and_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    cores: int | None,
    total: tuple[int, int] | None,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(groups)
    (tmp_path / "cgroup.controllers").touch()
    monkeypatch.setattr(free, "GROUPS", tmp_path)
    monkeypatch.setattr(free, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert nodefacts.cores() == (cores or 8)
    memory = nodefacts.memory()
    if total is None:
        assert memory["total_mib"] > 1024
    else:
        assert (memory["total_mib"], memory["available_mib"]) == total


# What it reaches ------------------------------------------------------------------------------------------------------


def test_a_port_answers_or_the_reason_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = facts(Inspect(peer="127.0.0.1", port=port))
        assert (found["connect"], found["route"]) == ("", ["lo", "127.0.0.1"])
    assert facts(Inspect(peer="127.0.0.1", port=port))["connect"] == "Connection refused"


def test_a_port_that_swallows_packets_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow(*arguments: Any, **options: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", swallow)
    assert facts(Inspect(peer="127.0.0.1", port=1))["connect"] == "no answer within 3 s"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path / "runs" / "a-run")
    folder.path.mkdir(parents=True)
    folder.nonce("supervisor").write_text("the nonce")
    return folder


def storage(run: RunDir, nonce: str = "the nonce") -> Any:
    return facts(Inspect(run=str(run.path), nonce=nonce, mark="3"))["storage"]


def test_a_node_that_reads_the_nonce_shares_the_folder_and_leaves_its_mark(run: RunDir) -> None:
    found = storage(run)
    assert (found["where"], found["path"], found["why"]) == ("shared", str(run.path), "")
    assert found["free_mib"] > 0
    assert run.nonce("3").read_text() == "the nonce"


def test_a_folder_of_the_same_name_with_another_nonce_is_another_folder(run: RunDir) -> None:
    assert storage(run, "another nonce")["where"] == "apart"
    assert not run.nonce("3").exists()


def test_a_node_that_does_not_see_the_folder_names_where_it_would_keep_its_part(run: RunDir, tmp_path: Path) -> None:
    found = storage(RunDir(tmp_path / "not" / "there" / "a-run"))
    assert (found["where"], found["path"]) == ("apart", str(tmp_path))
    assert not (tmp_path / "not").exists()


def test_a_folder_that_cannot_be_written_is_no_storage(run: RunDir) -> None:
    run.nonce("3").mkdir()  # in the way of the mark, as a read-only mount would be
    found = storage(run)
    assert (found["where"], found["why"]) == ("none", f"{run.path}: cannot be written: File exists")
