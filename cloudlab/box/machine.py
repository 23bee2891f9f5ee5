"""What this machine offers: root, programs, memory, a free network."""

import ipaddress
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from muster.cloudlab.box.spec import DEFAULT_NAME, DEFAULT_NUMBER, MAX_NUMBER, BoxSpec
from muster.cloudlab.box.tools import Tools
from muster.jobs.basics.errors import RefusedError

FOLDERS: Final = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"  # of programs that users may not have
LINKS: Final = Path("/sys/class/net")
FAKETIME: Final = "libfaketime.so.1"
MB: Final = 2**20
BRIDGE_FILTER: Final = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")

# program -> Debian's package
PACKAGES: Final = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "nsenter": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
SLURM_PACKAGES: Final = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sinfo": "slurm-wlm",
}


def need_root(what: str) -> None:
    """Refuse to go on without root.

    Raises:
        RefusedError: this is not root.
    """
    if os.geteuid() != 0:
        command = shlex.join([str(Path(sys.argv[0]).absolute()), *sys.argv[1:]])
        raise RefusedError(f"{what} needs root, for namespaces and links; try: sudo {command}")


def find_programs(*, with_slurm: bool) -> dict[str, str]:
    """Return the paths of all programs that a box needs.

    Raises:
        RefusedError: some are missing; the message has the one line that installs them.
    """
    wanted = PACKAGES | SLURM_PACKAGES if with_slurm else PACKAGES
    search = os.environ.get("PATH", "") + os.pathsep + FOLDERS
    found = {name: shutil.which(name, path=search) for name in wanted}
    if missing := [name for name, path in found.items() if path is None]:
        packages = sorted({wanted[name] for name in missing})
        raise RefusedError(
            f"muster box needs {', '.join(missing)}, not found here; "
            f"try: apt-get install --no-install-recommends {' '.join(packages)}"
        )
    return {name: path for name, path in found.items() if path is not None}


def find_faketime() -> str:
    """Return the path of the library that skews clocks.

    Raises:
        RefusedError: it is not installed.
    """
    for folder in [*sorted(Path("/usr/lib").glob("*/faketime")), Path("/usr/lib/faketime")]:
        if (folder / FAKETIME).is_file():
            return str(folder / FAKETIME)
    raise RefusedError(f"--clock needs {FAKETIME}, not found here; try: apt-get install libfaketime")


def memory_mb() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MB


def filters_bridges() -> bool:
    """Say whether this machine's firewall also looks at what goes over bridges, which Docker turns on."""
    return BRIDGE_FILTER.exists() and BRIDGE_FILTER.read_text(encoding="ascii").strip() != "0"


def choose_number(name: str, taken: Iterable[int], tools: Tools) -> int:
    """Choose K, and with it 10.10.K.0/24: 1 for the default box where it is free, the next free one for others.

    Raises:
        RefusedError: none is free.
    """
    used = _networks(tools)
    links = {path.name for path in LINKS.iterdir()}
    unwanted = set(taken)
    first = DEFAULT_NUMBER if name == DEFAULT_NAME else DEFAULT_NUMBER + 1
    for number in range(first, MAX_NUMBER + 1):
        spec = BoxSpec(name=name, number=number)
        network = ipaddress.IPv4Network(spec.network)
        if number not in unwanted and spec.bridge not in links and not any(network.overlaps(each) for each in used):
            return number
    raise RefusedError("no network 10.10.K.0/24 is free here; see: ip route, and muster box status")


def _networks(tools: Tools) -> list[ipaddress.IPv4Network]:
    """List the networks that this machine has a route to, or an address in; the default route left out."""
    found = []
    for route in json.loads(tools.run(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]"):
        text = route.get("dst", "default")
        if text != "default" and route.get("type") not in ("broadcast", "multicast"):
            network = ipaddress.IPv4Network(text, strict=False)
            if network.prefixlen > 8:  # a route to all of 10.0.0.0/8 is a site's, and a connected /24 goes before it
                found.append(network)
    return found
