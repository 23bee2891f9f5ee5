"""The boot script, with programs of our own in place of CloudLab's, NFS's and apt's: each step, once and again."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.users import AS_ATTACKER, ATTACKER, needs_root, public_folder

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "cloudlab" / "boot.sh"
Ended = subprocess.CompletedProcess[str]


class Node:
    """A node of its own: folders for /users, /etc and /nfs, and programs that write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        self.key = folder / "experiment-key"
        for name in ("bin", "users/ada/.ssh", "users/grace", "etc/ssh", "repository"):
            (folder / name).mkdir(parents=True)
        self.calls.touch()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True, timeout=30)
        self.program("geni-get", f'[[ $1 == key ]] && cat "{self.key}"')
        self.program("systemctl")
        self.program("apt-get")
        self.program("mountpoint", f'[[ -e "{folder}/mounted" ]]')
        self.setup("exit 0")

    def program(self, name: str, body: str = "exit 0") -> None:
        """Put a program on PATH that writes down its call and then runs `body`."""
        self._write(self.bin / name, f'echo "{name} $*" >>"{self.calls}"\n{body}')

    def setup(self, body: str) -> None:
        """Make the repository's setup.sh."""
        self._write(self.folder / "repository" / "setup.sh", f'echo "setup.sh $*" >>"{self.calls}"\n{body}')

    def _write(self, path: Path, body: str) -> None:
        path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def bash(self, line: str) -> Ended:
        """Run a line after the script's functions were read and its places set to ours."""
        places = f"""
            source {SCRIPT}
            cd {self.folder}
            homes=$PWD/users etc=$PWD/etc shared=$PWD/nfs log=$PWD/log lock=$PWD/lock
            repository=$PWD/repository mount_pause_s=0.01
        """
        path = f"{self.bin}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "GIT_CONFIG_SYSTEM": str(self.folder / "gitconfig")}
        return subprocess.run(
            ["bash", "-c", f"{places}\n{line}"], env=environ, capture_output=True, text=True, timeout=50, check=False
        )

    def called(self, name: str) -> list[str]:
        """Return how a program was called."""
        return [line for line in self.calls.read_text().splitlines() if line.split()[0] == name]


@pytest.fixture
def boot(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def public_boot() -> Iterator[Node]:
    """A node whose homes belong to another user, who can enter them."""
    with public_folder(0o755) as folder:
        node = Node(folder)
        for path in (folder / "users").rglob("*"):
            os.chown(path, ATTACKER, ATTACKER)
        yield node


as_root = pytest.mark.cluster  # the whole script runs as root


def test_everybody_gets_the_experiments_key_once_and_may_log_in_with_it(boot: Node) -> None:
    authorized = boot.folder / "users/ada/.ssh/authorized_keys"
    authorized.write_text("ssh-ed25519 AAAA own-key-without-a-line-end", encoding="utf-8")
    for _ in range(2):
        assert boot.bash("set -e; (node_keys)").returncode == 0
    public = boot.key.with_suffix(".pub").read_text().split()[1]
    for user in ("ada", "grace"):
        ssh = boot.folder / "users" / user / ".ssh"
        assert (ssh / "id_rsa").read_text() == boot.key.read_text()
        assert (ssh / "id_rsa").stat().st_mode & 0o777 == 0o600
        assert (ssh / "authorized_keys").stat().st_mode & 0o777 == 0o600
        assert ssh.stat().st_mode & 0o777 == 0o700
        assert (ssh / "authorized_keys").read_text().count(public) == 1
    assert authorized.read_text().splitlines()[0] == "ssh-ed25519 AAAA own-key-without-a-line-end"


def test_a_key_of_ones_own_is_left_alone(boot: Node) -> None:
    own = boot.folder / "users/ada/.ssh/id_rsa"
    own.write_text("mine", encoding="utf-8")
    ended = boot.bash("node_keys")
    assert own.read_text() == "mine"
    assert "users/ada/.ssh/id_rsa is another key; left alone" in ended.stdout


@needs_root
@pytest.mark.parametrize("name", ["authorized_keys", "id_rsa", "id_rsa.pub"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_linked_file_in_a_users_home_does_not_make_root_write_elsewhere(
    public_boot: Node, name: str, exists: bool
) -> None:
    victim = public_boot.folder / "etc/victim"
    if exists:
        victim.write_text("root's\n", encoding="utf-8")
        victim.chmod(0o644)
    subprocess.run([*AS_ATTACKER, "ln", "-s", victim, public_boot.folder / "users/ada/.ssh" / name], check=True)
    public_boot.bash("set -e; (node_keys)")
    assert victim.exists() == exists
    if exists:
        assert (victim.read_text(), victim.stat().st_uid, victim.stat().st_mode & 0o777) == ("root's\n", 0, 0o644)
    # One user's link does not cost the others their key.
    grace = public_boot.folder / "users/grace/.ssh"
    assert {path.name: path.stat().st_uid for path in grace.iterdir()} == dict.fromkeys(
        ("id_rsa", "id_rsa.pub", "authorized_keys"), ATTACKER
    )


@needs_root
def test_a_user_can_hold_neither_the_lock_nor_the_log_of_the_boot_script(public_boot: Node) -> None:
    seen = public_boot.folder / "seen"
    seen.touch()
    seen.chmod(0o666)
    public_boot.calls.chmod(0o666)
    note = f'if [[ $(id -u) == {ATTACKER} ]]; then readlink /proc/$$/fd/* >>"{seen}"; fi'
    public_boot.program("mkdir", f'{note}; exec /bin/mkdir "$@"')
    public_boot.program("exportfs")
    assert public_boot.bash("main nfs-server 10.10.1.0/24").returncode == 0
    lock, log = public_boot.folder / "lock", public_boot.folder / "log"
    inherited = seen.read_text().splitlines()
    assert inherited
    assert not {str(lock), str(log)} & set(inherited)
    held = subprocess.run([*AS_ATTACKER, "flock", "--nonblock", lock, "true"], capture_output=True, check=False)
    assert b"Permission denied" in held.stderr


@pytest.mark.parametrize("body", ["exit 1", "exit 0", "echo not a key"])
def test_without_a_key_nobody_gets_one_and_the_step_fails(boot: Node, body: str) -> None:
    boot.program("geni-get", body)
    assert boot.bash("set -e; (node_keys)").returncode != 0
    assert not (boot.folder / "users/ada/.ssh/id_rsa").exists()


@pytest.mark.cluster
def test_nodes_of_the_lan_are_trusted_when_they_are_new(boot: Node) -> None:
    assert boot.bash("trust_lan").returncode == 0
    config = boot.folder / "etc/ssh/ssh_config.d/50-muster.conf"
    for host, answer in (("node7", "accept-new"), ("10.10.1.9", "accept-new"), ("example.org", "ask")):
        shown = subprocess.run(
            ["ssh", "-G", "-F", str(config), host], capture_output=True, text=True, check=True, timeout=20
        )
        assert f"stricthostkeychecking {answer}" in shown.stdout


def test_the_server_exports_the_folder_to_its_network_however_often_it_boots(boot: Node) -> None:
    boot.program("exportfs")
    for _ in range(2):
        assert boot.bash("set -e; serve_folder 10.10.1.0/24").returncode == 0
    exports = (boot.folder / "etc/exports.d/muster.exports").read_text()
    assert exports == f"{boot.folder}/nfs 10.10.1.0/24(rw,sync,no_subtree_check)\n"
    assert (boot.folder / "nfs").stat().st_mode & 0o7777 == 0o1777
    assert boot.called("exportfs") == ["exportfs -ra"] * 2
    assert boot.called("apt-get") == []


def test_a_missing_package_is_installed_after_a_second_try_with_fresh_lists(boot: Node) -> None:
    boot.program(
        "apt-get", f'[[ $* != *install* || -e "{boot.folder}/fresh" ]] || exit 100; touch "{boot.folder}/fresh"'
    )
    assert boot.bash("set -e; install_package nfs-common").returncode == 0
    assert [call.split()[-1] for call in boot.called("apt-get")] == ["nfs-common", "update", "nfs-common"]


def test_a_client_tries_until_the_server_answers_and_mounts_once(boot: Node) -> None:
    boot.program("mount.nfs")
    boot.program("mount", f'[[ $(grep -c "^mount " "{boot.calls}") -ge 3 ]] && touch "{boot.folder}/mounted"')
    for _ in range(2):
        assert boot.bash("set -e; mount_folder 10.10.1.254").returncode == 0
    place = f"{boot.folder}/nfs"
    assert boot.called("mount") == [f"mount -t nfs -o rw,hard,retry=0 10.10.1.254:{place} {place}"] * 3


def test_a_client_gives_up_at_its_deadline(boot: Node) -> None:
    boot.program("mount.nfs")
    boot.program("mount", "exit 32")
    ended = boot.bash("mount_deadline_s=0; mount_folder 10.10.1.254")
    assert ended.returncode == 1
    assert "could not be mounted for 0 s" in ended.stdout


@as_root
def test_the_whole_script_does_every_step_and_logs_what_they_say(boot: Node) -> None:
    boot.program("mount.nfs")
    boot.program("mount", f'touch "{boot.folder}/mounted"')
    boot.setup("echo wheels and eggs")
    for _ in range(2):
        ended = boot.bash("main nfs-client 10.10.1.254")
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    log = (boot.folder / "log").read_text()
    assert log.count("wheels and eggs") == 2
    assert log.count("boot.sh: ready") == 2
    assert boot.called("setup.sh") == ["setup.sh --cpu"] * 2
    assert len(boot.called("mount")) == 1
    safe = (boot.folder / "gitconfig").read_text() if shutil.which("git") else "directory = "
    assert safe.count("directory = ") == 1


@as_root
def test_a_step_that_fails_is_named_and_the_others_are_done(boot: Node) -> None:
    boot.program("geni-get", "echo no such slice >&2; exit 1")
    boot.setup("echo setup.sh: the disk is full >&2; exit 74")
    boot.program("exportfs")
    ended = boot.bash("main")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"boot.sh: failed: ssh between nodes; see {boot.folder}/log",
        f"boot.sh: failed: setup.sh; see {boot.folder}/log",
    ]
    log = (boot.folder / "log").read_text()
    assert "no such slice" in log
    assert "the disk is full" in log
    assert (boot.folder / "etc/ssh/ssh_config.d/50-muster.conf").exists()


@as_root
def test_the_node_that_serves_files_needs_no_setup(boot: Node) -> None:
    boot.program("exportfs")
    assert boot.bash("main nfs-server 10.10.1.0/24").returncode == 0
    assert boot.called("setup.sh") == []


@pytest.mark.parametrize("arguments", [["nfs-server"], ["nfs-client"], ["server", "x"], ["nfs-client", "a", "b"]])
def test_a_wrong_call_is_refused_before_anything_is_done(arguments: list[str]) -> None:
    ended = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("boot.sh: wanted nothing, nfs-server NETWORK or nfs-client ADDRESS, got: ")
