"""The smoke test of `muster check`: two nodes exchange data like the ranks of a job, and the network used is reported.

    hosts, site, environment of the job ──→ a `bench:` run on two nodes, one rank each ──→ rows, logs ──→ SmokeResult
                                            (all_reduce, every element checked)             run folder removed

It starts ranks like `muster run`, so it finds faults that querying a node cannot reveal: a firewall between the ranks'
ports, a wrong NCCL_SOCKET_IFNAME, a host channel adapter that is down. On CPU nodes the same code tests gloo.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import MusterError, UsageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.follow import tail_lines
from muster.launch.common.program_words import COMMAND_LINE
from muster.launch.plan.plan import Context
from muster.launch.submit.prepare import prepare
from muster.launch.submit.request import Request

if TYPE_CHECKING:
    from muster.launch.check.judges import Answer

NODES: Final = 2
BYTES: Final = 4 << 20
LAST_LINES: Final = 10_000  # lines read from each rank's log: NCCL names its network, then prints a line per channel
VERBOSE: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,BOOTSTRAP"}
CHOICES: Final = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_NET", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME")
REMEDY: Final = (
    "set NCCL_SOCKET_IFNAME or NCCL_IB_HCA under env: of the site file, and open the ports between the nodes"
)
_USING: Final = re.compile(r"NCCL INFO (Bootstrap|NET/\w+) ?: Using (.+)")
_CHOSEN: Final = re.compile(r"NCCL INFO (?:\w+ )*?Using network (\w+)")


@dataclass(frozen=True)
class SmokeResult:
    """The outcome. `why` is the reason for a failure, "" if the test passed.

    `networks` are the networks in NCCL's log, by role. `interfaces` are the interfaces of the routes between the nodes.
    `settings` are the variables that choose a network.
    """

    backend: str
    hosts: tuple[str, ...]
    why: str = ""
    busbw: float | None = None  # GB/s
    time_us: float | None = None
    interfaces: tuple[str, ...] = ()
    networks: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def sentence(self) -> str:
        """Describe the outcome in one line."""
        pair = " and ".join(self.hosts)
        over = ", ".join(f"{role} {text}" for role, text in self.networks.items()) or ", ".join(
            dict.fromkeys(self.interfaces)
        )
        chosen = " ".join(f"{name}={value}" for name, value in self.settings.items())
        by = f"; {chosen}" if chosen else ""
        if self.why:
            return f"smoke test failed: {self.backend} between {pair}: {self.why}{by}"
        rate = f"{self.busbw:.3g} GB/s (busbw)" if self.busbw else "no rate"
        return f"smoke test ok: {self.backend} all_reduce of {BYTES >> 20} MB between {pair}: {rate} over {over}{by}"


def is_wanted(asked: bool | None, context: Context, answers: "Iterable[Answer]") -> bool:
    """Return whether to test: on request, or by default if there are several nodes, all with GPUs that the job uses.

    Raises:
        UsageError: if the test is requested, but the job has one node.
    """
    nodes = len(context.placement.nodes)
    if asked and nodes < NODES:
        raise UsageError("--smoke: tests two nodes, but this job has one; give --nodes 2, or leave it out")
    if asked is not None:
        return asked
    device = getattr(context.job.settings, "device", "")
    ours = context.entry is not None and device != "cpu"  # a user's program may have its own torch and backend
    return ours and nodes >= NODES and all(answer.facts.get("gpus") for answer in answers)


def smoke_test(request: Request, context: Context, *, gpus: bool) -> SmokeResult:
    """Run the test on the first two nodes of a request, with NCCL if `gpus`, and remove its run folder.

    Raises:
        MusterError: if the run cannot be prepared.
    """
    from muster.launch.submit.start import begin
    from muster.launch.supervision.console import Console

    backend = "nccl" if gpus else "gloo"
    prepared = prepare(as_bench(request, context, backend))
    run = prepared.context.run
    names = [node.host for node in prepared.context.placement.nodes]
    several = len(set(names)) < len(names)  # nodes of a simulated cluster share a host
    hosts = tuple(f"{name}-{node}" if several else name for node, name in enumerate(names))
    try:
        code = begin(prepared, Console(quiet=True))
        return read_smoke(run, SmokeResult(backend, hosts), code)
    except MusterError as error:
        return SmokeResult(backend, hosts, why=f"{error}; {REMEDY}")
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def as_bench(request: Request, context: Context, backend: str) -> Request:
    """Return the request of a small benchmark on two of the request's nodes, with the environment of its job."""
    from muster.jobs.spec import yamlfile

    job = context.job
    bench = {"operation": "all_reduce", "sizes": [BYTES], "launches": 1, "block_s": 0.1, "backend": backend}
    text = {
        "name": "smoke",
        "nodes": NODES,
        "env": {**VERBOSE, **job.env},
        "setup": list(job.setup),
        "start_timeout_s": job.start_timeout_s,
        "bench": {**bench, "device": "cuda" if backend == "nccl" else "cpu"},
    }
    unset: dict[str, Any] = {"program": (), "overrides": (), "nodes": None, "ranks_per_node": None}
    return replace(
        request, **unset, restart=None, name=None, job=COMMAND_LINE, job_text=yamlfile.dump(text), runs=request.runs
    )


def read_smoke(run: RunDir, result: SmokeResult, code: int) -> SmokeResult:
    """Complete a result from the run's records and logs. `code`: the exit code of the run."""
    from muster.collectives_bench.results.files import read_result
    from muster.collectives_bench.results.rows import rows_of

    lines = [line for rank in range(NODES) for line in _log(run, rank)]
    networks = networks_in(lines)
    try:
        records = read_result([run.path])
    except MusterError as error:
        return replace(result, networks=networks, why=f"{_first_failure(run, code) or error}; {REMEDY}")
    facts = [host for header in records.headers for host in header.hosts]
    known = {name: value for host in facts for name, value in host.environment.items() if name in CHOICES}
    wanted = "GLOO" if result.backend == "gloo" else "NCCL"
    result = replace(
        result,
        networks=networks,
        interfaces=tuple(host.interface for host in facts if host.interface),
        settings={name: value for name, value in known.items() if name.startswith(wanted)},
    )
    rows = rows_of(records)
    bad = next((row for row in rows if row.state != "ok" or row.wrong), None)
    if code or bad is not None or not rows:
        said = f"{bad.state}: {bad.reason}" if bad is not None else _first_failure(run, code)
        return replace(result, why=f"{said}; {REMEDY}")
    return replace(result, busbw=rows[0].busbw, time_us=rows[0].p50_us)


def networks_in(lines: Iterable[str]) -> dict[str, str]:
    """Return the networks in NCCL's log, such as {"Bootstrap": "eth0", "NET/IB": "mlx5_0:1/RoCE"}. Pure.

    If the log names the chosen network, the NET lines of other networks are ignored.
    """
    found: dict[str, str] = {}
    chosen = ""
    for line in lines:
        if using := _USING.search(line):
            found.setdefault(using[1], _names(using[2]))
        elif network := _CHOSEN.search(line):
            chosen = f"NET/{network[1]}"
    return {role: names for role, names in found.items() if role == "Bootstrap" or chosen in ("", role)}


def _names(text: str) -> str:
    """Return the interfaces or adapters in NCCL's list `[0]eth0:10.0.0.1<0> [1]mlx5_0:1/RoCE [RO]; OOB ...`."""
    words = re.sub(r"\[\w+\]", " ", text.partition(";")[0]).split()
    return " ".join(re.sub(r":[0-9a-fA-F.:%\w]*<\d+>$", "", word) for word in words)


def _log(run: RunDir, rank: int) -> list[str]:
    attempt = run.attempt(0)
    return [line for path in (attempt.out(rank), attempt.err(rank)) for line in tail_lines(path, LAST_LINES)]


def _first_failure(run: RunDir, code: int) -> str:
    from muster.launch.records.runstate import read_state

    state = read_state(run)
    return state.message or f"its ranks ended with code {code}"
