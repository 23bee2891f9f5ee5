import hashlib
import random
import socket
from pathlib import Path

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.errors import RefusedError, StorageError, UnreachableError, UsageError
from muster.jobs.data.download import download

BODY = random.Random(1).randbytes(3 * 2**20 + 17)
MD5 = hashlib.md5(BODY).hexdigest()


def test_a_file_arrives_whole_and_progress_ends_at_its_size(serve, tmp_path: Path):
    seen: list[tuple[int, int | None]] = []
    download(serve(BODY).url, tmp_path / "file", MD5, lambda done, total: seen.append((done, total)))
    assert (tmp_path / "file").read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_connection_that_breaks_off_is_resumed_where_it_stopped(serve, tmp_path: Path):
    served = serve(BODY, breaks=(2**20, 2**20 + 5))
    download(served.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == BODY
    assert served.ranges_asked == [None, f"bytes={2**20}-", f"bytes={2**21 + 5}-"]


def test_a_part_that_is_already_whole_is_only_checked(serve, tmp_path: Path):
    (tmp_path / "file.part").write_bytes(BODY)
    download(serve(BODY).url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_server_without_ranges_makes_it_start_over(serve, tmp_path: Path):
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    served = serve(BODY, ranges=False, breaks=(2**20,))
    download(served.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == BODY
    assert len(served.ranges_asked) == 2


@pytest.mark.parametrize(
    ("ranges", "breaks", "said", "kept"),
    [
        (True, (100, 0, 0, 0, 0), r"was lost after 100 of .*100 bytes are kept", 100),
        (False, (100, 50, 100, 50, 100, 50), "was lost after 50 of", 50),  # shrinks and grows, never beyond 100
    ],
)
def test_a_server_that_keeps_breaking_off_is_given_up_and_what_came_is_kept(
    serve, ranges, breaks, said, kept, tmp_path: Path
):
    served = serve(BODY, ranges=ranges, breaks=breaks)
    with pytest.raises(UnreachableError, match=said) as caught:
        download(served.url, tmp_path / "file", MD5)
    assert caught.value.exit_code == exits.UNREACHABLE
    assert (tmp_path / "file.part").read_bytes() == BODY[:kept]
    assert not (tmp_path / "file").exists()


def test_a_wrong_checksum_is_refused_and_the_part_removed(serve, tmp_path: Path):
    with pytest.raises(RefusedError, match=f"md5 {MD5}, expected {'0' * 32}"):
        download(serve(BODY).url, tmp_path / "file", "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_dead_network_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as bound:  # bound but not listening: refused
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/file"
        with pytest.raises(UnreachableError, match="connection refused; check the network") as caught:
            download(url, tmp_path / "file", MD5)
    assert caught.value.exit_code == 69


def test_a_missing_page_names_the_answer(serve, tmp_path: Path):
    with pytest.raises(UnreachableError, match="the server answered 416"):
        download(serve(b"").url, tmp_path / "file", MD5)


def test_a_full_disk_is_a_storage_error(serve, tmp_path: Path):
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"file\.part: cannot write here: No space left") as caught:
        download(serve(BODY).url, tmp_path / "file", MD5)
    assert caught.value.exit_code == exits.STORAGE


def test_a_local_file_can_stand_in_for_a_server(tmp_path: Path):
    (tmp_path / "source").write_bytes(BODY)
    download((tmp_path / "source").as_uri(), tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == BODY


def test_what_is_no_url_is_a_usage_error(tmp_path: Path):
    with pytest.raises(UsageError, match="must start with"):
        download("cifar-10-python.tar.gz", tmp_path / "file", MD5)
