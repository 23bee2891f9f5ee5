import pytest
import torch.distributed as dist

from muster.ddp.timeouts import CollectiveTimeoutError
from muster.jobs.basics.errors import RefusedError, StartTimeoutError
from muster.jobs.world.failures import is_lost_connection

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


# Texts seen when a peer was killed, stopped or never came: gloo, the store and NCCL, torch 2.11 to 2.13.
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:1167. This is typically caused by a remote worker"),
        RuntimeError(GLOO + "Read error [10.10.1.2]:4711: Connection reset by peer"),
        RuntimeError(
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
        ),
        RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error: Connection refused"),
        dist.DistNetworkError("Connection was closed before receiving: recvValue failed on SocketImpl(fd=12)"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        dist.DistStoreError("wait timeout after 60000ms, keys: /muster/arrived/1"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2027, remote process exited or network error"),
        dist.DistBackendError(
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
        ),
        StartTimeoutError("rank 1 of 2 did not arrive"),
        ConnectionResetError(104, "Connection reset by peer"),
        CollectiveTimeoutError("rank 0: synchronization 3: bucket 2 of 3 (b ... a; 25 MB) was not entered by rank 1"),
    ],
)
def test_the_loss_of_a_peer_is_told_by_its_text(error):
    assert is_lost_connection(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        RuntimeError("database: connection closed by peer"),
        ValueError("connection reset by peer"),
        RefusedError("data digits of rank 1 differs from rank 0's"),
        RuntimeError("1 of 9 parameters got no gradient on any rank: head.bias; set find_unused_parameters=True"),
        MemoryError(),
    ],
)
def test_a_failure_of_its_own_is_not_the_loss_of_a_peer(error):
    assert not is_lost_connection(error)


def test_a_wrapped_loss_is_still_a_loss():
    error = ValueError("cannot save")
    error.__cause__ = RuntimeError(GLOO + "Connection closed by peer")
    assert is_lost_connection(error)
