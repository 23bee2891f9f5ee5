"""Find the parts of the environment that change a result's numbers, and estimate their cost.

This module uses the facts that hosts record; `symptoms.py` uses the numbers themselves. If the result contains both
sides (runs with different congestion control, worlds with and without enough cores, blocks with and without other
programs), the cost is computed from the result. Otherwise the finding quotes a cost measured elsewhere, and says so.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Final

from muster.collectives_bench.records import BenchHeader, Block, HostFacts, Result
from muster.collectives_bench.results.rows import BenchRow, rows_of
from muster.collectives_bench.results.symptoms import SYMPTOMS, Finding
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import counted
from muster.jobs.measuring.compare import RowVerdict, comparison

# Slowdowns by bbr against reno, measured with gloo at 100 MB on the loopback of a 2-core machine, kernel 6.18.
BBR_ALL_REDUCE: Final = 1.35
BBR_SEND: Final = 2.2
STALL_S: Final = 4.5  # a slower start has waited for a name server, for which a resolver waits 5 s
SLOW_LINK: Final = 0.5  # a best speed below this share of the interface's speed is reported
LARGE_BYTES: Final = 4 * 2**20
FAST_MBIT: Final = 10_000
HEADERS_BYTES: Final = 66  # headers of every packet: Ethernet, IP, and TCP with time stamps
VIRTUAL: Final = re.compile(r"docker|veth|br-|virbr|cni|flannel|cali|tun|tap|wg|zt|tailscale")
# Variables that change results, with their effects.
VARIABLES: Final[dict[str, str]] = {
    "NCCL_P2P_DISABLE": "GPUs of one host communicate through its memory, not over NVLink or PCIe",
    "NCCL_SHM_DISABLE": "ranks of one host communicate over the network",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_NET_GDR_LEVEL": "limits which transfers go from the network card to the GPU directly",
    "NCCL_NVLS_ENABLE": "sums in the NVLink switch: up to 1.3x on 8 GPUs, no gain on 4 or fewer",
    "NCCL_ALGO": "overrides NCCL's choice of algorithm",
    "NCCL_PROTO": "overrides NCCL's choice of protocol",
    "NCCL_MIN_NCHANNELS": "overrides NCCL's choice of number of channels",
    "NCCL_MAX_NCHANNELS": "overrides NCCL's choice of number of channels",
    "NCCL_BUFFSIZE": "overrides NCCL's choice of buffer size",
    "NCCL_DEBUG": "NCCL writes messages while it runs, many at INFO and TRACE",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL first compares the arguments of every call on all ranks",
    "TORCH_NCCL_BLOCKING_WAIT": "calls return to Python only when they have finished",
    "MALLOC_MMAP_THRESHOLD_": "each call maps new memory for sizes above this; from 32 MB on, all_gather takes 2x",
}
HARMLESS: Final = {"NCCL_DEBUG": ("", "WARN", "VERSION"), "TORCH_DISTRIBUTED_DEBUG": ("", "OFF", "INFO")}


def findings(result: Result) -> list[Finding]:
    """Return the findings, with those from host facts first; an empty list if no known cause applies."""
    rows = rows_of(result)
    found = [finding for check in CHECKS for finding in check(result, rows)]
    found += [finding for symptom in SYMPTOMS for finding in symptom(result, rows)]
    return list(dict.fromkeys(found))


def _hosts(headers: Iterable[BenchHeader]) -> list[HostFacts]:
    """Return the hosts of some runs, without duplicates."""
    return list({host.host: host for header in headers for host in header.hosts}.values())


def _names(hosts: Sequence[HostFacts]) -> str:
    names = [host.host for host in hosts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _over_tcp(result: Result) -> list[BenchHeader]:
    return [header for header in result.headers if header.world.backend == "gloo" and header.world.ranks > 1]


def _between_nodes(result: Result) -> list[BenchHeader]:
    """Return the runs that span several machines. Runs on simulated nodes use one machine, so they are omitted."""
    return [header for header in result.headers if len({host.host for host in header.hosts}) > 1]


def congestion_control(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report TCP's congestion control if it is bbr or differs between hosts, with its cost if runs can be compared."""
    hosts = _hosts(_over_tcp(result))
    names = sorted({host.congestion_control for host in hosts} - {""})
    slow = [host for host in hosts if _is_bbr(host.congestion_control)]
    if measured := _measured_control(result):
        one, other, verdict, ratio = measured
        told = verdict.verdict != "no verdict"
        yield Finding(
            f"TCP's congestion control is {one} in one run and {other} in another",
            f"calls take {ratio:.2f}x as long with {one}, over all rows measured with both",
            f"{verdict.verdict}, measured here" if told else f"cannot be distinguished from noise here: {verdict.why}",
            f"set it for all: sysctl -w net.ipv4.tcp_congestion_control={other if ratio > 1 else one}"
            if told
            else "alternate runs of both, with more launches",
            factor=ratio if told else None,
            measured=told,
        )
    elif len(names) > 1:
        yield Finding(
            f"TCP's congestion control differs between hosts: {', '.join(names)}",
            _names(hosts),
            "it applies to the data that each host sends, so some links may be slower; not measured here",
            f"set the same on all: sysctl -w net.ipv4.tcp_congestion_control={min(names, key=_is_bbr)}",
        )
    elif slow:
        yield Finding(
            f"TCP's congestion control is {slow[0].congestion_control}",
            f"on {_names(slow)}",
            f"seen elsewhere, on a loopback at 100 MB: all_reduce took {BBR_ALL_REDUCE}x as long as with reno, "
            f"and send {BBR_SEND}x; not measured here",
            "try another for one route, and compare: ip route change ROUTE congctl reno (ip route show prints ROUTE; "
            "for a loopback: ip route show table local)",
            factor=BBR_ALL_REDUCE,
        )


def _is_bbr(name: str) -> bool:
    return name.startswith("bbr")


def _measured_control(result: Result) -> tuple[str, str, RowVerdict[BenchRow], float] | None:
    """Compare runs that differ in congestion control.

    Return the two names, and the verdict and time ratio of the first name.
    """
    blocks: dict[str, list[Block]] = {}
    for header in result.headers:
        controls = {host.congestion_control for host in header.hosts}
        if len(controls) == 1:
            blocks.setdefault(controls.pop(), []).extend(_blocks_of(header, result))
    blocks.pop("", None)
    if len(blocks) < 2:
        return None
    one, other = sorted(blocks, key=lambda name: not name.startswith("bbr"))[:2]
    try:
        found = comparison(rows_of(Result(blocks=blocks[other])), rows_of(Result(blocks=blocks[one])))
    except RefusedError:  # no row was measured in both runs
        return None
    verdicts = [each for each in (found.together, *found.rows) if each.ratio is not None]
    return (one, other, verdicts[0], verdicts[0].ratio or 1.0) if verdicts else None


def _blocks_of(header: BenchHeader, result: Result) -> list[Block]:
    """Return a run's blocks: those of its world between its header and the next header."""
    later = [each.time for each in result.headers if each.world == header.world and each.time > header.time]
    end = min(later, default=float("inf"))
    return [block for block in result.blocks if block.world == header.world and header.time <= block.time < end]


def interface(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report an interface between nodes if it does not lead to the network, or if its speed contradicts the results."""
    headers = _between_nodes(result)
    hosts = _hosts(headers)
    advice = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the right one (ip -br addr lists them)"
    if odd := [host for host in hosts if host.interface == "lo" or VIRTUAL.match(host.interface)]:
        yield Finding(
            f"nodes communicate through {odd[0].interface}, which does not lead to other machines or takes a detour",
            f"on {_names(odd)}",
            "seen elsewhere: 94x (24.2 s instead of 0.26 s, pytorch/gloo 335); not measured here",
            advice,
        )
    speeds = {host.speed_mbit for host in hosts if host.speed_mbit}
    if len(speeds) > 1:
        slow = [host for host in hosts if host.speed_mbit == min(speeds)]
        yield Finding(
            f"the speeds of links differ: {min(speeds)} and {max(speeds)} Mbit/s",
            f"the slowest is on {_names(slow)}, {slow[0].interface}",
            f"up to {max(speeds) / min(speeds):.3g}x, because the slowest link limits a ring",
            f"check its cable and switch port, or {advice}",
            factor=max(speeds) / min(speeds),
        )
    yield from _unused_speed(headers, min(speeds, default=0), hosts, rows)


def _unused_speed(
    headers: Sequence[BenchHeader], speed_mbit: int, hosts: Sequence[HostFacts], rows: Sequence[BenchRow]
) -> Iterator[Finding]:
    worlds = {header.world for header in headers if header.world.backend == "gloo" and header.world.ranks_per_node == 1}
    best = max(
        (row.busbw for row in rows if row.world in worlds and row.nbytes >= LARGE_BYTES and row.busbw), default=0
    )
    link = speed_mbit / 8e3  # GB/s
    if best and link and best < SLOW_LINK * link:
        yield Finding(
            f"the link is not fully used: at best {best:.3g} of {link:.3g} GB/s",
            f"{hosts[0].interface} says {speed_mbit} Mbit/s",
            f"up to {link / best:.1f}x, measured here",
            "one TCP stream may not fill it: check congestion control, mtu and CPU load; or another interface is used",
            factor=link / best,
            measured=True,
        )
    elif best > 1.05 * link > 0:
        yield Finding(
            f"results exceed the link's speed: {best:.3g} GB/s over {link:.3g}",
            f"{hosts[0].interface} says {speed_mbit} Mbit/s",
            "the traffic does not use the interface named here",
            "set GLOO_SOCKET_IFNAME, and count with --wire",
        )


def packets(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report the mtu between nodes if it is small or differs between hosts."""
    hosts = [host for host in _hosts(_between_nodes(result)) if host.mtu]
    sizes = sorted({host.mtu for host in hosts if host.mtu})
    if len(sizes) > 1:
        small = [host for host in hosts if host.mtu == sizes[0]]
        yield Finding(
            f"the mtu differs: {sizes[0]} and {sizes[-1]}",
            f"the smallest is on {_names(small)}",
            "large packets may be dropped between them, which looks like a hang; not measured here",
            f"set the same on all: ip link set DEVICE mtu {sizes[0]}",
        )
    fast = [host for host in hosts if (host.speed_mbit or 0) >= FAST_MBIT and (host.mtu or 0) <= 1500]
    if fast and fast[0].mtu:
        share = HEADERS_BYTES / (fast[0].mtu + 14) - HEADERS_BYTES / (9000 + 14)
        yield Finding(
            f"the mtu is {fast[0].mtu} on a link of {fast[0].speed_mbit} Mbit/s",
            f"on {_names(fast)}",
            f"compared with an mtu of 9000, headers take another {share:.1%} of the link (calculated), and the CPU "
            "handles six times as many packets",
            "if the switches allow it, on all hosts: ip link set DEVICE mtu 9000",
            factor=1 + share,
        )


def governor(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report hosts whose cores are set to save power."""
    if saving := [host for host in _hosts(result.headers) if "powersave" in host.governor]:
        yield Finding(
            "cores save power, because the governor is powersave",
            f"on {_names(saving)}",
            "small messages wait for cores to wake up; not measured here",
            "run cpupower frequency-set -g performance, and measure again",
        )


def stall_at_start(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report runs whose start waited for a name server."""
    stalls = [header for header in result.headers if header.init_s is not None and header.init_s >= STALL_S]
    gloo = [header.init_s for header in stalls if header.init_s is not None and header.world.backend == "gloo"]
    if gloo:
        seconds = median(gloo)
        yield Finding(
            f"init_process_group took {seconds:.1f} s",
            f"in {len(gloo)} of {counted(len(result.headers), 'run')}; 0.04 s is usual; name servers time out in 5 s",
            f"{seconds:.1f} s at every start, measured here; the rows do not include it",
            "c10d looks up names for IPv4 addresses in IPv6 form, which /etc/hosts does not contain: set RES_OPTIONS="
            "'timeout:1 attempts:1' in the job's env:, or these options in /etc/resolv.conf",
            seconds=seconds,
            measured=True,
        )


def variables(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report environment variables that change results or differ between hosts."""
    hosts = _hosts(result.headers)
    for name in sorted({name for host in hosts for name in host.environment}):
        values = sorted({host.environment.get(name, "") for host in hosts})
        if len(values) > 1 and not name.endswith("_IFNAME"):
            yield Finding(
                f"{name} differs between hosts",
                ", ".join(value or "unset" for value in values),
                "ranks with different values may hang or give different results; not measured here",
                "set the same value on all, in the job's env: section",
            )
        elif name in VARIABLES and values[0] not in HARMLESS.get(name, ("",)):
            yield Finding(f"{name}={values[0]} is set", VARIABLES[name], "not measured here", "unset it and compare")


CHECKS: Final[tuple[Callable[[Result, Sequence[BenchRow]], Iterator[Finding]], ...]] = (
    congestion_control,
    interface,
    packets,
    governor,
    variables,
    stall_at_start,
)
