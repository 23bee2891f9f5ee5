"""A stub for benchmarks/thousand_nodes.py: one process that is a thousand agents, each on a connection of its own.

python thousand_stub.py ADDRESS:PORT NODES RANKS_PER_NODE        (the token comes in MUSTER_TOKEN)
"""

import asyncio
import json
import os
import sys
import time

LIMIT = 1 << 24


async def agent(node: int, ranks: int, address: str, port: int, code: str) -> None:
    """Speak the agent's side of the protocol for a node whose ranks arrive, join and end well."""
    reader, writer = await asyncio.open_connection(address, port, limit=LIMIT)

    def tell(*messages: dict[str, object]) -> None:
        writer.write("".join(json.dumps(message) + "\n" for message in messages).encode())

    hello = {"did": "hello", "node": node, "host": f"stub{node:04d}", "pid": 1, "pid_start": 1, "slurm_name": ""}
    hello |= {"address": "10.99.0.1", "python": "3.11.0", "torch": True, "cores": list(range(8)), "gpus": []}
    tell({"token": os.environ["MUSTER_TOKEN"]}, {**hello, "environ": {"PATH": "/usr/bin"}, "time": time.time()})
    while line := await reader.readline():
        message = json.loads(line)
        now = time.time()
        if message["do"] == "bye":
            return
        if message["do"] == "beat":
            tell({"did": "heartbeat", "sent": message["sent"], "heard": now, "time": now})
        elif message["do"] == "prepare":
            tell({"did": "prepared", "port": 4242, "addresses": [["eth1", "10.99.0.1"]]})
        elif message["do"] == "reach":
            reached = {"interface": "eth1", "address": "10.99.0.2", "why": "", "code": code}
            tell({"did": "reached", **reached, "storage": "shared", "run": message["run"], "storage_why": ""})
        elif message["do"] == "start":
            numbers = [start["rank"] for start in message["ranks"]]
            assert len(numbers) == ranks
            tell({"did": "started", "ranks": [[number, 2 + number] for number in numbers], "time": now})
            for report in ("arrived", "joined"):
                tell(*({"did": "report", "rank": number, "report": {"report": report}} for number in numbers))
            ended = {"did": "exited", "code": 0, "signal": None, "sent": None, "ended": now, "failure": {}}
            tell(*({**ended, "rank": number, "last_lines": []} for number in numbers))


async def main() -> None:
    """Be all agents."""
    address, _, port = sys.argv[1].partition(":")
    nodes, ranks, code = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    await asyncio.gather(*(agent(node, ranks, address, int(port), code) for node in range(nodes)))


if __name__ == "__main__":
    asyncio.run(main())
