"""The entry point of the agent that runs on each node: greet the supervisor, then import the rest and serve.

It is started as `python -I launch/boot.py launch.agent ...`, so that a user's own `jobs/` cannot shadow ours.
All of the user's data arrives over the channel, none on the command line. The channel uses the agent's standard input
and output or, with --connect, a TCP connection that the agent dials. Over TCP, both ends first prove that they have
this node's key (jobs/basics/handshake.py), and ignore all other data until then. Then `launch/node/serve.py` takes
over.

If one machine starts 64 agents, their start-up times add up before the last one says hello. So the code before the
hello imports only modules that Python itself has loaded: json costs 5 ms, socket 4 ms, all of this code 1 ms. The other
imports (40 ms) wait for the supervisor's first message, which follows when every agent has said hello.
"""

import os
import select
import stat
import sys
import time

from muster.launch.common.host import identity, visible_gpus
from muster.launch.wire.keys import KEY, SECRET

DIAL_PAUSE_S = 0.2
ANSWER_S = 10.0  # time for the other end to prove that it is the supervisor
DIAL_EACH_S = 3.0  # per address: one of the supervisor's addresses may drop packets silently
DIAL_TIMEOUT_S = 60.0
# as in jobs/basics/exits.py, which is not imported because importing it would double the start-up time
UNREACHABLE, REFUSED, STOPPED = 69, 78, 130
LONGEST_SECRET = 256
WORD_S = 600.0  # time limit for the supervisor's first message; it first waits for the slowest node's hello or failure
ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), ord('"'), ord("\\"))}
# the plan for this node depends on these variables
PASSED_ON = ("PATH", "PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

TYPE_CHECKING = False  # importing typing costs 5 ms
if TYPE_CHECKING:
    import socket

Options = dict[str, str]


def main() -> None:
    """Greet the supervisor, then serve it."""
    options = parse(sys.argv[1:])
    try:
        carrier = greet(options)
        select.select([max(carrier, 0)], [], [], WORD_S)
        from muster.launch.node.serve import serve
    except ConnectionError:
        sys.exit(UNREACHABLE)  # the supervisor is gone, so there is nobody to report to
    except KeyboardInterrupt:
        raise gave_up(STOPPED, f"{os.uname().nodename}: stopped by Ctrl-C before the run began") from None

    rank_parent = int(options["rank-parent-fd"]) if "rank-parent-fd" in options else None
    lease_s = float(options.get("lease-s", 0))
    code = serve(node_of(options["node"]), carrier, rank_parent, lease_s, options.get("alone", ""))
    if options.get("end-as") == "run":  # a user started this agent by hand and sees its exit code
        sys.exit(code)


def greet(options: Options) -> int:
    """Send the hello message; return the descriptor of its socket, or -1 for the standard streams."""
    node = node_of(options["node"])
    if "connect" not in options:
        os.write(1, line(hello("")))
        return -1
    import socket

    key = key_of(node, options)
    addresses, timeout_s = options["connect"].split(","), float(options.get("dial-timeout-s", DIAL_TIMEOUT_S))
    by_hand, here = options.get("end-as") == "run", f"muster agent on {os.uname().nodename}: node {node}"
    if by_hand:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + timeout_s))
        print(f"{here} tries to reach node 0 at {' or '.join(addresses)} until {until}", file=sys.stderr)
    connection = dial(addresses, node, key, timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(line(hello(connection.getsockname()[0])))
    if by_hand:
        print(f"{here} has reached node 0 and waits for the other nodes", file=sys.stderr)
    return connection.detach()


def key_of(node: int, options: Options) -> str:
    """Return this node's key, either given or derived from the run's secret."""
    key, secret = os.environ.pop(KEY, ""), os.environ.pop(SECRET, "")
    if "secret-file" in options:
        secret = read_secret(options["secret-file"])
    if not key and not secret:
        raise gave_up(REFUSED, f"{os.uname().nodename}: has neither {KEY} nor {SECRET}; paste the whole line")
    from muster.jobs.basics.handshake import node_key

    return key or node_key(secret, node)


def parse(words: list[str]) -> Options:
    """Read `--name value` pairs, written by one of our transports."""
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def node_of(text: str) -> int:
    """Return the node's number; `slurm` stands for the number that Slurm gave this task."""
    return int(os.environ["SLURM_NODEID"] if text == "slurm" else text)


def line(message: "dict[str, object]") -> bytes:
    """Encode a message as one line, as the channel does."""
    return (spell(message) + "\n").encode(errors="replace")


def spell(value: object) -> str:
    """Encode plain values as JSON (RFC 8259) without importing json, which costs 5 ms."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(str(name))}: {spell(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spell, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value.translate(ESCAPES)}"' if isinstance(value, str) else repr(value)


def read_secret(path: str) -> str:
    """Read the run's secret from a file owned by this user or root; if that fails, exit with advice."""
    host = os.uname().nodename
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
                raise gave_up(REFUSED, f"{host}: {path} belongs to user {status.st_uid}, expected you; it was not used")
            return os.read(descriptor, LONGEST_SECRET).decode("ascii", errors="replace").strip()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise gave_up(
            REFUSED,
            f"{host}: cannot read {path}: {error.strerror}; with this transport the run folder must be on storage that "
            "every node sees: choose one with --runs DIR, or use --on ssh",
        ) from error


def dial(addresses: list[str], node: int, key: str, timeout_s: float) -> "socket.socket":
    """Dial the addresses until the supervisor answers and proves its identity; on failure exit with the reason."""
    from muster.jobs.basics.handshake import HandshakeError, TurnedAwayError

    deadline = time.monotonic() + timeout_s
    why, where = "", " or ".join(addresses)
    while time.monotonic() < deadline:
        strangers = 0
        for address in addresses:
            try:
                return meet(address, node, key, min(timeout_s, DIAL_EACH_S))
            except TurnedAwayError as error:
                raise gave_up(
                    REFUSED, f"{os.uname().nodename}: the supervisor at {where} refuses this agent: {error}"
                ) from error
            except HandshakeError as error:
                strangers, why = strangers + 1, str(error)
            except OSError as error:
                why = error.strerror or str(error)
        if strangers == len(addresses):
            raise gave_up(
                REFUSED,
                f"{os.uname().nodename}: the program that answers at {where} {why}, so this agent ends; paste the "
                "lines of one muster cmd, and let no other program use that port",
            )
        if is_abandoned():
            sys.exit(UNREACHABLE)
        time.sleep(DIAL_PAUSE_S)
    raise gave_up(UNREACHABLE, f"{os.uname().nodename}: no supervisor at {where} within {timeout_s:g} s: {why}")


def meet(address: str, node: int, key: str, timeout_s: float) -> "socket.socket":
    """Connect to an address and run the handshake, in which both ends prove that they have the key.

    Raises:
        OSError: if nothing answers at the address.
        HandshakeError: if something other than the supervisor answers.
        TurnedAwayError: if the supervisor refuses this agent.
    """
    import socket

    from muster.jobs.basics.handshake import AgentSide

    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    try:
        if connection.getsockname() == connection.getpeername():
            raise OSError("the connection leads back to this process")  # the kernel chose the dialled port as ours
        connection.settimeout(ANSWER_S)
        end = AgentSide(key, node, address)
        connection.sendall(end.greeting())
        connection.sendall(end.answer(read_line(connection)))
        end.check_welcome(read_line(connection))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def read_line(connection: "socket.socket") -> bytes:
    """Read one line of the handshake. The supervisor sends nothing more until we answer.

    Raises:
        OSError: if the connection ends, because the supervisor expects no agent now or another program has answered.
    """
    from muster.jobs.basics.handshake import LONGEST

    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST:
        data = connection.recv(LONGEST - len(line))
        if not data:
            raise OSError("hung up")
        line += data
    return line


def is_abandoned() -> bool:
    """True when nobody reads our standard error any more: the pdsh or srun that started us has ended."""
    watch = select.poll()
    watch.register(2, 0)
    return bool(watch.poll(0))


def gave_up(code: int, text: str) -> SystemExit:
    """Print the reason on standard error, which every transport brings back; return the exception to raise."""
    print(f"muster agent on {text}", file=sys.stderr)
    return SystemExit(code)


def hello(address: str) -> dict[str, object]:
    """Describe this node for the supervisor; look for torch without importing it.

    `address` is the local address of the connection to the supervisor. Over ssh it comes from SSH_CONNECTION.
    """
    over_ssh = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "message": "Hello",
        **identity(),
        "slurm_name": os.environ.get("SLURMD_NODENAME", ""),
        "address": address or (over_ssh[2] if len(over_ssh) == 4 else ""),
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "torch": any(finder.find_spec("torch", None) for finder in sys.meta_path),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": visible_gpus(),
        "environ": {name: os.environ[name] for name in PASSED_ON if name in os.environ},
        "time": time.time(),
    }


if __name__ == "__main__":
    main()
