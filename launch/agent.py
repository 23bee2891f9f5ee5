"""The agent's first breath: one per node, it greets the supervisor before it imports what the rest of it needs.

Started as `python -I launch/boot.py launch.agent ...`, so that a user's own `jobs/` cannot shadow ours, and told
everything over its channel: nothing of the user's stands on its command line. The carrier is its standard input and
output, or, with --connect, a TCP connection that it dials and shows a token on. Then `launch/node/serve.py` takes over.

Of 64 nodes that are started from one machine the last has greeted when the sum of all starts is done. So nothing is
imported up to the greeting that Python has not imported already (json costs 5 ms, socket 4, where all of this costs 1),
and what comes after it, 40 ms, waits until the supervisor says a word: it does when everybody has greeted.
"""

import os
import select
import sys
import time

DIAL_PAUSE_S = 0.2
DIAL_EACH_S = 3.0  # one of several addresses of the supervisor may swallow packets
DIAL_TIMEOUT_S = 60.0
START_TICKS_FIELD = 19  # of /proc/PID/stat, counted after the name
UNREACHABLE, REFUSED = 69, 78  # of jobs/exits.py, whose dataclass costs as much as all else here
TOKEN = "MUSTER_TOKEN"
WRONG_TOKEN = b'{"do": "bye", "code": 78, "why": "wrong token"}\n'  # the supervisor's only word to one without it
WORD_S = 600.0  # for the supervisor's first word: until the slowest node has greeted, or has failed
ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), ord('"'), ord("\\"))}
PASSED_ON = ("PATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # what a plan for this node depends on

TYPE_CHECKING = False  # typing's own costs 5 ms
if TYPE_CHECKING:
    import socket

Options = dict[str, str]


def main() -> None:
    """Greet, then serve."""
    options = parse(sys.argv[1:])
    try:
        carrier = greet(options)
    except ConnectionError:
        sys.exit(UNREACHABLE)  # the supervisor has gone meanwhile, and nobody is left to hear of it
    select.select([max(carrier, 0)], [], [], WORD_S)
    if carrier >= 0 and is_refused(carrier):
        raise gave_up(
            REFUSED,
            f"{os.uname().nodename}: the supervisor at {options['connect']} does not know this token: the line is of "
            "another job, or of other options; print it again with muster cmd",
        )
    from launch.node.serve import serve

    keeper = int(options["keeper-fd"]) if "keeper-fd" in options else None
    lease_s = float(options.get("lease-s", 0))
    code = serve(node_of(options["node"]), carrier, keeper, lease_s, options.get("alone", ""))
    if options.get("end-as") == "run":  # somebody started this by hand, and looks at how it ends
        sys.exit(code)


def greet(options: Options) -> int:
    """Say hello over the carrier; return its socket's descriptor, or -1 for the standard streams."""
    node = node_of(options["node"])
    token = options.get("token") or os.environ.pop(TOKEN, "")
    if "connect" not in options:
        os.write(1, line(hello(node, "")))
        return -1
    import socket

    if "token-file" in options:
        token = read_token(options["token-file"])
    connection = dial(options["connect"].split(","), float(options.get("dial-timeout-s", DIAL_TIMEOUT_S)))
    greeting = hello(node, connection.getsockname()[0])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(line({"token": token}) + line(greeting))
    return connection.detach()


def is_refused(carrier: int) -> bool:
    """Look, without taking it, whether the first word of the supervisor is that the token is wrong."""
    import socket

    connection = socket.socket(fileno=carrier)
    try:
        return connection.recv(len(WRONG_TOKEN), socket.MSG_PEEK | socket.MSG_DONTWAIT) == WRONG_TOKEN
    except OSError:  # it has said nothing, or has gone: whoever serves it will see
        return False
    finally:
        connection.detach()


def parse(words: list[str]) -> Options:
    """Read `--name value` pairs; a transport of ours wrote them."""
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def node_of(text: str) -> int:
    """Return the node's number; `slurm` stands for the one that Slurm gave this task."""
    return int(os.environ["SLURM_NODEID"] if text == "slurm" else text)


def line(message: "dict[str, object]") -> bytes:
    """Spell a message as the channel does."""
    return (spell(message) + "\n").encode(errors="replace")


def spell(value: object) -> str:
    """Write plain values as JSON (RFC 8259)."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(str(name))}: {spell(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spell, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value.translate(ESCAPES)}"' if isinstance(value, str) else repr(value)


def read_token(path: str) -> str:
    """Read the token, or end with what to do."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (pathlib costs 8 ms)
            return file.read().strip()
    except OSError as error:
        host = os.uname().nodename
        raise gave_up(
            REFUSED,
            f"{host}: cannot read {path}: {error.strerror}; over this transport the run folder must be on storage that "
            "every node sees: choose one with --runs DIR, or use --on ssh",
        ) from error


def dial(addresses: list[str], timeout_s: float) -> "socket.socket":
    """Dial the supervisor at any of its addresses until one answers, or end."""
    import socket

    deadline = time.monotonic() + timeout_s
    why = ""
    while time.monotonic() < deadline:
        for address in addresses:
            host, _, port = address.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), timeout=min(timeout_s, DIAL_EACH_S))
                if connection.getsockname() == connection.getpeername():
                    raise OSError("it reached itself")  # dialled from the very port it dials
                connection.settimeout(None)
                return connection
            except OSError as error:
                why = error.strerror or str(error)
        if is_abandoned():
            sys.exit(UNREACHABLE)
        time.sleep(DIAL_PAUSE_S)
    where = " or ".join(addresses)
    raise gave_up(UNREACHABLE, f"{os.uname().nodename}: no supervisor at {where} within {timeout_s:g} s: {why}")


def is_abandoned() -> bool:
    """True when nobody can read our standard error any more: the pdsh or srun that started us has been ended."""
    watch = select.poll()
    watch.register(2, 0)
    return bool(watch.poll(0))


def gave_up(code: int, text: str) -> SystemExit:
    """Say why on standard error, which every transport brings home; return the end to raise."""
    print(f"muster agent on {text}", file=sys.stderr)
    return SystemExit(code)


def hello(node: int, address: str) -> dict[str, object]:
    """Say which node this is and what it has; looks for torch without importing it.

    `address` is the one that the supervisor reached this node by; ssh tells it in its own variable.
    """
    over_ssh = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "did": "hello",
        "node": node,
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


def identity() -> dict[str, object]:
    """Say which process on which host this is."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return {"host": os.uname().nodename, "pid": os.getpid(), "pid_start": int(fields[START_TICKS_FIELD])}


def visible_gpus() -> list[str]:
    """List this host's GPUs as CUDA_VISIBLE_DEVICES would: what the user left visible, else all device files."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    files = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()]  # noqa: PTH208
    return [str(number) for number, _ in enumerate(files)]


if __name__ == "__main__":
    main()
