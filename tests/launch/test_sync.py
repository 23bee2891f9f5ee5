"""The same code on every host: brought over a real ssh, once where hosts share a folder, and seen to be there."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.errors import RefusedError, RunFolderError, UnreachableError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login
from muster.jobs.spec.site import SshSettings
from muster.launch.cli import main
from muster.launch.common.fingerprint import PACKAGE, fingerprint
from muster.launch.submit import sync as module
from muster.launch.submit.sync import SCRIPT, SyncOutcome, code_of, found_code, judge, pack, report, sync
from support.sshd import Sshd, closed_port
from support.worktrees import commit, repository, write

N1 = Host("n1", "")


# What goes into the archive, and what the answers mean ----------------------------------------------------------------


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: member for member in archive.getmembers()}


def test_a_checkout_is_packed_as_git_sees_it(tmp_path: Path) -> None:
    repository(tmp_path, ".venv/\nruns/\n")
    write(tmp_path, "setup.sh", "jobs/a.py", ".venv/bin/python", "runs/one/out", b"odd \xff\n name")
    commit(tmp_path)
    write(tmp_path, "jobs/new.py")
    (tmp_path / "setup.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("jobs/a.py")
    found = members(pack(tmp_path))
    assert set(found) == {".gitignore", "setup.sh", "jobs/a.py", "jobs/new.py", "odd \udcff\n name", "link"}
    assert found["setup.sh"].mode & 0o777 == 0o755
    assert found["link"].issym()
    assert {(member.uid, member.uname) for member in found.values()} == {(0, "")}


def test_an_installation_is_packed_without_what_else_lies_there(tmp_path: Path) -> None:
    write(
        tmp_path, "muster/jobs/a.py", "muster/jobs/__pycache__/a.pyc", "muster/launch/data/x.txt", "torch/__init__.py"
    )
    assert set(members(pack(tmp_path))) == {"muster/jobs/a.py", "muster/launch/data/x.txt"}


def test_the_script_is_one_line_that_any_login_shell_passes_on() -> None:
    assert not set("'!\n") & set(SCRIPT)
    assert subprocess.run(["sh", "-n", "-c", SCRIPT]).returncode == 0


FACTS = f'{{"host": "n1", "code": "{fingerprint()}"}}'


@pytest.mark.parametrize(
    ("state", "code", "said", "errors", "expected", "words"),
    [
        ("brought", 0, [FACTS], [], None, ""),
        ("shared", 0, ["motd", FACTS], [], None, ""),
        ("brought", 0, ['{"code": "ffffffffffff"}'], [], RefusedError, "n1: has different code in /d (ffffffffffff"),
        ("brought", 0, ["nothing"], [], RefusedError, "n1: has different code in /d (unknown, here"),
        ("brought", 127, [], ["sh: /py: not found"], RefusedError, "no interpreter /py; run /d/setup.sh there"),
        ("brought", 1, [], ["No module named 'yaml'"], RefusedError, "n1: its Python lacks yaml; run ./setup.sh there"),
        (
            "failed",
            73,
            [],
            ["mkdir: /d: Read-only file system"],
            RunFolderError,
            "n1: /d: cannot be written: mkdir: /d: Re",
        ),
        (
            "failed",
            75,
            [],
            [],
            UnreachableError,
            "n1: shares /d with a host whose copy did not finish; run muster sync again",
        ),
        (
            "failed",
            78,
            [],
            ["jobs"],
            RefusedError,
            "n1: /d: holds a folder 'jobs' that is not Muster's; choose another",
        ),
        ("failed", 255, [], ["Permission denied (publickey)."], UnreachableError, "n1: it refused our key"),
    ],
)
def test_what_a_host_answers_becomes_one_clear_line(
    state: str, code: int, said: list[str], errors: list[str], expected: type[Exception] | None, words: str
) -> None:
    error = judge(N1, state, code, said, errors, to="/d", python="/py")
    assert type(error) is (expected or type(None))
    assert error is None or words in str(error)


def test_the_command_to_paste_quotes_its_folder() -> None:
    error = judge(N1, "brought", 127, [], [], to="/d $(id)", python="/py")
    assert "run '/d $(id)/setup.sh' there" in str(error)


def test_the_fingerprint_is_found_among_a_login_shell_s_chatter() -> None:
    assert found_code(["Welcome!", "{", '["a"]', FACTS, '{"x": 1}', ""]) == fingerprint()
    assert found_code(["Welcome!"]) is None


def test_hosts_that_fared_alike_are_one_line_and_the_worst_gives_the_code() -> None:
    outcomes = [SyncOutcome("n1", "brought"), SyncOutcome("n2", "brought"), SyncOutcome("n3", "shared")]
    assert report(outcomes, "/d", "abc") == [
        "n[1-2]: now have this code (abc) in /d",
        "n3: share /d and have this code (abc) already",
    ]
    assert code_of(outcomes) == 0
    refused, gone = SyncOutcome("n4", "failed", RefusedError("x")), SyncOutcome("n5", "failed", UnreachableError("x"))
    assert code_of([*outcomes, refused]) == 78
    assert code_of([refused, gone]) == 69


# Over a real ssh ------------------------------------------------------------------------------------------------------


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code as it is now: others may be editing the checkout."""
    root = tmp_path / "here"
    shutil.copytree(CODE_ROOT / PACKAGE, root / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CODE_ROOT / "setup.sh", root)
    monkeypatch.setattr(module, "CODE_ROOT", root)
    monkeypatch.setattr(module, "fingerprint", lambda: fingerprint(str(root)))
    return root


def bring(sshd: Sshd, to: Path, *names: str, python: str = sys.executable) -> dict[str, SyncOutcome]:
    """Sync with hosts that are all one server; where the one called `gone` should be, nothing listens."""
    ports = {"gone": closed_port()}
    hosts = tuple(Host(name, "", login=Login("127.0.0.1", port=ports.get(name, sshd.port))) for name in names)
    settings = SshSettings(options=sshd.options())
    return {outcome.host: outcome for outcome in sync(HostSet(hosts, "test"), settings, to=str(to), python=python)}


@pytest.mark.cluster
def test_hosts_that_share_a_folder_are_brought_the_code_once(sshd: Sshd, code: Path, tmp_path: Path) -> None:
    to = tmp_path / "with space and 'quote'" / "muster"
    outcomes = bring(sshd, to, "n1", "n2", "n3", "gone")
    assert sorted(outcomes[name].state for name in ("n1", "n2", "n3")) == ["brought", "shared", "shared"]
    assert isinstance(outcomes["gone"].error, UnreachableError)
    assert fingerprint(str(to)) == fingerprint(str(code))
    assert (to / "setup.sh").stat().st_mode & 0o111
    assert not list(to.glob(".muster-sync*"))


@pytest.mark.cluster
def test_what_was_deleted_here_goes_and_what_is_not_ours_stays(sshd: Sshd, code: Path, tmp_path: Path) -> None:
    to = tmp_path / "there"
    shutil.copytree(code, to)
    write(to, "muster/jobs/deleted_here.py", ".venv/bin/python", "data/set.bin")
    assert bring(sshd, to, "n1")["n1"].error is None
    assert not (to / "muster" / "jobs" / "deleted_here.py").exists()
    assert (to / ".venv" / "bin" / "python").exists()
    assert (to / "data" / "set.bin").exists()


@pytest.mark.cluster
def test_a_host_that_shares_our_own_folder_is_brought_nothing(sshd: Sshd, code: Path, tmp_path: Path) -> None:
    write(code, "jobs/__pycache__/kept.pyc")
    alias = tmp_path / "alias"
    alias.symlink_to(code)
    assert [outcome.state for outcome in bring(sshd, alias, "n1", "n2").values()] == ["shared", "shared"]
    assert (code / "jobs" / "__pycache__" / "kept.pyc").exists()
    assert not list(code.glob(".muster-sync*"))


@pytest.mark.cluster
def test_somebody_else_s_folders_are_not_touched(sshd: Sshd, code: Path, tmp_path: Path) -> None:
    to = tmp_path / "home"
    write(to, "jobs/my-own-script.sh")
    error = bring(sshd, to, "n1")["n1"].error
    assert "holds a folder 'jobs' that is not Muster's" in str(error)
    assert [path.name for path in to.rglob("*")] == ["jobs", "my-own-script.sh"]


@pytest.mark.cluster
def test_a_folder_that_cannot_be_made_is_named_with_the_reason(sshd: Sshd, code: Path, tmp_path: Path) -> None:
    write(tmp_path, "a-file")
    error = bring(sshd, tmp_path / "a-file" / "muster", "n1")["n1"].error
    assert isinstance(error, RunFolderError)
    assert "Not a directory" in str(error)


@pytest.mark.cluster
def test_the_command_reports_all_hosts_at_once(
    sshd: Sshd, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_SITE", str(tmp_path / "site.yaml"))
    options = [*sshd.options(), f"Port={sshd.port}", "HostName=127.0.0.1", f"HostKeyAlias=[127.0.0.1]:{sshd.port}"]
    (tmp_path / "site.yaml").write_text(json.dumps({"interpreter": "/no/python", "ssh": {"options": options}}))
    code = main(["sync", "-w", "n[1-2]", "--to", str(tmp_path / "there"), "--json"])
    said = capsys.readouterr()
    data: dict[str, Any] = json.loads(said.out)
    assert code == 78
    assert [host["state"] for host in data["hosts"]] == ["failed", "failed"]
    assert said.err.count("no interpreter /no/python; run") == 2


def test_without_hosts_the_options_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("{}\n")
    assert main(["sync", "--site", str(site)]) == 2
    assert "no hosts; give -H FILE" in capsys.readouterr().err
    assert main(["sync", "--site", str(site), "-w", "n1", "--to", "~/muster"]) == 2
    assert "--to: must be an absolute path on the hosts, got '~/muster'" in capsys.readouterr().err
