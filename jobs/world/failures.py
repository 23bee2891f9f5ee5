"""Distinguish victims from culprits: decide whether an exception was caused only by the loss of another rank.

The patterns match messages of gloo, NCCL and the store in torch 2.11 to 2.13. A rank that reports a lost connection is
a victim if any other rank failed for a reason of its own.
"""

import re
from typing import Final

from muster.ddp.timeouts import CollectiveTimeoutError
from muster.jobs.basics.errors import StartTimeoutError
from muster.pipe.wires.failures import StageFailedError

# Messages of the transports when a peer is gone or silent.
LOST: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)"
    r"|closed by peer|reset by peer|broken pipe|socket closed|read error|write error"
    r"|recvvalue failed|sendbytes failed|recvbytes failed|failed to recv|failed to send"
    r"|timed out waiting|wait timeout|watchdog caught collective operation timeout|operation timed out"
    r"|remote process (has )?(exited|terminated)|ncclremoteerror|peer gone|communicator was aborted|nccl communicator"
    r"|no route to host|network is unreachable|connect timeout",
    re.IGNORECASE,
)
# Such a message counts only in an exception of torch's transports: a user's own exception may contain the same words.
TRANSPORTS: Final = re.compile(
    r"gloo|nccl|tcpstore|c10d|store|pair\.cc|unbound_buffer|socket|processgroup", re.IGNORECASE
)


def is_lost_connection(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, shows that another rank failed, is gone or is silent."""
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
