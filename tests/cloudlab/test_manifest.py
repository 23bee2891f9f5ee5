"""Manifests in the shapes that CloudLab writes: what a run takes from them, and how wrong ones are refused."""

import re
from pathlib import Path

import pytest

from muster.cloudlab.manifest import LanManifest, ManifestNode, survey_manifest
from muster.jobs.basics.errors import JobFileError, MusterError, UsageError
from muster.jobs.hosts.placement import Host, Login

FOLDER = Path(__file__).parent / "manifests"
GENI = "http://www.geni.net/resources/rspec/3"


def survey(name: str, *, user: str | None = None, lan: str | None = None, own: str = "grace") -> LanManifest:
    return survey_manifest(FOLDER / f"{name}.xml", user=user, lan=lan, environ={"USER": own})


def addresses(manifest: LanManifest) -> dict[str, str]:
    return {host.name: host.address for host in manifest.hosts}


def test_raw_pcs_as_the_portal_shows_them() -> None:
    """The portal's tab says type="request"; children stand in varying order, and node k has not address k."""
    found = survey("raw_pcs")
    assert (found.lan, found.network, found.warnings) == ("lan0", "10.10.1.0/24", ())
    assert addresses(found) == {
        "node0": "10.10.1.3",
        "node1": "10.10.1.1",
        "node2": "10.10.1.4",
        "node3": "10.10.1.2",
    }
    assert found.nodes[1] == ManifestNode(
        "node1",
        "10.10.1.1",
        "14:58:d0:58:00:b2",
        Login("pc102.cluster.example.net", "grace", 22),
        "203.0.113.11",
    )
    assert found.hosts[1] == Host("node1", "10.10.1.1", None, Login("pc102.cluster.example.net", "grace", 22))


def test_virtual_machines_share_a_host_name_and_differ_by_port() -> None:
    """Any namespace prefix; the password login is not ours; both interfaces have one component_id."""
    found = survey("vms")
    assert [(node.login.target, node.login.port) for node in found.nodes] == [
        ("pc7.cluster.example.net", 25010),
        ("pc7.cluster.example.net", 25011),
    ]
    assert addresses(found) == {"vm-0": "172.16.0.20", "vm-1": "172.16.0.21"}
    assert found.network == "172.16.0.0/16"


def test_a_node_that_serves_storage_and_a_data_set_hold_no_ranks() -> None:
    """There .1 is the NFS server's, which also has a second interface, on a link with the data set."""
    found = survey("nfs")
    assert addresses(found) == {"node1": "10.10.1.2", "node2": "10.10.1.3", "node3": "10.10.1.4"}
    assert found.lan == "nfsLan"
    assert found.warnings == (
        "nfs is skipped: it serves the shared folder",
        "dsnode is skipped: it holds a data set",
    )


def test_of_two_lans_that_join_all_nodes_the_faster_is_taken() -> None:
    """Its interfaces come first in one node and second in the next, with an IPv6 address before the IPv4 one."""
    found = survey("two_lans")
    assert found.lan == "fast-lan"
    assert addresses(found) == {"n0": "192.168.2.1", "n1": "192.168.2.2", "n2": "192.168.2.3"}
    assert [node.mac for node in found.nodes] == ["02:bb:00:00:00:00", "02:bb:00:00:00:01", "02:bb:00:00:00:02"]
    assert addresses(survey("two_lans", lan="slow-lan"))["n2"] == "192.168.1.3"


def test_the_user_is_the_one_given_else_the_own_one_else_the_only_one() -> None:
    assert survey("raw_pcs", user="ada").hosts[0].login == Login("pc101.cluster.example.net", "ada", 22)
    assert survey("raw_pcs", own="edsger").hosts[0].login == Login("pc101.cluster.example.net", "edsger", 22)
    assert survey("two_lans", own="nobody").hosts[0].login == Login("pc0.cluster.example.net", "ada", 22)
    with pytest.raises(
        UsageError, match="3 users, and none of them is root: ada, grace, edsger; name yours with --login"
    ):
        survey("raw_pcs", own="root")
    with pytest.raises(UsageError, match="3 users, and none is chosen: ada"):
        survey("raw_pcs", own="")


def test_a_member_who_joined_later_is_tried_and_named() -> None:
    found = survey("vms", user="barbara")
    assert [node.login for node in found.nodes] == [
        Login("pc7.cluster.example.net", "barbara", 25010),
        Login("pc7.cluster.example.net", "barbara", 25011),
    ]
    assert found.warnings == ("barbara has no login on vm-0, vm-1 in the manifest; trying it anyway",)


# --- small manifests, made for one question each ---------------------------------------------------------------------


def node(name: str, *interfaces: tuple[str, str], login: bool = True, kind: str = "raw-pc") -> str:
    logins = f'<services><login hostname="{name}.example.net" port="22" username="ada"/></services>' if login else ""
    ports = "".join(
        f'<interface client_id="{name}:{link}"><ip address="{address}" netmask="255.255.255.0"/></interface>'
        for link, address in interfaces
    )
    return f'<node client_id="{name}"><sliver_type name="{kind}"/>{ports}{logins}</node>'


def link(name: str, *members: str, capacity: int | None = None) -> str:
    references = "".join(f'<interface_ref client_id="{member}:{name}"/>' for member in members)
    shaped = "" if capacity is None else f'<property source_id="x" dest_id="{name}" capacity="{capacity}"/>'
    return f'<link client_id="{name}">{references}{shaped}</link>'


def small(folder: Path, *parts: str, kind: str = "manifest") -> Path:
    path = folder / "m.xml"
    path.write_text(f'<rspec xmlns="{GENI}" type="{kind}">{"".join(parts)}</rspec>', encoding="utf-8")
    return path


def test_a_single_node_needs_no_lan(tmp_path: Path) -> None:
    assert survey_manifest(small(tmp_path, node("solo"))).hosts == [
        Host("solo", "", None, Login("solo.example.net", "ada", 22))
    ]


def test_nodes_off_the_chosen_lan_are_left_out_and_named(tmp_path: Path) -> None:
    nodes = [node("a", ("l", "10.0.0.1")), node("b", ("l", "10.0.0.2")), node("c"), node("d", ("l", "0.0.0.0"))]
    found = survey_manifest(small(tmp_path, *nodes, link("l", "a", "b", "c", "d")))
    assert [host.name for host in found.hosts] == ["a", "b"]
    assert found.warnings == (
        "c is skipped: it has no address on LAN l",
        "d is skipped: it has no address on LAN l",
    )


def test_interfaces_of_one_name_are_told_apart_by_their_sliver(tmp_path: Path) -> None:
    def twin(name: str, address: str) -> str:
        return (
            f'<node client_id="{name}"><interface client_id="eth1" sliver_id="s-{name}"><ip address="{address}"/>'
            f'</interface><services><login hostname="{name}.example.net" username="ada"/></services></node>'
        )

    joined = (
        '<link client_id="l"><interface_ref client_id="eth1" sliver_id="s-b"/>'
        '<interface_ref client_id="eth1" sliver_id="s-a"/></link>'
    )
    found = survey_manifest(small(tmp_path, twin("a", "10.0.0.1"), twin("b", "10.0.0.2"), joined))
    assert addresses(found) == {"a": "10.0.0.1", "b": "10.0.0.2"}
    assert found.network == ""


def pair(*links: str) -> list[str]:
    return [node("a", ("l", "10.0.0.1"), ("k", "10.0.1.1")), node("b", ("l", "10.0.0.2"), ("k", "10.0.1.2")), *links]


@pytest.mark.parametrize(
    ("parts", "lan", "problem"),
    [
        (pair(), None, "no LAN joins its 2 nodes, and CloudLab forbids their traffic on the control network; add"),
        (
            pair(link("l", "a", "b"), link("k", "a", "b")),
            None,
            "2 LANs join all nodes: l (2 nodes), k (2 nodes); choose one with --lan NAME",
        ),
        (
            pair(link("l", "a", "b", capacity=10_000_000), link("k", "a", "b", capacity=10_000_000)),
            None,
            "2 LANs join all nodes: l (2 nodes, 10 Gbit/s), k (2 nodes, 10 Gbit/s); choose one with --lan NAME",
        ),
        (
            pair(link("l", "a", "b", capacity=10**6), link("k", "a", "b")),
            None,
            "2 LANs join all nodes: l (2 nodes, 1 Gbit/s), k (2 nodes); choose one with --lan NAME",
        ),
        (pair(link("l", "a"), link("k", "b")), None, "no LAN joins all 2 nodes; choose one of l (1 node), k (1 node)"),
        (pair(link("l", "a", "b")), "l2", "--lan: no LAN 'l2' has nodes with addresses; did you mean 'l'?"),
        (pair(link("l", "a", "b")), "zebra", "--lan: no LAN 'zebra' has nodes with addresses; known LANs: l (2 nodes)"),
        (pair(), "l", "--lan: no LAN 'l' has nodes with addresses; known LANs: none"),
    ],
)
def test_a_lan_that_is_not_clear_is_asked_for(tmp_path: Path, parts: list[str], lan: str | None, problem: str) -> None:
    path = small(tmp_path, *parts)
    with pytest.raises(UsageError, match=re.escape(f"{path}: {problem}")):
        survey_manifest(path, lan=lan)


ENTITIES = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
BOMB = f'<?xml version="1.0"?><!DOCTYPE r [<!ENTITY e0 "boom">{ENTITIES}]><rspec type="manifest">&e9;</rspec>'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: not XML: no element found"),
        ("node0 slots=4\n", "1: not XML: syntax error"),
        ("<rspec>\n<node>\n</rspec>", "3: not XML: mismatched tag"),
        ("\n\n<?xml version='1.0'?>\n<rspec>\n<node></rspec>", "5: not XML: mismatched tag"),
        ("<!DOCTYPE html>\n<html></html>", " has a DOCTYPE, which no manifest has (is it a saved web"),
        (BOMB, " has a DOCTYPE, which no manifest has (is it a saved web"),
        ("<manifest/>", " is <manifest>, expected <rspec>"),
        ("<rspec type='manifest'/>", " has no nodes"),
        (f"<rspec type='request'>{node('a', login=False)}</rspec>", " is a request, not a manifest: no node has"),
        (f"<rspec type='manifest'>{node('a', login=False)}</rspec>", " is a manifest of nodes that are not ready: no"),
        (f"<rspec>{node('a')}{node('a')}</rspec>", " has two nodes named a"),
        ("<rspec><node/></rspec>", " node '': '' is not a host name"),
        (
            "<rspec><node client_id='a'><services><login hostname='h' port='x' username='u'/></services></node>"
            "</rspec>",
            " node 'a': a login has port 'x'; expected 1 to 65535",
        ),
        (
            "<rspec><node client_id='a'><services><login hostname='-oX=y' username='u'/></services></node></rspec>",
            " node 'a': '-oX=y' is not a host name",
        ),
        (
            "<rspec><node client_id='a'><services><login hostname='h' username='a b'/></services></node></rspec>",
            " node 'a': 'a b' is not a user name",
        ),
        (
            f"<rspec>{node('a', kind='emulab-blockstore')}</rspec>",
            " has no node that can run ranks: a is skipped: it holds a data set",
        ),
    ],
)
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "m.xml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobFileError) as caught:
        survey_manifest(path)
    assert str(caught.value).startswith(f"{path}:{problem}")
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_not_there_says_where_to_find_one(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="no such file; expected a manifest; copy the Manifest tab"):
        survey_manifest(tmp_path / "m.xml")


def test_a_user_who_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="'a b' is not a user name"):
        survey("vms", user="a b")


@pytest.mark.parametrize("name", ["raw_pcs", "vms", "nfs", "two_lans"])
def test_any_cut_through_a_manifest_is_read_or_refused_in_our_words(tmp_path: Path, name: str) -> None:
    text = (FOLDER / f"{name}.xml").read_text(encoding="utf-8")
    path = tmp_path / "m.xml"
    for end in range(0, len(text), 97):
        path.write_text(text[:end] + text[end + 61 :], encoding="utf-8")
        try:
            survey_manifest(path, user="ada")
        except MusterError as error:
            assert str(error).startswith(str(path))  # noqa: PT017
