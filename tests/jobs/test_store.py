"""The store of an attempt: it is reached at the address that it was bound to, and at no other."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from muster.jobs.basics.boot import module_argv
from muster.jobs.machine import ports
from muster.jobs.node.store import LIBRARY
from support.live import wait_until

pytestmark = pytest.mark.command

ELSEWHERE = "127.0.0.2"  # all of 127.0.0.0/8 is this host
WAIT = timedelta(seconds=20)


@contextmanager
def store_of_programs(*options: str) -> Iterator[tuple[int, int]]:
    """Yield the port of a store that listens at ELSEWHERE, and the pid of its process."""
    with ports.bind(ELSEWHERE, backlog=16) as listening:
        number: int = listening.getsockname()[1]
        descriptor = listening.fileno()
        argv = [
            *module_argv(sys.executable, "muster.jobs.node.store"),
            "--fd",
            str(descriptor),
            "--parent",
            str(os.getpid()),
            *options,
        ]
        store = subprocess.Popen(argv, pass_fds=[descriptor])
    yield number, store.pid
    store.kill()
    store.wait()


@pytest.fixture(params=[[], pytest.param(["--whole"], marks=pytest.mark.slow)], ids=["bare", "whole"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with store_of_programs(*request.param) as (number, _):
        yield number


def test_a_store_that_is_bound_to_one_address_serves_there_and_nowhere_else(port: int) -> None:
    store = TCPStore(ELSEWHERE, port, is_master=False, timeout=WAIT)
    store.set("key", "value")
    assert TCPStore(ELSEWHERE, port, is_master=False, timeout=WAIT).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5.0):
        pass


def test_a_store_of_programs_loads_the_bindings_of_torch_and_not_its_python_modules() -> None:
    code = "import sys; from muster.jobs.node.store import bare; bare()(*sys.argv[1:], 0, is_master=True, "
    code += "wait_for_workers=False).set('key', 'value'); assert 'torch._tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, ELSEWHERE], check=True, timeout=60)


def test_it_is_loaded_when_a_program_loads_torch_without_waiting_for_its_connection() -> None:
    library = Path(torch.__file__).parent / LIBRARY
    with store_of_programs() as (_, pid):
        held = lambda: [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]  # noqa: E731
        wait_until(lambda: "anon_inode:inotify" in held(), "the store to wait")
        maps = Path(f"/proc/{pid}/maps")
        assert library.name not in maps.read_text()
        library.open("rb").close()
        wait_until(lambda: library.name in maps.read_text(), "the store to load torch")
