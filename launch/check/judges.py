"""The checks of a node's answers, with one function per column of `muster check`. Pure.

Each function gets the node's answers, the job's expectations, and the values that most nodes have. Every problem is
shown with its remedy. A warning does not prevent a run, but the run may be slower than expected.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from muster.jobs.basics.errors import MusterError
from muster.launch.supervision.startup import SKEW_BAD_S, SKEW_WARN_S
from muster.launch.wire.messages import Hello
from muster.launch.wire.records import Facts

GOOD, UNKNOWN, WARNING, BAD = "good", "unknown", "warning", "bad"
MARKS: Final = {GOOD: "", UNKNOWN: "", WARNING: " !", BAD: " !!"}  # text appended to a cell of the table
CLOCK_SHOWN_S: Final = 0.5
FREE_BAD_MIB: Final = 100
FREE_WARN_MIB: Final = 1024
MEMORY_SHARE: Final = 0.7  # a node with less than this share of the usual free memory gets a warning
OPEN_FILES: Final = 1024
OF_JOB: Final = "python in the job file"
OF_SITE: Final = "interpreter in the site file"


@dataclass
class Answer:
    """The answers of one node. `error`: why its agent did not start, or ended early."""

    host: str
    error: MusterError | None = None
    hello: Hello | None = None
    facts: Facts = field(default_factory=lambda: Facts())
    ahead_s: float | None = None  # how far its clock is ahead of ours
    marked: bool | None = None  # whether its mark in the run folder could be read here
    no_master: str = ""  # for node 0: why it has no address that the others could reach


@dataclass(frozen=True)
class Expected:
    """The values that the job and this machine expect of every node."""

    code: str  # fingerprint of the code here
    ranks: tuple[int, ...]  # number of ranks on each node
    torch: bool  # ranks run Muster's functions, and the nodes can report which torch they will use
    python: str  # the key that names the ranks' Python, and its file
    device: str  # auto, cpu or cuda; "" for a user's program
    master: str  # "address:port", "" if unknown
    one_host: bool
    remote: bool
    run: str


@dataclass(frozen=True)
class NodeProperty:
    """One property of one node: the text to show, its state and, unless it is good, the reason and the remedy."""

    text: str
    state: str = GOOD
    why: str = ""


@dataclass(frozen=True)
class Usual:
    """The values that most nodes have, used to find the nodes that differ."""

    python: str
    torch: str | None
    cores: int
    available_mib: float
    gpus: tuple[str, ...]
    reach: int  # number of other nodes that tried to reach node 0
    reached: int  # number of them that succeeded

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Usual":
        """Return the most common value of each property. If two are equally common, the earlier node's is used."""
        tries = [answer.facts["connect"] for answer in answers[1:] if "connect" in answer.facts]
        return cls(
            python=_commonest([_minor(each) for each in _all(answers, "python")], ""),
            torch=_commonest([each for each in _all(answers, "torch") if each], None),
            cores=_commonest(_all(answers, "cores"), 0),
            available_mib=median([each["available_mib"] for each in _all(answers, "memory")] or [0]),
            gpus=_commonest([tuple(each) for each in _all(answers, "gpus")], ()),
            reach=len(tries),
            reached=sum(not why for why in tries),
        )


Judge = Callable[[int, Answer, Expected, Usual], NodeProperty]


def _python(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    version = answer.facts["python"]
    if _minor(version) != usual.python:
        why = f"runs Python {version}, but most nodes run {usual.python}; set one for all with {expected.python}"
        return NodeProperty(version, WARNING, why)
    return NodeProperty(version)


def _torch(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    version, where = answer.facts["torch"], answer.facts.get("executable", "its interpreter")
    if not expected.torch:
        return NodeProperty(version or "-")
    if version is None:
        install = "install it there" if expected.python == OF_JOB else "run ./setup.sh there"
        why = f"{where} has no torch, which the ranks need; {install}, or set {expected.python}"
        return NodeProperty("none", BAD, why)
    if version.partition("+")[0] != str(usual.torch).partition("+")[0]:
        why = f"has torch {version}, but most nodes have {usual.torch}; different versions may not work together"
        how = "" if expected.python == OF_JOB else ": ./setup.sh"
        return NodeProperty(version, BAD, f"{why}; install one version everywhere{how}")
    if version != usual.torch:
        return NodeProperty(
            version, WARNING, f"has a different build of torch ({version}) than most nodes ({usual.torch})"
        )
    return NodeProperty(version)


def _code(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    code = answer.facts["code"]
    text = answer.facts.get("commit") or code
    if code != expected.code:
        root = answer.facts.get("root", "its folder")
        why = f"has a different version of Muster in {root} ({code}, here {expected.code})"
        return NodeProperty(text, BAD, f"{why}; run muster sync, or use the same commit on both")
    return NodeProperty(text)


def _program(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    if "program" in answer.facts.get("failed", {}):
        return _missing(answer, "program")
    why = answer.facts.get("program", "")
    if not why:
        return NodeProperty("ok")
    if expected.torch:
        return NodeProperty(
            "none", BAD, f"lacks the job's Python: {why}; install it there, or correct python in the job file"
        )
    return NodeProperty(
        "none", BAD, f"lacks the program of the command: {why}; copy it there, or set python or workdir"
    )


def _clock(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    if answer.ahead_s is None:
        return NodeProperty("?", WARNING, "did not answer a heartbeat, so its clock was not compared")
    text = f"{answer.ahead_s:+.1f} s" if abs(answer.ahead_s) >= CLOCK_SHOWN_S else "ok"
    do = "set it, and keep it synchronized: chronyc makestep, or timedatectl set-ntp true"
    if abs(answer.ahead_s) > SKEW_BAD_S:
        return NodeProperty(text, BAD, f"its clock is off by {answer.ahead_s:+.0f} s; {do}")
    if abs(answer.ahead_s) > SKEW_WARN_S:
        return NodeProperty(text, WARNING, f"its clock is off by {answer.ahead_s:+.1f} s; {do}")
    return NodeProperty(text)


def _network(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    route = answer.facts["route"]
    if route is None:
        why = (
            f"has no route to the master {expected.master}; give an address that it reaches: --master-addr, or --iface"
        )
        return NodeProperty("none", BAD, why)
    interface, address = route
    if interface == "lo" and not expected.one_host:
        why = f"it reaches the master {expected.master} through lo, which the other nodes cannot reach"
        return NodeProperty(f"lo {address}", BAD, f"{why}; give an address of node 0 that they reach: --master-addr")
    return NodeProperty(f"{interface} {address}")


def _master(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    if not expected.one_host and (answer.facts.get("route") or [""])[0] == "lo":
        return NodeProperty("-", UNKNOWN)  # the previous column reports the fault
    why = answer.facts["connect"]
    nobody = usual.reach > 1 and not usual.reached
    if node == 0 and nobody:
        firewall = "open its firewall for the other nodes, or give another network: --iface or --master-addr"
        return NodeProperty("unreached", BAD, f"no other node reaches it at {expected.master}; {firewall}")
    if not why:
        return NodeProperty("ok")
    if nobody:
        return NodeProperty(
            "no", WARNING, f"cannot reach the master at {expected.master}: {why}; nor can any other node"
        )
    firewall = "open the firewall between the nodes, or give another network: --iface or --master-addr"
    return NodeProperty("no", BAD, f"cannot reach the master at {expected.master}: {why}; {firewall}")


def _storage(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    storage = answer.facts["storage"]
    if storage["where"] == "none":
        return NodeProperty("none", BAD, f"cannot store the run: {storage['why']}; choose a folder with --runs DIR")
    if storage["where"] == "apart":
        why = f"cannot see {expected.run}: logs and metrics come over the network, and failover across nodes is off"
        return NodeProperty("apart", WARNING, f"{why}; to share storage, name a shared folder with --runs DIR")
    if answer.marked is False:
        why = f"reads {expected.run}, but its files there are not visible here; is it mounted from another place?"
        return NodeProperty("one way", BAD, f"{why} choose a folder with --runs DIR that all share")
    return NodeProperty("shared")


def _free(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    storage = answer.facts.get("storage")
    if storage is None or "free_mib" not in storage:
        return NodeProperty("?", UNKNOWN)  # the previous column gives the reason
    free, path = storage["free_mib"], storage["path"]
    if free < FREE_WARN_MIB:
        state = BAD if free < FREE_BAD_MIB else WARNING
        return NodeProperty(
            _mib(free), state, f"has {_mib(free)} free in {path}; free some space, or choose --runs DIR"
        )
    return NodeProperty(_mib(free))


def _cores(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    cores = answer.facts["cores"]
    ranks = expected.ranks[node]
    if cores < ranks and expected.remote:
        why = f"has {cores} cores for {ranks} ranks, which will slow each other down; lower ranks_per_node"
        return NodeProperty(str(cores), WARNING, why)
    if cores < usual.cores:
        return NodeProperty(
            str(cores), WARNING, f"has {cores} cores, but most nodes have {usual.cores}: the others will wait for it"
        )
    return NodeProperty(str(cores))


def _memory(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    memory = answer.facts["memory"]
    text = f"{_mib(memory['available_mib'])} of {_mib(memory['total_mib'])}"
    if memory["available_mib"] < usual.available_mib * MEMORY_SHARE:
        why = f"has {_mib(memory['available_mib'])} of memory free, but most nodes have {_mib(usual.available_mib)}"
        return NodeProperty(text, WARNING, f"{why}; see which processes use it: ps aux --sort -rss")
    return NodeProperty(text)


def _gpus(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    gpus = answer.facts["gpus"]
    text = f"{len(gpus)} x {gpus[0]}" if gpus else "-"
    if expected.device == "cpu":
        return NodeProperty(text)
    bad = BAD if expected.torch else WARNING  # a user's program need not use GPUs on every node
    if not gpus and (usual.gpus or expected.device == "cuda"):
        wanted = "the job's device is cuda" if expected.device == "cuda" else "most nodes have one"
        return NodeProperty(
            "none",
            bad,
            f"has no GPU, but {wanted}; run nvidia-smi there, leave the node out, or set train.device=cpu",
        )
    if gpus and not usual.gpus:
        why = "has GPUs, but most nodes have none; ranks on CPU and GPU cannot run together: set train.device=cpu"
        return NodeProperty(text, bad, why)
    if tuple(gpus) != usual.gpus:
        return NodeProperty(text, WARNING, f"has {text}, but most nodes have {len(usual.gpus)} x {usual.gpus[0]}")
    return NodeProperty(text)


def _files(node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    limits = answer.facts["limits"]
    soft = limits["open_files"]
    if 0 <= soft < OPEN_FILES:
        return NodeProperty(
            str(soft), WARNING, f"allows {soft} open files, which many ranks or data workers exceed; raise ulimit -n"
        )
    return NodeProperty("ok")


def _missing(answer: Answer, fact: str, state: str = WARNING) -> NodeProperty:
    why = answer.facts.get("failed", {}).get(fact, "its agent did not report it")
    if answer.error is not None:
        return NodeProperty("?", UNKNOWN)  # the first column gives the reason
    return NodeProperty("?", state, f"cannot determine its {NAMES.get(fact, fact)}: {why}")


def _all(answers: Iterable[Answer], fact: str) -> list[Any]:
    return [value for answer in answers for name, value in answer.facts.items() if name == fact]


def _commonest(values: Sequence[Any], default: Any) -> Any:
    return Counter(values).most_common(1)[0][0] if values else default


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _mib(mib: float) -> str:
    return f"{mib / 1024:,.0f} GiB" if mib >= 10_240 else f"{mib / 1024:,.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


NAMES: Final = {"route": "network", "connect": "route to the master", "limits": "limits on open files"}
OF_MASTER: Final = ("route", "connect")  # facts that nodes are asked for only once the master's address is known
# {column: (the fact that it shows, or "", and the function that judges it)}
COLUMNS: Final[dict[str, tuple[str, Judge]]] = {
    "python": ("python", _python),
    "torch": ("torch", _torch),
    "code": ("code", _code),
    "program": ("", _program),
    "clock": ("", _clock),
    "network": ("route", _network),
    "master": ("connect", _master),
    "runs": ("storage", _storage),
    "free": ("", _free),
    "cores": ("cores", _cores),
    "memory": ("memory", _memory),
    "GPUs": ("gpus", _gpus),
    "files": ("limits", _files),
}


def judged(title: str, node: int, answer: Answer, expected: Expected, usual: Usual) -> NodeProperty:
    """Return the cell of a node in a column."""
    fact, judge = COLUMNS[title]
    if answer.hello is None:
        return NodeProperty("-", UNKNOWN)
    if fact in OF_MASTER and not expected.master:
        return (
            NodeProperty("none", BAD, answer.no_master)
            if fact == "route" and answer.no_master
            else NodeProperty("?", UNKNOWN)
        )
    if fact and fact not in answer.facts:
        return _missing(answer, fact, BAD if fact == "gpus" and expected.device == "cuda" else WARNING)
    return judge(node, answer, expected, usual)
