"""The submitit transport: submitit's tasks start the agents, and this supervisor is a child of the first task.

This process starts node 0's agent. A file in the run folder tells the other tasks where to dial
(slurm/submitit_job.py).
"""

from collections.abc import Collection, Sequence
from typing import Final

from muster.jobs.basics.errors import RefusedError, UnreachableError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.transports.base import Gate, agent_argv
from muster.launch.transports.child import Child
from muster.launch.transports.dialled import Dialled, Starter
from muster.launch.transports.ssh_command import last_said
from muster.launch.wire.keys import SECRET
from muster.slurm.submitit_job import WAIT_S, publish

LOOPBACK: Final = "127.0.0.1"


class Submitit(Dialled):
    """Agents of submitit's tasks."""

    def __init__(self, nodes: Sequence[str], *, run: RunDir, python: str, code: str | None) -> None:
        self.agent = agent_argv(python, code)
        self._arguments: list[str] = []
        super().__init__(
            "submitit",
            len(nodes),
            run=run,
            starter=Starter(argv=self._own),
            towards=nodes[-1] if len(nodes) > 1 else "",
            listen=LOOPBACK if len(nodes) == 1 else "",
            patience_s=WAIT_S,
        )

    async def start(self, gate: Gate) -> None:
        """Listen, start node 0's agent, and publish the address for the other tasks."""
        await super().start(gate)
        publish(self.run, {"arguments": self._arguments, "environment": {SECRET: self._listener.secret}})

    async def restart(self, slot: int, gate: Gate) -> None:
        """Refuse, because submitit starts each task only once.

        Raises:
            RefusedError: always.
        """
        raise RefusedError(
            f"node {slot}: submitit starts a node's agent only once; continue on fewer nodes (restart.min_nodes), "
            "with spares (restart.spares), or through --on slurm"
        )

    async def close(self, lost: Collection[int]) -> None:
        """Stop listening, and remove the published address."""
        self.run.rendezvous.unlink(missing_ok=True)
        await super().close(lost)

    def _own(self, connect: str, _: int | None) -> list[str]:
        self._arguments = ["--connect", f"{LOOPBACK}:{connect.rpartition(':')[2]}" if self.listen else connect]
        return [*self.agent, "--node", "0", *self._arguments]

    async def _watch(self, starter: Starter, child: Child, place: int, gate: Gate) -> None:
        code = await child.outcome()
        gate.failed(0, UnreachableError(f"node 0: its agent ended with code {code}: {last_said(child.errors)}"))
