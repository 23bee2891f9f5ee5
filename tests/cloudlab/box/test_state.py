"""What is written about boxes, which one is meant, and what is refused before anything is made."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.cloudlab.box import machine, paths, state
from muster.cloudlab.box.hosts import box_hosts, find_box
from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.spec import BoxSpec, Rates
from muster.cloudlab.box.state import BoxState, boot_id, box_names, locked_folder, read_state, root_lock, write_state
from muster.cloudlab.box.tools import Tools
from muster.jobs.basics.errors import RefusedError, RunFolderError, UsageError
from support.users import AS_ATTACKER, ATTACKER, needs_root, public_folder

pytestmark = pytest.mark.command

SPECS = st.builds(
    BoxSpec,
    name=st.from_regex(r"[A-Za-z0-9][\w.-]{0,31}", fullmatch=True).filter(str.isascii),
    nodes=st.integers(1, 250),
    rate=st.none() | st.integers(8_000, 10**12),
    slurm=st.booleans(),
    number=st.integers(1, 250),
    private_runs=st.none() | st.just("/data/runs"),
    clocks=st.just({}) | st.just({"node0": "+180s"}),
)
RATES = st.builds(
    Rates,
    every=st.none() | st.integers(8_000, 10**12),
    pairs=st.dictionaries(st.sampled_from([("node0", "node1"), ("node1", "node2")]), st.integers(8_000, 10**12)),
    nodes=st.dictionaries(st.sampled_from(["node0", "node2"]), st.integers(8_000, 10**12)),
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the boxes of a test in a folder of its own."""
    monkeypatch.setattr(paths, "ROOT", tmp_path / "muster")
    return tmp_path / "muster"


def written(spec: BoxSpec, **more: object) -> BoxState:
    """Write the state of a box that was never made."""
    made = BoxState(spec, Rates(spec.rate), **{"boot": boot_id(), "complete": True, **more})  # type: ignore[arg-type]
    BoxPaths.of(spec.name).path.mkdir(parents=True, exist_ok=True)
    write_state(made)
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SPECS, RATES, st.booleans())
def test_a_state_reads_back_as_it_was_written(spec: BoxSpec, rates: Rates, complete: bool) -> None:
    BoxPaths.of(spec.name).path.mkdir(parents=True, exist_ok=True)
    made = BoxState(spec, rates, "boot", complete, ("/data",), "/lib/faketime", {"ip": "/sbin/ip"})
    write_state(made)
    assert read_state(spec.name) == made


def test_a_box_whose_making_ended_before_the_first_write_has_no_state(root: Path) -> None:
    assert read_state("none") is None
    (root / "box-early").mkdir(parents=True)
    assert read_state("early") is None
    assert box_names() == ["early"]


def test_a_state_that_cannot_be_understood_is_refused_with_its_path(root: Path) -> None:
    (root / "box-odd").mkdir(parents=True)
    for text in ("{", "[]", json.dumps({"version": 1}), json.dumps({"version": 2})):
        (root / "box-odd" / "state.json").write_text(text)
        with pytest.raises(
            RefusedError, match=r"box-odd/state.json: cannot be parsed .*; remove it, then run: sudo muster box down"
        ):
            read_state("odd")


def test_which_box_is_meant(root: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no box box \(no box exists\); make it: sudo muster box up$"):
        find_box(None)
    written(BoxSpec(name="one", number=2))
    assert find_box(None).spec.name == "one"
    written(BoxSpec(name="two", number=3))
    with pytest.raises(UsageError, match="there are 2 boxes: one, two; name one of them"):
        find_box(None)
    written(BoxSpec(name="box", number=1))
    assert find_box(None).spec.name == "box"
    assert find_box("two").spec.name == "two"
    with pytest.raises(
        UsageError,
        match="there is no box three \\(existing boxes: box, one, two\\); make it: sudo muster box up --name three",
    ):
        find_box("three")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"complete": False}, "is incomplete; run sudo muster box down --name one, then create it again"),
        ({"boot": "earlier"}, "was made before this machine rebooted; run sudo muster box down"),
    ],
)
def test_half_made_boxes_and_those_of_an_earlier_start_are_no_hosts(root: Path, fields, said: str) -> None:
    written(BoxSpec(name="one", number=2), **fields)
    with pytest.raises(RefusedError, match=f"box one {said}"):
        box_hosts("one")


def test_hosts_without_slurm_set_no_variable(root: Path) -> None:
    written(BoxSpec(name="plain", nodes=2, number=9))
    assert box_hosts("plain").environment == {}
    assert [host.address for host in box_hosts("plain").hosts] == ["10.10.9.1", "10.10.9.2"]


def test_the_root_folder_goes_when_it_is_empty_and_a_lock_notices_that_its_folder_is_gone(root: Path) -> None:
    with root_lock():
        assert root.is_dir()
        (root / "box-x").mkdir()
    assert root.is_dir()
    with locked_folder(root / "box-x") as lock:
        assert lock is not None
        (root / "box-x").rmdir()
    with locked_folder(root / "box-x") as lock:
        assert lock is None
    with root_lock():
        pass
    assert not root.exists()


def test_a_held_lock_is_waited_for_and_then_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LOCK_S", 0.05)
    root.mkdir()
    with (
        locked_folder(root),
        pytest.raises(RefusedError, match="another muster box command has been working on it"),
        locked_folder(root),
    ):
        pass


@needs_root
def test_another_user_reads_a_box_and_holds_none_of_its_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    with public_folder(0o755) as folder:
        root = folder / "muster"
        monkeypatch.setattr(paths, "ROOT", root)
        written(BoxSpec(name="one", number=2))
        (root / "box-one").chmod(0o755)  # as boxes were made before
        umask = os.umask(0)
        try:
            with root_lock(), locked_folder(root / "box-one") as lock:
                assert lock is not None
                written(BoxSpec(name="one", number=2))
        finally:
            os.umask(umask)
        for held in (root / "lock", root / "box-one"):
            tried = subprocess.run(
                [*AS_ATTACKER, "flock", "--nonblock", held, "true"], capture_output=True, check=False
            )
            assert b"Permission denied" in tried.stderr, held
        state_file = root / "box-one/state.json"
        subprocess.run([*AS_ATTACKER, "cat", state_file], check=True, capture_output=True)
        assert state_file.stat().st_mode & 0o022 == 0


@needs_root
def test_a_state_that_another_user_wrote_or_that_is_a_link_is_not_used(root: Path) -> None:
    written(BoxSpec(name="one", number=2))
    file = BoxPaths.of("one").state
    os.chown(file, ATTACKER, ATTACKER)
    with pytest.raises(RunFolderError, match=f"state.json: belongs to user {ATTACKER}, expected 0"):
        read_state("one")
    os.chown(file, 0, 0)
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")
    with pytest.raises(RunFolderError, match=r"state.json: is a link, expected a file; it was not used; remove it"):
        read_state("one")


def test_without_root_the_message_says_sudo_and_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["/opt/m/.venv/bin/muster", "box", "up", "--name", "a b"])
    with pytest.raises(
        RefusedError, match=r"muster box up needs root.*sudo /opt/m/.venv/bin/muster box up --name 'a b'$"
    ):
        machine.need_root("muster box up")


def program(path: Path, body: str) -> str:
    """Write a shell script; return its path."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_missing_programs_are_named_with_the_line_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "FOLDERS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in machine.PACKAGES | machine.SLURM_PACKAGES:
        if name not in ("sshd", "munged", "slurmd", "slurmctld"):
            program(tmp_path / name, "")
    with pytest.raises(
        RefusedError, match=r"needs sshd, which this machine lacks; try: apt-get install .* openssh-server$"
    ):
        machine.find_programs(with_slurm=False)
    wanted = r"needs sshd, munged, slurmctld, slurmd, which .*install --no-\S+ munge openssh-server slurm-wlm$"
    with pytest.raises(RefusedError, match=wanted):
        machine.find_programs(with_slurm=True)


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    """An `ip` that says which networks this machine knows."""
    routes = [
        {"dst": "default", "gateway": "192.0.2.1"},
        {"dst": "10.0.0.0/8", "dev": "eth0"},
        {"dst": "10.10.2.0/24", "dev": "mb2"},
        {"type": "local", "dst": "10.10.3.254", "dev": "mb3"},
        {"type": "broadcast", "dst": "10.10.4.255", "dev": "mb9"},
    ]
    return Tools({"ip": program(tmp_path / "ip", f"cat <<'END'\n{json.dumps(routes)}\nEND")})


def test_the_next_free_network_is_chosen_and_the_first_is_kept_for_the_default_box(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LINKS", tmp_path / "links")
    (tmp_path / "links" / "mb5").mkdir(parents=True)
    assert machine.choose_number("box", [], tools) == 1
    assert machine.choose_number("box", [1], tools) == 4
    assert machine.choose_number("mine", [], tools) == 4
    assert machine.choose_number("mine", [4], tools) == 6


def test_a_program_that_fails_is_named_with_its_own_words(tmp_path: Path) -> None:
    ip = program(tmp_path / "ip", "echo 'RTNETLINK answers: Operation not permitted' >&2\nexit 2")
    wanted = r"ip link add x failed \(2\): RTNETLINK answers: Operation not permitted; this may be a container without"
    with pytest.raises(RefusedError, match=wanted):
        Tools({"ip": ip}).run(["ip", "link", "add", "x"])


def test_the_memory_and_a_firewall_on_bridges_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.memory_mb() > 100
    monkeypatch.setattr(machine, "BRIDGE_FILTER", tmp_path / "filter")
    assert not machine.filters_bridges()
    for text, filters in (("0\n", False), ("1\n", True)):
        (tmp_path / "filter").write_text(text)
        assert machine.filters_bridges() == filters
