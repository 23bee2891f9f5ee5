"""The RSpec: its committed default, what each wish changes, and that a manifest made of it gives the hosts back."""

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from muster.cloudlab.manifest import survey_manifest
from muster.cloudlab.rspec import BOOT, MAX_NODES, RspecSpec, rate, rspec_text
from muster.jobs.basics.errors import UsageError
from muster.jobs.hosts.placement import Host, Login

REPOSITORY = Path(__file__).resolve().parents[2]
NS = {"g": "http://www.geni.net/resources/rspec/3", "e": "http://www.protogeni.net/resources/rspec/ext/emulab/1"}


def tree(spec: RspecSpec) -> ET.Element:
    return ET.fromstring(rspec_text(spec))


def names(root: ET.Element) -> list[str | None]:
    return [node.get("client_id") for node in root.findall("g:node", NS)]


def commands(root: ET.Element) -> list[str]:
    return [each.get("command", "") for each in root.findall("g:node/g:services/g:execute", NS)]


def test_the_profile_at_the_root_is_the_default() -> None:
    """CloudLab reads that file; `muster cloudlab rspec -o profile.rspec` writes it anew."""
    assert (REPOSITORY / "profile.rspec").read_text(encoding="utf-8") == rspec_text(RspecSpec())


def test_the_default_asks_for_four_nodes_on_one_lan_that_run_the_boot_script() -> None:
    root = tree(RspecSpec())
    assert root.get("type") == "request"
    assert names(root) == ["node0", "node1", "node2", "node3"]
    assert [ip.get("address") for ip in root.findall("g:node/g:interface/g:ip", NS)] == [
        "10.10.1.1",
        "10.10.1.2",
        "10.10.1.3",
        "10.10.1.4",
    ]
    assert [each.get("name") for each in root.findall("g:node/g:hardware_type", NS)] == ["c220g5"] * 4
    assert commands(root) == [f"sudo bash {BOOT}"] * 4
    (lan,) = root.findall("g:link", NS)
    interfaces = {each.get("client_id") for each in root.findall("g:node/g:interface", NS)}
    assert {each.get("client_id") for each in lan.findall("g:interface_ref", NS)} == interfaces
    assert [each.attrib for each in lan.findall("g:property", NS)] == [
        {"source_id": f"node{k}:if1", "dest_id": "lan", "capacity": "10000000"} for k in range(4)
    ]


def test_the_boot_script_is_where_the_command_says() -> None:
    path = REPOSITORY / Path(BOOT).relative_to("/local/repository")
    assert path.stat().st_mode & 0o111


def test_any_speed_and_any_hardware_are_left_open() -> None:
    text = rspec_text(RspecSpec(kbit_per_s=None, hardware=""))
    assert "capacity" not in text
    assert "hardware_type" not in text


def test_an_nfs_node_shares_a_folder_that_the_others_mount() -> None:
    root = tree(RspecSpec(nodes=2, nfs_gb=200))
    assert names(root) == ["node0", "node1", "nfs"]
    assert commands(root) == [
        f"sudo bash {BOOT} nfs-client 10.10.1.254",
        f"sudo bash {BOOT} nfs-client 10.10.1.254",
        f"sudo bash {BOOT} nfs-server 10.10.1.0/24",
    ]
    (store,) = root.findall("g:node/e:blockstore", NS)
    assert (store.get("mountpoint"), store.get("size"), store.get("dataset")) == ("/nfs", "200GB", None)
    assert len(root.findall("g:link/g:interface_ref", NS)) == 3


def test_a_node_by_itself_has_no_lan() -> None:
    root = tree(RspecSpec(nodes=1))
    assert (root.findall("g:link", NS), root.findall(".//g:interface", NS)) == ([], [])


def test_a_repository_is_cloned_once_where_cloudlab_does_not() -> None:
    (command,) = commands(tree(RspecSpec(nodes=1, repository="https://example.org/a?b=1&c='x'")))
    words = shlex.split(command)
    assert words[:4] == ["test", "-e", BOOT, "||"]
    assert "https://example.org/a?b=1&c='x'" in words


def test_values_of_the_users_stay_values_in_xml() -> None:
    spec = RspecSpec(image='urn:publicid:IDN+x+image+a"b<c>&d', repository="https://example.org/<&\">'")
    root = tree(spec)
    assert {each.get("name") for each in root.findall(".//g:disk_image", NS)} == {spec.image}


def test_what_is_asked_for_comes_back_from_the_manifest(tmp_path: Path) -> None:
    """Give each node of the request a login, as CloudLab does: the storage node holds no ranks."""
    text = rspec_text(RspecSpec(nodes=3, nfs_gb=50))
    for name in ("node0", "node1", "node2", "nfs"):
        login = f'<login authentication="ssh-keys" hostname="{name}.example.net" port="22" username="ada"/>'
        text = re.sub(rf'(client_id="{name}".*?<services>)', rf"\1{login}", text, count=1, flags=re.DOTALL)
    path = tmp_path / "m.xml"
    path.write_text(text, encoding="utf-8")
    assert survey_manifest(path).hosts == [
        Host(f"node{k}", f"10.10.1.{k + 1}", None, Login(f"node{k}.example.net", "ada", 22)) for k in range(3)
    ]


@pytest.mark.parametrize(
    ("text", "kbit_per_s"), [("10gbit", 10**7), ("2.5Gbit", 2_500_000), ("500mbit", 500_000), ("64kbit", 64)]
)
def test_rates_are_in_kbit_per_s(text: str, kbit_per_s: int) -> None:
    assert rate(text) == kbit_per_s


@pytest.mark.parametrize("text", ["", "10", "fast", "0gbit", "-1gbit", "10 gbit", "10gb", "²gbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a rate; expected one such as 10gbit"):
        rate(text)


@pytest.mark.parametrize(
    ("wishes", "problem"),
    [
        ({"nodes": 0}, "--nodes: must be from 1 to 250, got 0"),
        ({"nodes": MAX_NODES + 1}, "--nodes: must be from 1 to 250, got 251"),
        ({"hardware": 'x"/>'}, "is not a hardware type"),
        ({"image": "UBUNTU22-64-STD"}, "'UBUNTU22-64-STD' is not an image URN"),
        ({"lan": "my lan"}, "'my lan' is not a valid name"),
        ({"nfs_gb": -1}, "--nfs: must be a size in GB, got -1"),
        ({"repository": "git@example.org:me/x"}, "--repository: must be an https:// URL"),
    ],
)
def test_wishes_that_cannot_be_are_refused(wishes: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        RspecSpec(**wishes)  # type: ignore[arg-type]
