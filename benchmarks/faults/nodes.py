"""Faults of nodes and links, in a box of four nodes over ssh (rows 5 to 8 and 23 of the matrix)."""

import signal
import time
from collections.abc import Callable

from faults.bench import Bench, in_box
from faults.live import Live, WaitedInVainError, arguments_of, box, children, signal_all
from faults.table import BOX, Expected, Fault, Outcome
from faults.work import job

NODE = "node2"
APART_S = 50
# Twelve virtual ranks: they can be dealt to four nodes and to three.
FOUR = job(nodes=4, steps=300, train={"virtual_ranks": 12}, restart={"min_nodes": 3})
SLOW = job(nodes=4, steps=500, train={"virtual_ranks": 12}, restart={"min_nodes": 3})


def lost(
    how: str, *, node: str = NODE, heal_when: Callable[[Live], object] | None = None, text: str = FOUR
) -> Callable[[Bench], Outcome]:
    """Return a row's run: a node fails in one of the box's ways; it is healed in time, or when all is over."""

    def run(bench: Bench) -> Outcome:
        def act(live: Live) -> None:
            box("fail", node, "--how", how, "--name", bench.box)
            if heal_when is not None:
                heal_when(live)
                box("heal", node, "--name", bench.box)

        return _hurt_in(bench.box, bench, text, act, node)

    return run


def ssh_killed(bench: Bench) -> Outcome:
    """Kill the ssh client that carries a node's channel."""

    def act(live: Live) -> float:
        found = [pid for pid in children(live.process.pid) if NODE.encode() in arguments_of(pid).split(b"\0")]
        if not found:
            raise WaitedInVainError(f"no ssh to {NODE} below the supervisor")
        began = time.time()
        signal_all(found, signal.SIGKILL)
        return began

    return _hurt_in(bench.box, bench, FOUR, act, NODE)


def clocks_apart(bench: Bench) -> Outcome:
    """Let one node's clock be ahead and another's behind, in a box of its own; kill a third node.

    As much as a start allows: nodes further off are refused, and the user told to set their clocks.
    """
    own, node = f"{bench.box}c", "node3"
    box("up", "--name", own, "--nodes", "4", "--clock", f"node1=+{APART_S}s", "--clock", f"node2=-{APART_S}s")
    try:
        return _hurt_in(own, bench, FOUR, lambda live: box("fail", node, "--how", "kill", "--name", own), node)
    finally:
        box("down", "--name", own)


def _hurt_in(name: str, bench: Bench, text: str, act: Callable[[Live], float | None], node: str) -> Outcome:
    try:
        return bench.hurt(text, act, arguments=in_box(name), deadline_s=150.0)
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
    # Its stale ranks disturb nobody, and the run grows back.
    Fault(6, "node back after a partition", "unplug, heal after restart", BACK,
          lost("unplug", heal_when=lambda live: live.wait_event("first_step", attempt=1), text=SLOW), BOX),
    Fault(7, "link away for 2 s", "unplug, heal", Expected(attempts=1),
          lost("unplug", heal_when=lambda live: time.sleep(2.0)), BOX),
    Fault(8, "ssh client killed", "kill -9 ssh to node2", Expected(detect_s=0.5, resume_s=20.0), ssh_killed,
          BOX),
    Fault(23, "nodes' clocks 100 s apart", "libfaketime; kill node3", SKEWED, clocks_apart, BOX),
)  # fmt: skip
