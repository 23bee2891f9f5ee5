"""Fixtures for all tests."""

import asyncio
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.box import BoxUser, LiveBox
from support.cpu_seconds import spent
from support.live import LiveRun
from support.programs import Programs

# A continuous build tries the same examples every time; everywhere else new ones are drawn. How long one takes says how
# busy the machine is.
settings.register_profile(
    "ours",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ours")

NEEDS_PACKAGES = {"sshd", "without_a_cluster"}  # fixtures that start what a bare machine has not: sshd, pdsh, Slurm

ROOT = Path(__file__).parent.parent
ONE_ASKS = Lock()  # of the threads that have work done ahead of the tests
LOOP_S = 40.0  # how long a test that is a coroutine may take
OnRanks = Callable[..., list[Any]]
# Settings of whoever runs the tests that would change what the tests see: job systems, terminals, launchers, languages.
FOREIGN = ("MUSTER_", "SLURM_", "PMI_", "OMPI_", "LC_", "NCCL_", "GLOO_", "TORCHELASTIC_", "PDSH_", "SBATCH_", "SRUN_")
FOREIGN_NAMES = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"}
FOREIGN_NAMES |= {"MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "LANGUAGE", "MPLBACKEND", "MATPLOTLIBRC", "TZ"}


def pytest_configure() -> None:
    """Make the tests independent of the environment of whoever runs them.

    nohup and background scripts ignore Ctrl-C and SIGHUP, which is inherited.

    PyTorch's threads sleep while they wait for each other: on a busy machine, those that spin take five times as long.
    """
    for name in [each for each in os.environ if each in FOREIGN_NAMES or each.startswith(FOREIGN)]:
        del os.environ[name]
    os.umask(0o022)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_sessionstart() -> None:
    """Look for no garbage while modules are imported."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what was imported: that costs a tenth of the time of short tests.

    From here on, torch computes with one thread in this process, as in the ranks of `on_ranks`, whatever the machine
    and `OMP_NUM_THREADS`: sums of many threads have other last bits, and small operations would wait for the threads.
    """
    if "torch" in sys.modules:  # a bare machine runs the tests that need none
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the packages of a box, so that the README's test line works on a bare machine."""
    for item in items:
        if NEEDS_PACKAGES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.cluster)
        if any(item.get_closest_marker(name) for name in ("gpu", "cluster", "soak")):
            item.add_marker(pytest.mark.slow)
        unsteady = item.get_closest_marker("unsteady")
        if unsteady is not None and not (unsteady.args and isinstance(unsteady.args[0], str)):
            raise pytest.UsageError(f"{item.nodeid}: is marked unsteady without a reason; write unsteady('why')")


def require_gpus(count: int) -> None:
    """Skip the test on a machine with fewer than `count` CUDA devices."""
    import torch  # a bare machine runs the tests that need no torch

    devices = torch.cuda.device_count()
    if devices < count:
        pytest.skip(f"needs {count} CUDA devices, this machine has {devices}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are."""
    gpu = item.get_closest_marker("gpu")
    if gpu is not None:
        require_gpus(*gpu.args or (1,))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write the CPU seconds of each test into the file that `.ci/run` names."""
    file = os.environ.get("CPU_SECONDS")
    before = spent() if file else 0.0
    result = yield
    if file:
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(f"{spent() - before:.2f}\ttest\t{item.nodeid}\n")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in a loop of its own and under a deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), LOOP_S))
    return True


@pytest.fixture(scope="session")
def rank_server() -> Iterator[subprocess.Popen[str]]:
    """Start the process whose forks are ranks; it ends when the session does."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "rank_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:
        yield server
        server.stdin.close()


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test() -> Iterator[None]:
    """Kill the supervisors that a failed test left running; their ranks end with them.

    What is started later would inherit the signals that a supervisor in this process has blocked at its end.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    LiveRun.end_all()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(scope="session")
def box() -> Iterator[LiveBox]:
    """Four nodes with Slurm and shared storage; a test that breaks a node mends it."""
    made = LiveBox(f"t{os.getpid()}", "--slurm")
    yield made
    made.down()


@pytest.fixture(scope="session")
def apart_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveBox]:
    """Four nodes that do not share the folder of runs, `runs`."""
    runs = tmp_path_factory.mktemp("apart") / "runs"
    made = LiveBox(f"a{os.getpid()}", "--private-storage", "--runs", str(runs), runs=runs)
    yield made
    made.down()


@pytest.fixture
def user(box: LiveBox, tmp_path: Path) -> Iterator[BoxUser]:
    """A user of the box."""
    made = BoxUser(box, tmp_path)
    yield made
    made.close()


def asked(server: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the server of ranks; return its answer."""
    with ONE_ASKS:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer: dict[str, Any] = json.loads(server.stdout.readline())
    return answer


@pytest.fixture(scope="session")
def programs(rank_server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Start programs that have imported torch already."""
    return Programs(partial(asked, rank_server), tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def forked_supervisors(programs: Programs) -> Iterator[None]:
    """Let every `LiveRun` be a fork that has imported Muster already: 0.4 s of CPU time less. Its ranks are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveRun, "programs", programs)
        yield


@pytest.fixture
def on_ranks(rank_server: subprocess.Popen[str], request: pytest.FixtureRequest) -> OnRanks:
    """Return a caller: `on_ranks(n, function, **arguments)` runs a test file's function on n ranks, in one gloo group.

    The function takes its `World` first; arguments and results are JSON values. Returns the results in rank order.
    Fails with the tracebacks of all ranks that failed, or when `deadline_s` has passed. `group=False` makes no group.
    """

    def call(
        world_size: int, function: Callable[..., Any], *, deadline_s: float = 90.0, group: bool = True, **arguments: Any
    ) -> list[Any]:
        if request.node.get_closest_marker("gpu"):
            require_gpus(world_size)
        order = {
            "file": inspect.getsourcefile(function),
            "function": function.__name__,
            "world_size": world_size,
            "arguments": arguments,
            "deadline_s": deadline_s,
            "group": group,
        }
        answer = asked(rank_server, order)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(answer["errors"]) if text]
        assert not failed, "\n".join(failed)
        results: list[Any] = answer["results"]
        return results

    return call
