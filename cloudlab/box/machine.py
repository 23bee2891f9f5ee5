"""Check that the caller is root, and that this machine has the programs, enough memory and a free network."""

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

# folders that may be missing from a user's PATH
FOLDERS: Final = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
LINKS: Final = Path("/sys/class/net")
FAKETIME: Final = "libfaketime.so.1"
MB: Final = 2**20
BRIDGE_FILTER: Final = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")

# program -> Debian package
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
    """Check that the caller is root.

    Raises:
        RefusedError: if the caller is not root.
    """
    if os.geteuid() != 0:
        command = shlex.join([str(Path(sys.argv[0]).absolute()), *sys.argv[1:]])
        raise RefusedError(f"{what} needs root, for namespaces and links; try: sudo {command}")


def find_programs(*, with_slurm: bool) -> dict[str, str]:
    """Return the paths of all programs that a box needs.

    Raises:
        RefusedError: if programs are missing. The message has the command that installs them.
    """
    wanted = PACKAGES | SLURM_PACKAGES if with_slurm else PACKAGES
    search = os.environ.get("PATH", "") + os.pathsep + FOLDERS
    found = {name: shutil.which(name, path=search) for name in wanted}
    if missing := [name for name, path in found.items() if path is None]:
        packages = sorted({wanted[name] for name in missing})
        raise RefusedError(
            f"muster box needs {', '.join(missing)}, which this machine lacks; "
            f"try: apt-get install --no-install-recommends {' '.join(packages)}"
        )
    return {name: path for name, path in found.items() if path is not None}


def find_faketime() -> str:
    """Return the path of the library that skews clocks.

    Raises:
        RefusedError: if the library is not installed.
    """
    for folder in [*sorted(Path("/usr/lib").glob("*/faketime")), Path("/usr/lib/faketime")]:
        if (folder / FAKETIME).is_file():
            return str(folder / FAKETIME)
    raise RefusedError(f"--clock needs {FAKETIME}, which this machine lacks; try: apt-get install libfaketime")


def memory_mb() -> int:
    """Return this machine's memory in MB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MB


def filters_bridges() -> bool:
    """Return True if this machine's firewall also filters bridged traffic, which Docker enables."""
    return BRIDGE_FILTER.exists() and BRIDGE_FILTER.read_text(encoding="ascii").strip() != "0"


def choose_number(name: str, taken: Iterable[int], tools: Tools) -> int:
    """Choose K of 10.10.K.0/24: for the default box 1 if it is free, otherwise the next free number.

    Raises:
        RefusedError: if no number is free.
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
    raise RefusedError("no network 10.10.K.0/24 is free on this machine; see ip route and muster box status")


def _networks(tools: Tools) -> list[ipaddress.IPv4Network]:
    """List the networks of this machine's routes and addresses, except the default route."""
    found = []
    for route in json.loads(tools.run(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]"):
        text = route.get("dst", "default")
        if text != "default" and route.get("type") not in ("broadcast", "multicast"):
            network = ipaddress.IPv4Network(text, strict=False)
            if network.prefixlen > 8:  # ignore a site's route to 10.0.0.0/8, because the box's /24 takes precedence
                found.append(network)
    return found
