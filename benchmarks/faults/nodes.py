"""Faults of nodes and links, in a box of four nodes over ssh (rows 5 to 8 and 23 of the matrix)."""

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from faults.bench import Bench
from faults.live import Live, WaitedInVainError, arguments_of, children, muster, signal_all
from faults.table import BOX, Expected, Fault, Outcome
from faults.work import job

NODE = "node2"
APART_S = 50
# Twelve virtual ranks: they can be dealt to four nodes and to three.
FOUR = job(nodes=4, steps=300, train={"virtual_ranks": 12}, restart={"min_nodes": 3})
SLOW = job(nodes=4, steps=500, train={"virtual_ranks": 12}, restart={"min_nodes": 3})


def box(*words: str) -> None:
    """Call `muster box`.

    Raises:
        WaitedInVainError: it refused.
    """
    done = muster("box", *words)
    if done.returncode != 0:
        raise WaitedInVainError(f"muster box {' '.join(words)}: {done.stderr.strip()[-300:]}")


def lost(how: str, *, node: str = NODE) -> Callable[[Bench], Outcome]:
    """Return a row's run: a node fails in one of the box's ways, and is healed when all is over."""

    def run(bench: Bench) -> Outcome:
        def act(live: Live) -> float:
            began = time.time()
            box("fail", node, "--how", how, "--name", bench.box)
            return began

        return _in_box(bench, FOUR, act, node)

    return run


def back_after_partition(bench: Bench) -> Outcome:
    """Plug a node in again when the next attempt has begun: its stale ranks disturb nobody, and the run grows back."""

    def act(live: Live) -> float:
        began = time.time()
        box("fail", NODE, "--how", "unplug", "--name", bench.box)
        live.wait_event("first_step", attempt=1)
        box("heal", NODE, "--name", bench.box)
        return began

    outcome = _in_box(bench, SLOW, act, NODE)
    return outcome if outcome.attempts == 3 else replace(outcome, wrong=(*outcome.wrong, "the run did not grow back"))


def flapping(bench: Bench) -> Outcome:
    """Take a link away for two seconds: no restart."""

    def act(live: Live) -> float:
        began = time.time()
        box("fail", NODE, "--how", "unplug", "--name", bench.box)
        time.sleep(max(0.0, began + 2.0 - time.time()))
        box("heal", NODE, "--name", bench.box)
        return began

    return _in_box(bench, FOUR, act, NODE)


def ssh_killed(bench: Bench) -> Outcome:
    """Kill the ssh client that carries a node's channel."""

    def act(live: Live) -> float:
        found = [pid for pid in children(live.process.pid) if NODE.encode() in arguments_of(pid).split(b"\0")]
        if not found:
            raise WaitedInVainError(f"no ssh to {NODE} below the supervisor")
        began = time.time()
        signal_all(found, signal.SIGKILL)
        return began

    return _in_box(bench, FOUR, act, NODE)


def clocks_apart(bench: Bench) -> Outcome:
    """Let one node's clock be ahead and another's behind, in a box of its own; kill a third node.

    As much as a start allows: nodes further off are refused, and the user told to set their clocks.
    """
    own = f"{bench.box}c"
    box("up", "--name", own, "--nodes", "4", "--clock", f"node1=+{APART_S}s", "--clock", f"node2=-{APART_S}s")
    try:

        def act(live: Live) -> float:
            began = time.time()
            box("fail", "node3", "--how", "kill", "--name", own)
            return began

        return _in_box(bench, FOUR, act, "node3", box_name=own)
    finally:
        box("down", "--name", own)


def _in_box(
    bench: Bench, text: str, act: Callable[[Live], float], node: str, *, box_name: str | None = None
) -> Outcome:
    name = box_name or bench.box
    hosts = ("--hosts", f"box:{name}", "--on", "ssh")
    bench.reference(text, *hosts)
    try:
        return bench.hurt(text, act, arguments=hosts, deadline_s=150.0)
    finally:
        box("heal", node, "--name", name)


SILENT = Expected(attempts=2, detect_s=6.5, resume_s=20.0)
BACK = Expected(attempts=3, detect_s=6.5, resume_s=20.0)
SEEN = Expected(attempts=2, detect_s=1.0, resume_s=20.0)

# Not a number of attempts: under libfaketime Python's sleep may fail, and with it a rank.
SKEWED = Expected(detect_s=1.0, resume_s=20.0)

FAULTS = (
    Fault(5, "node vanishes silently", "unplug node2", SILENT, lost("unplug"), BOX),
    Fault(5, "node loses power", "power node2", SILENT, lost("power"), BOX),
    Fault(5, "node 0 loses power", "power node0", SILENT, lost("power", node="node0"), BOX),
    Fault(5, "node frozen", "freeze node2", SILENT, lost("freeze"), BOX),
    Fault(5, "node's processes killed", "kill node2", SEEN, lost("kill"), BOX),
    Fault(6, "node back after a partition", "unplug, heal after restart", BACK, back_after_partition, BOX),
    Fault(7, "link away for 2 s", "unplug, heal", Expected(attempts=1), flapping, BOX),
    Fault(8, "ssh client killed", "kill -9 ssh to node2", Expected(detect_s=0.5, resume_s=20.0), ssh_killed,
          BOX),
    Fault(23, "nodes' clocks 100 s apart", "libfaketime; kill node3", SKEWED, clocks_apart, BOX),
)  # fmt: skip
