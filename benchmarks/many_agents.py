"""64 agents over real ssh in a box: until every one has answered, against 64 bare `ssh NODE echo`; and our side's CPU.

Needs root, for the box (`muster box up --nodes 64`), and a quiet machine. An agent that has answered has imported no
torch; its node's sshd, shell and Python run on this same machine, so the wall time is theirs as well.

    sudo .venv/bin/python benchmarks/many_agents.py [--box NAME] [--repeats 5] [--json FILE]
"""

import asyncio
import resource
import statistics
import sys
import time

from harness import Options, compare, finish, turns

from muster.cloudlab.box.hosts import box_hosts
from muster.jobs.basics.errors import MusterError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.spec.site import SshSettings
from muster.launch.transports.child import Child
from muster.launch.transports.ssh import Ssh
from muster.launch.transports.ssh_command import base_options
from muster.launch.wire.channel import Channel
from muster.launch.wire.messages import Bye

REACH_S, REACH_RATIO, REACH_CPU_MS = 3.0, 2.5, 15.0
NAME = "agents"


class Count:
    """A gate that counts: who has answered, who has failed."""

    def __init__(self, nodes: int) -> None:
        self.missing = nodes
        self.channels: list[Channel] = []
        self.failures: list[str] = []
        self.done = asyncio.Event()

    def connected(self, channel: Channel) -> None:
        """Count a channel; the transport hands it over when it has read the hello."""
        self.channels.append(channel)
        self._count()

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Count a failure."""
        if self.missing:
            self.failures.append(str(error))
            self._count()

    def _count(self) -> None:
        self.missing -= 1
        if self.missing <= 0:
            self.done.set()


def cpu_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def agents(hosts: HostSet) -> float:
    """Start one agent per host and return the seconds until all have answered."""

    async def work() -> float:
        gate = Count(len(hosts.hosts))
        transport = Ssh(
            hosts.hosts, hosts, SshSettings(cheap_kex=True), python=sys.executable, code=None, fanout=len(hosts.hosts)
        )
        began = time.monotonic()
        await transport.start(gate)
        await asyncio.wait_for(gate.done.wait(), 60)
        seconds = time.monotonic() - began
        assert not gate.failures, gate.failures
        for channel in gate.channels:
            channel.post(Bye(0))
            channel.close()
        await transport.close(())
        return seconds

    return asyncio.run(work())


def echoes(hosts: HostSet) -> float:
    """Run `ssh HOST echo` on all hosts at once, and return the seconds until all have ended."""

    async def work() -> float:
        options = [*hosts.ssh_options, *base_options(SshSettings(cheap_kex=True), port=None)]
        began = time.monotonic()
        children = [Child(["ssh", *options, host.name, "echo"], piped=False) for host in hosts.hosts]
        codes = await asyncio.gather(*(child.ended for child in children))
        assert set(codes) == {0}, codes
        return time.monotonic() - began

    return asyncio.run(work())


def main() -> int:
    """Measure in a box that is up, report."""
    parser = Options(__doc__, repeats=5, quick={"repeats": 1})
    parser.add_argument("--box", default=NAME, help="the name of a box that is up")
    args = parser.parse_args()
    hosts = box_hosts(args.box)
    count = len(hosts.hosts)

    def ours() -> tuple[float, float]:
        before = cpu_s()
        seconds = agents(hosts)
        return seconds, (cpu_s() - before) / count * 1e3

    times = turns({"ours": ours, "echoes": lambda: (echoes(hosts), 0.0)}, args.repeats, warm_up=1)
    mine, cpu = zip(*times["ours"], strict=True)
    seconds, cpu_ms = statistics.median(mine), statistics.median(cpu)
    others = [each for each, _ in times["echoes"]]
    row = compare(f"{count} agents over ssh", mine, others, reach=REACH_RATIO, cpu_ms_a_host=cpu)
    print(f"  all ready after {seconds:.2f} s (reach {REACH_S:g})")
    print(f"  client CPU {cpu_ms:.1f} ms a host (reach {REACH_CPU_MS:g})")
    row["reached"] &= seconds <= REACH_S and cpu_ms <= REACH_CPU_MS
    return finish(args, "many agents", [row])


if __name__ == "__main__":
    sys.exit(main())
