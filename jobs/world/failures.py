"""Telling a victim from a culprit: was this exception only the loss of another rank?

Texts of gloo, NCCL and the store, from torch 2.11 to 2.13. A rank that reports a lost connection is a victim if any
other rank failed for a reason of its own.
"""

import re
from typing import Final

from muster.ddp.timeouts import CollectiveTimeoutError
from muster.jobs.basics.errors import StartTimeoutError
from muster.pipe.wires.failures import StageFailedError

# What the transports say when a peer is gone or silent.
LOST: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)"
    r"|closed by peer|reset by peer|broken pipe|socket closed|read error|write error"
    r"|recvvalue failed|sendbytes failed|recvbytes failed|failed to recv|failed to send"
    r"|timed out waiting|wait timeout|watchdog caught collective operation timeout|operation timed out"
    r"|remote process (has )?(exited|terminated)|ncclremoteerror|peer gone|communicator was aborted|nccl communicator"
    r"|no route to host|network is unreachable|connect timeout",
    re.IGNORECASE,
)
# Where such a text counts: an exception of torch's transports, not a user's own that happens to say the same.
TRANSPORTS: Final = re.compile(
    r"gloo|nccl|tcpstore|c10d|store|pair\.cc|unbound_buffer|socket|processgroup", re.IGNORECASE
)


def is_lost_connection(error: BaseException) -> bool:
    """True when the error, or what caused it, is that another rank has failed, is gone or silent."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StartTimeoutError | CollectiveTimeoutError | ConnectionError | StageFailedError):
            return True
        if type(seen).__module__.startswith("torch") and "Dist" in type(seen).__name__ and LOST.search(str(seen)):
            return True
        if isinstance(seen, RuntimeError) and LOST.search(str(seen)) and TRANSPORTS.search(str(seen)):
            return True
        seen = seen.__cause__
    return False
