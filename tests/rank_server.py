"""Runs functions of test files on real ranks: a process that has imported torch, run no operation, and forks.

One JSON line in:  {"file": ..., "function": ..., "world_size": n, "arguments": {...}, "deadline_s": s, "group": bool}
One JSON line out: {"results": [value or null, ...], "errors": [text or null, ...]}

It also runs whole programs, in forks that `support/programs.py` describes:

{"start": [FILE, ARGUMENT, ...], "env": {...}, "cwd": path, "files": [standard input, output, error],
 "descriptors": null or the path of a socket that gives them}  ->  {"pid": pid}
{"wait": pid, "deadline_s": s}  ->  {"code": exit status, negative after a signal}

Each rank is a fork in a process group of its own; at the deadline all are killed. Ranks that are left when one fails
are given a moment to fail too, then killed. Warnings are errors on ranks as they are in the tests.
"""

import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import hypothesis  # noqa: F401 - test files import these, 0.3 s of CPU time on every rank if not once here
import pytest  # noqa: F401
import rich.console  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.flop_counter

import muster.collectives_bench.catalog
import muster.jobs.spec.job
import muster.jobs.spec.load
import muster.jobs.spec.train
import muster.jobs.train.direct_run
import muster.jobs.train.flags
import muster.jobs.train.parallel.fsdp
import muster.jobs.train.verify  # noqa: F401
from muster.jobs.machine import linux
from muster.jobs.world.world import World

if torch.version.cuda is None:  # else the import starts CUDA, which forks could then not use
    import torch._inductor.compile_fx

AFTER_FAILURE_S = 5.0


def main() -> dict[str, Any] | None:
    """Serve requests until standard input closes. In the fork that is to be a program, return its request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is talk
    torch.set_num_threads(1)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # it flushes caches after every compilation, for a log
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.collect()
    gc.freeze()  # what is imported stays shared between the forks
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                return request
            answer = {"pid": pid}
        elif "wait" in request:
            answer = {"code": status_of(request["wait"], request["deadline_s"])}
        else:
            answer = serve(request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return None


def status_of(pid: int, deadline_s: float) -> int:
    """Wait for a program, which is killed at its deadline."""
    descriptor = os.pidfd_open(pid)
    if not select.select([descriptor], [], [], deadline_s)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_program(argv: list[str], files: list[str], cwd: str, env: dict[str, str], descriptors: str | None) -> None:
    """Run a program in this fork, as a new interpreter does."""
    linux.die_with_parent(os.getppid())
    os.setsid()
    for descriptor, path in enumerate(files):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if descriptors:
        with socket.socket(socket.AF_UNIX) as giver:  # it is 3, so they are 4 and those that follow
            giver.connect(descriptors)
            socket.recv_fds(giver, 1, 100)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = open(0)  # noqa: SIM115 - for as long as this process lives
    sys.orig_argv = [sys.executable, *argv]
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    module.__file__ = argv[0]
    exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), vars(module))


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of one request; return what they returned."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, pids = {}, []
        for rank in range(request["world_size"]):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                become(rank, writing, request, folder)
            os.close(writing)
            pipes[reading] = rank
            pids.append(pid)
        try:
            return collect(pipes, request["world_size"], request["deadline_s"])
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def collect(pipes: dict[int, int], world_size: int, deadline_s: float) -> dict[str, Any]:
    """Read every rank's answer until all have come or the deadline has."""
    answers: list[dict[str, Any] | None] = [None] * world_size
    unread = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + deadline_s
    with selectors.DefaultSelector() as selector:
        for reading in pipes:
            selector.register(reading, selectors.EVENT_READ)
        while selector.get_map() and (remaining_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                chunk = os.read(key.fd, 1 << 16)
                unread[key.fd] += chunk
                if chunk:
                    continue
                selector.unregister(key.fd)
                answer = json.loads(unread[key.fd]) if unread[key.fd] else {"error": "ended without an answer"}
                answers[pipes[key.fd]] = answer
                if "error" in answer:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
    for reading in pipes:
        os.close(reading)
    late = {"error": "was still running when its time was over"}
    full = [answer or late for answer in answers]
    return {"results": [each.get("result") for each in full], "errors": [each.get("error") for each in full]}


def become(rank: int, writing: int, request: dict[str, Any], folder: str) -> NoReturn:
    """Be one rank: call the function, write its answer, end."""
    answer: dict[str, Any]
    try:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # how few cores there are
        sys.stdin.close()
        world = World(rank, request["world_size"], None, torch.device("cpu"))
        if request["group"]:
            world = meet(world, folder)
        answer = {"result": load(Path(request["file"]), request["function"])(world, **request["arguments"])}
        json.dumps(answer)
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def meet(world: World, folder: str) -> World:
    """Make the process group of a request."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world.size),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=30),
    )
    dist.barrier()  # a rank that is done at once would close its connections while others still make theirs
    return World(world.rank, world.size, dist.group.WORLD, world.device)


def load(path: Path, function: str) -> Any:
    """Import a test file by its path and return one of its functions."""
    spec = importlib.util.spec_from_file_location(f"on_rank_{path.stem}", path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def leave() -> None:
    """End a program after all its own handlers. To free a thousand modules one by one takes 0.3 s of CPU time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__" and (request := main()):
    status = 1
    atexit.register(leave)
    try:
        run_program(request["start"], request["files"], request["cwd"], request["env"], request["descriptors"])
        status = 0
    except SystemExit as error:
        status = code if isinstance(code := (*error.args, 0)[0] or 0, int) else 1
        raise
    except KeyboardInterrupt:
        atexit.unregister(leave)  # the interpreter then ends by the signal
        raise
# Nothing follows: a session takes a program whose outermost frame has returned for one that came to its end.
