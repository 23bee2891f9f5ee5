"""The kernel's accounts of this process."""

import gc
import mmap

from muster.jobs.machine import resident

MB = 2**20
SIZE = 64 * MB


def test_own_memory_counts_what_was_taken() -> None:
    gc.collect()  # what other tests have left is not given back meanwhile
    before = resident.own_share()
    taken = bytearray(b"x" * 2**25)
    assert 2**25 * 0.9 < resident.own_share() - before < 2**25 * 1.2
    del taken


def test_a_peak_is_seen_and_forgotten():
    resident.give_back()
    assert resident.forget_peak()
    before, peak = resident.status("VmRSS", "VmHWM")
    with mmap.mmap(-1, SIZE) as taken:
        for page in range(0, SIZE, mmap.PAGESIZE):
            taken[page] = 1
        (during,) = resident.status("VmRSS")
    after, highest = resident.status("VmRSS", "VmHWM")
    assert abs(peak - before) < 8 * MB
    assert during - before > 0.9 * SIZE
    assert after - before < 0.5 * SIZE
    assert highest - before > 0.9 * SIZE
    assert resident.forget_peak()
    (forgotten,) = resident.status("VmHWM")
    assert forgotten < highest - 0.5 * SIZE


def test_a_kernel_without_an_account_has_0_of_it(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    12 kB\n")
    monkeypatch.setattr(resident, "STATUS", tmp_path / "status")
    monkeypatch.setattr(resident, "CLEAR_REFS", tmp_path / "gone" / "clear_refs")
    assert resident.status("VmHWM", "VmRSS") == [0, 12 * 1024]
    assert not resident.forget_peak()
