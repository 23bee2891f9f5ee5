"""`muster hosts`: lists there and back, manifests as hosts files, and what a user sees of mistakes."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.jobs.hosts.hosts import read_hostfile

MANIFESTS = Path(__file__).resolve().parents[1] / "cloudlab" / "manifests"
Hosts = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hosts(in_process: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Return a function that runs `muster hosts ...`: (code, out, err)."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return in_process("hosts", *arguments)

    return run


def test_expand_prints_one_name_a_line(hosts: Hosts) -> None:
    assert hosts("expand", "n[08-10],login") == (0, "n08\nn09\nn10\nlogin\n", "")
    assert json.loads(hosts("expand", "n[1-2]", "n[2-3]", "--json")[1]) == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    "words", [["n1,n2,n3"], ["n1", "n2", "n3"], ["n1,", "n2", ",n3"], ["n1 n2\nn3"], ["n[1-2]", "n3"], ["n[1,", "2-3]"]]
)
def test_fold_takes_names_however_they_are_divided(hosts: Hosts, words: list[str]) -> None:
    assert hosts("fold", *words) == (0, "n[1-3]\n", "")


def test_a_dash_reads_standard_input(hosts: Hosts) -> None:
    assert hosts("fold", "-", stdin="n1\nn2, n3\n\n")[1] == "n[1-3]\n"
    assert hosts("expand", "-", stdin="n[1-2]")[1] == "n1\nn2\n"
    assert json.loads(hosts("fold", "-", "--json", stdin="a b")[1]) == "a,b"


@pytest.mark.parametrize("name", ["raw_pcs", "vms", "nfs", "two_lans"])
def test_from_manifest_prints_a_hosts_file_with_the_same_hosts(hosts: Hosts, tmp_path: Path, name: str) -> None:
    from muster.cloudlab.manifest import survey_manifest

    path = MANIFESTS / f"{name}.xml"
    code, out, _ = hosts("from-manifest", str(path), "--user", "ada")
    assert code == 0
    file = tmp_path / "hosts"
    file.write_text(out, encoding="utf-8")
    assert read_hostfile(file) == survey_manifest(path, user="ada").hosts


def test_from_manifest_says_which_lan_and_what_is_left_out(hosts: Hosts) -> None:
    _, out, err = hosts("from-manifest", str(MANIFESTS / "nfs.xml"), "--login", "ada")
    assert out.splitlines()[:2] == [
        f"# {MANIFESTS / 'nfs.xml'}: LAN nfsLan, network 10.10.1.0/24",
        "node1 address=10.10.1.2 ssh=pc102.cluster.example.net port=22 user=ada",
    ]
    assert err == (
        "muster: nfs is skipped: it serves the shared folder\nmuster: dsnode is skipped: it holds a data set\n"
    )
    record = json.loads(hosts("from-manifest", str(MANIFESTS / "vms.xml"), "--user", "ada", "--json")[1])
    assert (record["lan"], record["network"]) == ("link-0", "172.16.0.0/16")
    assert record["hosts"][1] == {
        "name": "vm-1",
        "address": "172.16.0.21",
        "slots": None,
        "login": {"target": "pc7.cluster.example.net", "user": "ada", "port": 25011},
        "mac": "02:65:b6:20:5a:1d",
        "control_address": "203.0.113.61",
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["expand", "n[3-1]"], 2, "node list 'n[3-1]': [3-1] is reversed; write [1-3]"),
        (["expand", "a,,b"], 2, "node list 'a,,b': no name before character 3; remove the comma"),
        (["fold", "-"], 2, "node list: is empty; expected names such as n01,n02 or n[01-16]"),
        (["from-manifest", "none"], 65, "none: no such file; expected a manifest; copy the Manifest tab of the"),
        (["from-manifest", str(MANIFESTS / "two_lans.xml"), "--lan", "fast"], 2, "did you mean 'fast-lan'?"),
        (["from-manifest", str(MANIFESTS / "vms.xml"), "--user=-x"], 2, "'-x' is not a user name"),
    ],
)
def test_mistakes_are_one_line_with_their_code(hosts: Hosts, arguments: list[str], code: int, message: str) -> None:
    found, out, err = hosts(*arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_a_subcommand_help_is_named(hosts: Hosts) -> None:
    code, out, err = hosts()
    assert (code, out) == (2, "")
    assert "muster hosts --help" in err


def test_lists_are_read_without_torch_yaml_or_pydantic() -> None:
    """A list is expanded inside other people's loops: it costs little more than Python itself."""
    script = (
        "import sys\nfrom launch.cli import main\nmain(['hosts', 'expand', 'n[1-2]'])\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'torch', 'yaml', 'pydantic', 'numpy', 'rich'})"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.splitlines() == ["n1", "n2", ""]
