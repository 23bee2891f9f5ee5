"""The few calls of CUDA's driver that torch has no name for: memory of another process, streams that wait for a number.

They come from cuda-bindings, NVIDIA's own package, which torch's builds for CUDA 13 bring along. Addresses and streams
are whole numbers, as torch gives them; the current device's context is meant.
"""

from importlib.util import find_spec
from typing import Any, Final

HANDLE_BYTES: Final = 64
PAGE_BYTES: Final = 2 << 20


def is_there() -> bool:
    """True where cuda-bindings is installed."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _driver() -> Any:
    from cuda.bindings import driver  # type: ignore[import-not-found]  # 60 ms, and not there without GPUs

    return driver


def _checked(answer: Any) -> Any:
    """Return what a call gave.

    Raises:
        RuntimeError: it failed.
    """
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA's driver: {getattr(error, 'name', error)}")
    return values[0] if values else None


def allocate(size_bytes: int) -> int:
    """Take memory of the current device, beside torch's allocator: a handle names a whole allocation.

    Pages are taken whole: smaller allocations share one, which another process maps but once.
    """
    return int(_checked(_driver().cuMemAlloc(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES)))


def free(address: int) -> None:
    """Give memory back."""
    _checked(_driver().cuMemFree(address))


def handle_of(address: int) -> bytes:
    """Name memory for another process of this host."""
    return bytes(_checked(_driver().cuIpcGetMemHandle(address)).reserved)


def opened(handle: bytes) -> int:
    """Map memory that another process has named; return its address here."""
    driver = _driver()
    named = driver.CUipcMemHandle()
    named.reserved = handle
    flag = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return int(_checked(driver.cuIpcOpenMemHandle(named, flag)))


def close(address: int) -> None:
    """Unmap what was opened."""
    _checked(_driver().cuIpcCloseMemHandle(address))


def register(address: int, size_bytes: int) -> int:
    """Let the device read and write memory of the host; return its address there."""
    driver = _driver()
    flags = int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)
    _checked(driver.cuMemHostRegister(address, size_bytes, flags))
    return int(_checked(driver.cuMemHostGetDevicePointer(address, 0)))


def unregister(address: int) -> None:
    """Take memory of the host away from the device."""
    _checked(_driver().cuMemHostUnregister(address))


def copy(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Copy between addresses of devices, by a copy engine, after all that was given to the stream before."""
    if size_bytes:
        _checked(_driver().cuMemcpyDtoDAsync(target, source, size_bytes, stream))


def write(address: int, number: int, stream: int) -> None:
    """Write 32 bits once the stream comes there: what it copied before is seen by who sees the number."""
    _checked(_driver().cuStreamWriteValue32(stream, address, number, 0))


def wait(address: int, number: int, stream: int) -> None:
    """Hold a stream until the 32 bits at an address are `number` or more."""
    driver = _driver()
    at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    _checked(driver.cuStreamWaitValue32(stream, address, number, at_least))
