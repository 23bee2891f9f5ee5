"""Facts about this host that affect measurements. If a container or the kernel hides a fact, it stays empty.

Interfaces are queried by ioctl, because /sys/class/net may show another network namespace.
"""

import array
import fcntl
import os
import platform
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muster.collectives_bench.records import HostFacts
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.machine import network
from muster.jobs.machine.free import host_bytes
from muster.jobs.machine.hardware import cpu_name, driver_gpus
from muster.jobs.machine.procfs import text_of

CONGESTION: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")
GOVERNORS: Final = Path("/sys/devices/system/cpu")
SIOCGIFMTU: Final = 0x8921  # <linux/sockios.h>
SIOCETHTOOL: Final = 0x8946
ETHTOOL_GSET: Final = 0x1  # <linux/ethtool.h>: struct ethtool_cmd
ETHTOOL_GDRVINFO: Final = 0x3  # struct ethtool_drvinfo
SETTINGS_BYTES: Final = 44
DRIVER_BYTES: Final = 196
PRETENDERS: Final = {"veth", "bridge", "tun", "bonding", "team", "dummy"}  # drivers whose reported speed is meaningless
UNKNOWN_SPEEDS: Final = {0, 0xFFFF, 0xFFFFFFFF}
INTERFACE_VARIABLES: Final = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
TOLD: Final = re.compile(r"(NCCL|GLOO|OMP|TORCH|MALLOC)_\w+")


def host_facts(env: RankEnv, environ: Mapping[str, str], *, backend: str = "gloo") -> HostFacts:
    """Describe the host of this rank. This only reads files, so that it can be called before a fork."""
    interface = interface_of(env, environ, backend)
    return HostFacts(
        node=env.node_rank,
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        ranks=env.local_world_size,
        cpu=cpu_name(),
        memory_bytes=host_bytes("MemTotal"),
        kernel=platform.release(),
        interface=interface,
        speed_mbit=speed_mbit(interface),
        mtu=mtu(interface),
        congestion_control=text_of(CONGESTION),
        governor=_governor(),
        gpus=driver_gpus(),
        environment={name: environ[name] for name in sorted(environ) if TOLD.fullmatch(name)},
    )


def interface_of(env: RankEnv, environ: Mapping[str, str], backend: str = "gloo") -> str:
    """Return the interface that the ranks use: the configured one, or else the one that leads to the master."""
    for name in (INTERFACE_VARIABLES[backend], *INTERFACE_VARIABLES.values()):
        if told := _first_named(environ.get(name, "")):
            return told
    route = network.route_to(env.master_addr)
    return route[0] if route else ""


def _first_named(words: str) -> str:
    """Return the first interface of a list.

    NCCL also accepts prefixes, =NAME for an exact name, and ^NAME for all other interfaces.
    """
    if words.startswith("^"):
        return ""
    word = words.split(",")[0]
    if word.startswith("="):
        return word[1:]
    names = [name for _, name in socket.if_nameindex()]
    return word if word in names else next((name for name in sorted(names) if word and name.startswith(word)), word)


def mtu(interface: str) -> int | None:
    """Return the MTU of an interface in bytes; None if there is no such interface."""
    reply = _ask(SIOCGIFMTU, struct.pack("16sQQQ", interface.encode(), 0, 0, 0))
    return struct.unpack_from("16si", reply)[1] if reply else None


def speed_mbit(interface: str) -> int | None:
    """Return the negotiated speed of a network card; None for virtual interfaces, whose speed is meaningless."""
    driver = _ethtool(interface, ETHTOOL_GDRVINFO, DRIVER_BYTES)[4:36].rstrip(b"\0").decode(errors="replace")
    settings = _ethtool(interface, ETHTOOL_GSET, SETTINGS_BYTES)
    if driver in PRETENDERS or not settings:
        return None
    low, high = struct.unpack_from("=12xH14xH", settings)
    speed = int(high) << 16 | int(low)
    return None if speed in UNKNOWN_SPEEDS else speed


def _ethtool(interface: str, command: int, size: int) -> bytes:
    data = array.array("B", struct.pack("=I", command) + bytes(size - 4))
    reply = _ask(SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), data.buffer_info()[0]))
    return data.tobytes() if reply else b""


def _ask(request: int, argument: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, argument)
        except OSError:  # there is no such interface, or it does not support this request
            return b""


def _governor() -> str:
    """Return the frequency governor of the usable cores, or all governors if they differ."""
    cores = os.sched_getaffinity(0)
    found = {text_of(GOVERNORS / f"cpu{core}" / "cpufreq" / "scaling_governor") for core in cores}
    return ", ".join(sorted(found - {""}))
