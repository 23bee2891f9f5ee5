"""The store of an attempt: it is reached at the address that it was bound to, and at no other."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from muster.jobs.basics.boot import module_argv
from muster.jobs.machine import ports

pytestmark = pytest.mark.command

ELSEWHERE = "127.0.0.2"  # all of 127.0.0.0/8 is this host
WAIT = timedelta(seconds=20)


@pytest.fixture(params=[[], pytest.param(["--whole"], marks=pytest.mark.slow)], ids=["bare", "whole"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a store that listens at ELSEWHERE, in a process of its own."""
    with ports.bind(ELSEWHERE, backlog=16) as listening:
        number: int = listening.getsockname()[1]
        descriptor = listening.fileno()
        argv = [
            *module_argv(sys.executable, "muster.jobs.node.store"),
            "--fd",
            str(descriptor),
            "--parent",
            str(os.getpid()),
            *request.param,
        ]
        store = subprocess.Popen(argv, pass_fds=[descriptor])
    yield number
    store.kill()
    store.wait()


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
