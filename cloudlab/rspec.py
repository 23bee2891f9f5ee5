"""The RSpec that requests a run's nodes from CloudLab. The function is pure: equal requests give equal text.

    node0 ... node3   raw PCs, 10.10.1.1 to .4 on one LAN; each runs cloudlab/boot.sh when it boots
    nfs               with `nfs_gb`: 10.10.1.254 on the same LAN; exports /nfs, which the others mount

Names and addresses are set here, so that the boot script need not look them up.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import counted

MAX_NODES: Final = 250
HARDWARE: Final = "c220g5"
IMAGE: Final = "urn:publicid:IDN+emulab.net+image+emulab-ops//UBUNTU22-64-STD"
LAN: Final = "lan"
NETWORK: Final = "10.10.1"
NETMASK: Final = "255.255.255.0"
NFS_NODE: Final = "nfs"
NFS_ADDRESS: Final = f"{NETWORK}.254"
SHARED: Final = "/nfs"
REPOSITORY: Final = "/local/repository"  # folder into which CloudLab clones the profile's repository
BOOT: Final = f"{REPOSITORY}/cloudlab/boot.sh"

GENI: Final = "http://www.geni.net/resources/rspec/3"
EMULAB: Final = "http://www.protogeni.net/resources/rspec/ext/emulab/1"
TOUR: Final = "http://www.protogeni.net/resources/rspec/ext/apt-tour/1"
XSI: Final = "http://www.w3.org/2001/XMLSchema-instance"

INSTRUCTIONS: Final = (
    "When all nodes have started, save the text of the Manifest tab as m.xml on your machine, then: "
    "muster run jobs/examples/hello.yaml --on ssh --manifest m.xml --site cloudlab.yaml (see cloudlab/README.md)."
)

RATES: Final = {"kbit": 1, "mbit": 10**3, "gbit": 10**6}
_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)")
_WORD: Final = re.compile(r"[A-Za-z][\w-]*")
_URN: Final = re.compile(r"urn:publicid:IDN\+\S+")


@dataclass(frozen=True)
class RspecSpec:
    """The settings of a request. If `kbit_per_s` is None, the LAN has the speed of its hardware."""

    nodes: int = 4
    hardware: str = HARDWARE  # hardware type; "" for any free hardware
    image: str = IMAGE
    lan: str = LAN
    kbit_per_s: int | None = 10_000_000
    nfs_gb: int = 0  # size of the shared folder in GB; 0: no shared folder
    repository: str | None = None  # repository that is cloned at boot if the profile was not made from a repository

    def __post_init__(self) -> None:
        """Check that CloudLab and later runs can handle the values.

        Raises:
            UsageError: if a value is out of range or not a valid name.
        """
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"--nodes: must be from 1 to {MAX_NODES}, got {self.nodes}")
        if self.hardware and not _WORD.fullmatch(self.hardware):
            raise UsageError(f"--hardware: {self.hardware!r} is not a hardware type; expected one such as {HARDWARE}")
        if not _URN.fullmatch(self.image):
            raise UsageError(f"--image: {self.image!r} is not an image URN; expected one such as {IMAGE}")
        if not _WORD.fullmatch(self.lan):
            raise UsageError(
                f"--lan: {self.lan!r} is not a valid name; expected letters, digits, - and _, such as {LAN}"
            )
        if self.nfs_gb < 0:
            raise UsageError(f"--nfs: must be a size in GB, got {self.nfs_gb}")
        if self.repository is not None and not re.fullmatch(r"https?://\S+", self.repository):
            raise UsageError(f"--repository: must be an https:// URL that needs no password, got {self.repository!r}")


def rspec_text(spec: RspecSpec) -> str:
    """Return the request RSpec (GENI 3, with Emulab's extensions) as XML."""
    return "\n".join(_lines(spec)) + "\n"


def rate(text: str) -> int:
    """Convert a rate such as 10gbit to kbit/s.

    Raises:
        UsageError: if the text is not a rate.
    """
    found = _RATE.fullmatch(text.lower())
    kbit_per_s = round(float(found[1]) * RATES[found[2]]) if found else 0
    if kbit_per_s < 1:
        raise UsageError(f"--lan-bandwidth: {text!r} is not a rate; expected one such as 10gbit or 500mbit")
    return kbit_per_s


def _lines(spec: RspecSpec) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield "<!-- made by `muster cloudlab rspec`; regenerate it instead of editing it: cloudlab/README.md -->"
    yield f'<rspec xmlns="{GENI}" xmlns:emulab="{EMULAB}" xmlns:xsi="{XSI}"'
    yield f'       xsi:schemaLocation="{GENI} {GENI}/request.xsd" type="request">'
    names = [f"node{number}" for number in range(spec.nodes)]
    client = f"nfs-client {NFS_ADDRESS}" if spec.nfs_gb else ""
    for number, name in enumerate(names, start=1):
        yield from _node(spec, name, f"{NETWORK}.{number}", client)
    if spec.nfs_gb:
        store = f'class="local" mountpoint="{SHARED}" size="{spec.nfs_gb}GB" placement="any"'
        extra = f'    <emulab:blockstore name="{NFS_NODE}-store" {store}/>'
        yield from _node(spec, NFS_NODE, NFS_ADDRESS, f"nfs-server {NETWORK}.0/24", extra)
        names.append(NFS_NODE)
    if len(names) > 1:
        yield from _link(spec, names)
    yield f'  <rspec_tour xmlns="{TOUR}">'
    yield f'    <description type="text">{escape(_description(spec))}</description>'
    yield f'    <instructions type="text">{escape(INSTRUCTIONS)}</instructions>'
    yield "  </rspec_tour>"
    yield "</rspec>"


def _description(spec: RspecSpec) -> str:
    shared = f", and a node that shares {spec.nfs_gb} GB as {SHARED}" if spec.nfs_gb else ""
    return f"{counted(spec.nodes, 'node')} on one LAN, ready for Muster jobs{shared}."


def _node(spec: RspecSpec, name: str, address: str, role: str, *extra: str) -> Iterator[str]:
    yield f'  <node client_id="{name}" exclusive="true">'
    yield '    <sliver_type name="raw-pc">'
    yield f"      <disk_image name={quoteattr(spec.image)}/>"
    yield "    </sliver_type>"
    if spec.hardware:
        yield f'    <hardware_type name="{spec.hardware}"/>'
    if spec.nodes > 1 or spec.nfs_gb:  # a single node has no LAN
        yield f'    <interface client_id="{name}:if1">'
        yield f'      <ip address="{address}" netmask="{NETMASK}" type="ipv4"/>'
        yield "    </interface>"
    yield "    <services>"
    yield f'      <execute shell="bash" command={quoteattr(_command(spec, role))}/>'
    yield "    </services>"
    yield from extra
    yield "  </node>"


def _command(spec: RspecSpec, role: str) -> str:
    boot = f"sudo bash {BOOT} {role}".rstrip()
    if spec.repository is None:
        return boot
    return f"test -e {BOOT} || sudo git clone --depth 1 -- {shlex.quote(spec.repository)} {REPOSITORY}; {boot}"


def _link(spec: RspecSpec, names: list[str]) -> Iterator[str]:
    yield f'  <link client_id="{spec.lan}">'
    for name in names:
        yield f'    <interface_ref client_id="{name}:if1"/>'
    yield '    <link_type name="lan"/>'
    if spec.kbit_per_s is not None:
        for name in names:
            yield f'    <property source_id="{name}:if1" dest_id="{spec.lan}" capacity="{spec.kbit_per_s}"/>'
    yield "  </link>"
