"""Read a CloudLab (GENI) manifest: the nodes, their ssh logins, and their addresses on the experiment's LAN.

<node client_id="node0">              the host's name
  <interface client_id="node0:if1">   joined to a LAN by the <link> that refers to it
    <ip address="10.10.1.1"/>         the node's address on the LAN
  <services> <login .../>             one per member of the project, for ssh over the control network
"""

import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.cloudlab import manifest_xml
from muster.cloudlab.manifest_xml import Interface, Lan, XmlNode
from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.basics.hostnames import check_user
from muster.jobs.basics.reading import MOST_BYTES
from muster.jobs.basics.words import counted, did_you_mean
from muster.jobs.hosts.hosts import read_text
from muster.jobs.hosts.placement import Host, Login

# Kinds of nodes that cannot run ranks: they hold a remote data set, shape links, or join links.
HELPERS: Final = {"emulab-blockstore": "holds a data set", "delay": "shapes a link"}


@dataclass(frozen=True)
class ManifestNode:
    """One node that can run ranks; `mac` (1a:2b:...) identifies its interface, whose kernel name is unknown."""

    name: str
    address: str
    mac: str
    login: Login
    control_address: str

    @property
    def host(self) -> Host:
        """The node as a host of a run."""
        return Host(self.name, self.address, None, self.login)


@dataclass(frozen=True)
class LanManifest:
    """The nodes of a manifest on one LAN; `warnings` has one text per skipped node, with the reason."""

    nodes: tuple[ManifestNode, ...]
    lan: str  # "" for a single node without a LAN
    network: str  # network, such as 10.10.1.0/24; "" if the netmasks differ
    warnings: tuple[str, ...]

    @property
    def hosts(self) -> list[Host]:
        """The nodes as hosts, in the manifest's order."""
        return [node.host for node in self.nodes]


def survey_manifest(
    path: Path, *, user: str | None = None, lan: str | None = None, environ: Mapping[str, str] = os.environ
) -> LanManifest:
    """Read one user's logins and one LAN's addresses from a manifest.

    The default user is USER of the environment if that user has logins, else the only user with logins. The default LAN
    is the fastest one that joins all nodes, or else the only LAN.

    Raises:
        JobFileError: if the file cannot be read, or is not a manifest.
        UsageError: if the user or LAN is ambiguous, or there is no LAN of that name.
    """
    nodes, lans = manifest_xml.parse(read_text(path, f"a manifest; {manifest_xml.WHERE}", MOST_BYTES), str(path))
    try:
        return survey(nodes, lans, user=user, lan=lan, environ=environ)
    except (UsageError, JobFileError) as error:
        raise type(error)(f"{path}: {error}") from error


def survey(
    nodes: Sequence[XmlNode], lans: Sequence[Lan], *, user: str | None, lan: str | None, environ: Mapping[str, str]
) -> LanManifest:
    """Choose nodes, logins and addresses of a parsed manifest. Pure.

    Raises:
        JobFileError: if no node can run ranks.
        UsageError: if the user or LAN is ambiguous, or there is no LAN of that name.
    """
    computers, warnings = _computers(nodes)
    login_user = _user(computers, environ) if user is None else check_user(user)
    chosen = _choose_lan(computers, lans, lan)
    found = []
    for node in computers:
        at = chosen.members.get(node.name) if chosen else Interface("", "", "")
        if chosen and at is None:
            warnings.append(f"{node.name} is skipped: it has no address on LAN {chosen.name}")
        if at is not None:
            found.append(ManifestNode(node.name, at.address, at.mac, _login_of(node, login_user), node.control_address))
    strangers = [node.name for node in computers if all(login.user != login_user for login in node.logins)]
    if strangers:
        warnings.append(f"{login_user} has no login on {', '.join(strangers)} in the manifest; trying it anyway")
    network = _network(chosen.members.values()) if chosen else ""
    return LanManifest(tuple(found), chosen.name if chosen else "", network, tuple(warnings))


def _computers(nodes: Sequence[XmlNode]) -> tuple[list[XmlNode], list[str]]:
    """Return the nodes that can run ranks, and a warning for each other node."""
    able = [node for node in nodes if node.kind not in HELPERS and node.logins]
    computers = [node for node in able if not node.serves_storage] or able
    kept = {node.name for node in computers}
    warnings = []
    for node in nodes:
        if node.name not in kept:
            reason = HELPERS.get(node.kind) or (
                "serves the shared folder" if node.logins else "has no login by ssh key"
            )
            warnings.append(f"{node.name} is skipped: it {reason}")
    if not computers:
        raise JobFileError(f"has no node that can run ranks: {'; '.join(warnings)}")
    return computers, warnings


def _user(nodes: Sequence[XmlNode], environ: Mapping[str, str]) -> str:
    users = list(dict.fromkeys(login.user or "" for node in nodes for login in node.logins))
    own = environ.get("USER") or environ.get("LOGNAME") or ""
    if own in users:
        return own
    if len(users) == 1:
        return users[0]
    listed = ", ".join(users[:20]) + (", ..." if len(users) > 20 else "")
    whose = f"none of them is {own}" if own else "none is chosen"
    raise UsageError(f"has logins of {len(users)} users, and {whose}: {listed}; name yours with --login USER")


def _login_of(node: XmlNode, user: str) -> Login:
    """Return a user's login on a node. Members who joined later are not in the manifest, but may log in."""
    own = next((login for login in node.logins if login.user == user), node.logins[0])
    return Login(own.target, user, own.port)


def _choose_lan(nodes: Sequence[XmlNode], lans: Sequence[Lan], wanted: str | None) -> Lan | None:
    """Return the wanted LAN, or the one that joins all nodes, or the only LAN; None for a single node without a LAN."""
    names = {node.name for node in nodes}
    lans = [lan for lan in lans if names & set(lan.members)]
    if wanted is not None:
        return _named(lans, wanted)
    joining = [lan for lan in lans if names <= set(lan.members)]
    if len(joining) > 1:
        return _fastest(joining)
    if joining or len(lans) == 1:
        return (joining or lans)[0]
    if lans:
        raise UsageError(f"no LAN joins all {len(names)} nodes; choose one of {_spell(lans)} with --lan NAME")
    if len(names) > 1:
        raise UsageError(
            f"no LAN joins its {len(names)} nodes, and CloudLab forbids their traffic on the control network; "
            "add a LAN to the profile"
        )
    return None


def _named(lans: Sequence[Lan], wanted: str) -> Lan:
    names = [lan.name for lan in lans]
    if wanted in names:
        return lans[names.index(wanted)]
    hint = did_you_mean(wanted, names) or f"; known LANs: {_spell(lans)}"
    raise UsageError(f"--lan: no LAN {wanted!r} has nodes with addresses{hint}")


def _fastest(lans: Sequence[Lan]) -> Lan:
    # A LAN without a limit has the speed of its hardware, which the manifest does not show.
    speeds = [lan.kbit_per_s or 0 for lan in lans]
    if 0 in speeds or speeds.count(max(speeds)) > 1:
        raise UsageError(f"{len(lans)} LANs join all nodes: {_spell(lans)}; choose one with --lan NAME")
    return lans[speeds.index(max(speeds))]


def _spell(lans: Sequence[Lan]) -> str:
    def speed(lan: Lan) -> str:
        return "" if lan.kbit_per_s is None else f", {lan.kbit_per_s / 1e6:g} Gbit/s"

    return ", ".join(f"{lan.name} ({counted(len(lan.members), 'node')}{speed(lan)})" for lan in lans) or "none"


def _network(interfaces: Iterable[Interface]) -> str:
    """Return the network of all interfaces, such as 10.10.1.0/24; "" if they differ."""
    found = set()
    for each in interfaces:
        try:
            found.add(str(ipaddress.ip_network(f"{each.address}/{each.netmask}", strict=False)))
        except ValueError:
            return ""
    return found.pop() if len(found) == 1 else ""
