"""CUDA driver calls that torch does not offer: memory of other processes, and streams that wait for a value in memory.

The calls come from cuda-bindings, NVIDIA's package, which torch's builds for CUDA 13 install. Addresses and streams are
integers, as in torch. All calls apply to the current device's context.
"""

from importlib.util import find_spec
from typing import Any, Final

HANDLE_BYTES: Final = 64
PAGE_BYTES: Final = 2 << 20


def is_there() -> bool:
    """Return whether cuda-bindings is installed."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _driver() -> Any:
    from cuda.bindings import driver  # type: ignore[import-not-found]  # the import takes 60 ms, and needs a GPU build

    return driver


def _checked(answer: Any) -> Any:
    """Return the result of a driver call.

    Raises:
        RuntimeError: If the call failed.
    """
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA driver error: {getattr(error, 'name', error)}")
    return values[0] if values else None


def allocate(size_bytes: int) -> int:
    """Allocate memory of the current device, outside torch's allocator, because an IPC handle names a whole allocation.

    The size is rounded up to whole pages: smaller allocations share a page, and a process can map a page only once.
    """
    return int(_checked(_driver().cuMemAlloc(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES)))


def free(address: int) -> None:
    """Free memory."""
    _checked(_driver().cuMemFree(address))


def handle_of(address: int) -> bytes:
    """Return an IPC handle with which other processes on this host can map the memory."""
    return bytes(_checked(_driver().cuIpcGetMemHandle(address)).reserved)


def opened(handle: bytes) -> int:
    """Map another process's memory by its IPC handle; return the address in this process."""
    driver = _driver()
    named = driver.CUipcMemHandle()
    named.reserved = handle
    flag = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return int(_checked(driver.cuIpcOpenMemHandle(named, flag)))


def close(address: int) -> None:
    """Unmap memory that was mapped by `opened`."""
    _checked(_driver().cuIpcCloseMemHandle(address))


def register(address: int, size_bytes: int) -> int:
    """Register host memory for access by the device; return its device address."""
    driver = _driver()
    flags = int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)
    _checked(driver.cuMemHostRegister(address, size_bytes, flags))
    return int(_checked(driver.cuMemHostGetDevicePointer(address, 0)))


def unregister(address: int) -> None:
    """Unregister host memory from the device."""
    _checked(_driver().cuMemHostUnregister(address))


def copy(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Copy between device addresses with a copy engine, in the order of the stream."""
    if size_bytes:
        _checked(_driver().cuMemcpyDtoDAsync(target, source, size_bytes, stream))


def write(address: int, number: int, stream: int) -> None:
    """Write 32 bits in the order of the stream.

    A reader that sees the number also sees the data of all earlier copies in the stream.
    """
    _checked(_driver().cuStreamWriteValue32(stream, address, number, 0))


def wait(address: int, number: int, stream: int) -> None:
    """Make a stream wait until the 32-bit number at an address is at least `number`."""
    driver = _driver()
    at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    _checked(driver.cuStreamWaitValue32(stream, address, number, at_least))
