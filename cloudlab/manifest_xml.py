"""Parse a manifest's XML into records. Children may have any order and prefix, so they are found by name."""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree as ET

from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.basics.hostnames import MAX_PORT, check_name
from muster.jobs.hosts.placement import Login

WHERE: Final = "copy the Manifest tab of the experiment's page, or run geni-get manifest on a node"
SERVES_STORAGE: Final = "nfs-server"  # part of the storage node's command in the NFS profiles of Muster and CloudLab


@dataclass(frozen=True)
class Interface:
    """An interface of a node; `address` and `mac` (1a:2b:...) are "" if missing."""

    address: str
    netmask: str
    mac: str


@dataclass(frozen=True)
class XmlNode:
    """A node in the manifest, with one login for each member of the project."""

    name: str
    kind: str  # raw-pc, emulab-xen, emulab-blockstore, ...
    interfaces: Mapping[str, Interface]  # names by which links refer to it: client_id and sliver_id
    logins: tuple[Login, ...]
    control_address: str
    serves_storage: bool


@dataclass(frozen=True)
class Lan:
    """A link.

    `members` maps names of nodes to their interfaces with an address; `kbit_per_s` is None if there is no limit.
    """

    name: str
    members: Mapping[str, Interface]
    kbit_per_s: int | None


def parse(text: str, name: str) -> tuple[list[XmlNode], list[Lan]]:
    """Parse the text of a manifest; `name` is its name in messages.

    Raises:
        JobFileError: if the text is not a manifest.
    """
    root = _root(text, name)
    nodes = [_node(each, name) for each in _children(root, "node")]
    if not nodes:
        raise JobFileError(f"{name}: has no nodes; {WHERE}")
    twice = [node for node, count in Counter(node.name for node in nodes).items() if count > 1]
    if twice:
        raise JobFileError(f"{name}: has two nodes named {twice[0]}; {WHERE}")
    if not any(node.logins for node in nodes):
        # A request, unlike a manifest, has no logins. The attribute `type` cannot be used, because the Manifest tab
        # shows manifests with type "request", too.
        kind = (
            "a manifest of nodes that are not ready" if root.get("type") == "manifest" else "a request, not a manifest"
        )
        raise JobFileError(f"{name}: is {kind}: no node has a login by ssh key; {WHERE}")
    owners: dict[str, tuple[str, Interface]] = {}
    for node in nodes:
        for key, interface in node.interfaces.items():
            owners.setdefault(key, (node.name, interface))
    return nodes, [_lan(link, owners) for link in _children(root, "link")]


class _SafeTreeBuilder(ET.TreeBuilder):
    """A tree builder that refuses a DOCTYPE, because a few lines of entities in it can expand to gigabytes."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise JobFileError("has a DOCTYPE, which no manifest has (is it a saved web page?);")


def _root(text: str, name: str) -> ET.Element:
    parser = ET.XMLParser(target=_SafeTreeBuilder())
    try:
        # Pasted text may start with an empty line, which XML forbids before its declaration.
        parser.feed(re.sub(r"\A\s*<\?xml[^>]*\?>", lambda found: "\n" * found.group().count("\n"), text))
        root: ET.Element = parser.close()
    except ET.ParseError as error:
        reason = str(error).partition(":")[0]
        raise JobFileError(f"{name}:{error.position[0]}: not XML: {reason}; {WHERE}") from error
    except JobFileError as error:
        raise JobFileError(f"{name}: {error} {WHERE}") from error
    if _tag(root) != "rspec":
        raise JobFileError(f"{name}: is <{_tag(root)}>, expected <rspec>; {WHERE}")
    return root


def _node(element: ET.Element, name: str) -> XmlNode:
    node = element.get("client_id", "")
    services = [child for each in _children(element, "services") for child in each]
    try:
        check_name(node)
        logins = tuple(_login(each) for each in services if _tag(each) == "login" and _by_key(each))
    except UsageError as error:
        raise JobFileError(f"{name}: node {node!r}: {error}") from error
    interfaces: dict[str, Interface] = {}
    for each in _children(element, "interface"):
        interface = _interface(each)
        interfaces |= {each.get(key, ""): interface for key in ("client_id", "sliver_id") if each.get(key)}
    commands = [each.get("command", "") for each in services if _tag(each) == "execute"]
    return XmlNode(
        node,
        _attribute(element, "sliver_type", "name"),
        interfaces,
        logins,
        _attribute(element, "host", "ipv4"),
        any(SERVES_STORAGE in command for command in commands),
    )


def _login(element: ET.Element) -> Login:
    port = element.get("port", "22")
    if not (port.isascii() and port.isdecimal() and len(port) < 10 and 1 <= int(port) <= MAX_PORT):
        raise UsageError(f"a login has port {port!r}; expected 1 to {MAX_PORT}")
    return Login(element.get("hostname", ""), element.get("username", ""), int(port))


def _by_key(element: ET.Element) -> bool:
    return element.get("authentication", "ssh-keys") == "ssh-keys"


def _interface(element: ET.Element) -> Interface:
    digits = re.sub(r"[^0-9a-f]", "", element.get("mac_address", "").lower())
    mac = ":".join(re.findall("..", digits)) if len(digits) == 12 else ""
    usable = [ip for ip in _children(element, "ip") if _is_usable(ip.get("address", ""))]
    usable.sort(key=lambda ip: ip.get("type", "ipv4") != "ipv4")  # IPv4 first
    if not usable:
        return Interface("", "", mac)
    return Interface(usable[0].get("address", ""), usable[0].get("netmask", ""), mac)


def _is_usable(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_unspecified  # the address 0.0.0.0 means that there is none
    except ValueError:
        return False


def _lan(link: ET.Element, owners: Mapping[str, tuple[str, Interface]]) -> Lan:
    members: dict[str, Interface] = {}
    for reference in _children(link, "interface_ref"):
        # The attribute component_id is not used, because virtual machines on one host share it.
        keys = (reference.get("sliver_id", ""), reference.get("client_id", ""))
        owner = next((owners[key] for key in keys if key in owners), None)
        if owner is not None and owner[1].address:
            members.setdefault(*owner)
    capacities = [each.get("capacity", "") for each in _children(link, "property")]
    known = [int(each) for each in capacities if each.isascii() and each.isdecimal() and len(each) < 19]
    return Lan(link.get("client_id", ""), members, min(known) if known else None)


def _tag(element: ET.Element) -> str:
    """Return an element's name without its namespace; "" for a comment."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _children(element: ET.Element, tag: str) -> Iterator[ET.Element]:
    return (child for child in element if _tag(child) == tag)


def _attribute(element: ET.Element, tag: str, name: str) -> str:
    """Return an attribute of the first child element named `tag`, or ""."""
    return next((child.get(name, "") for child in _children(element, tag)), "")
