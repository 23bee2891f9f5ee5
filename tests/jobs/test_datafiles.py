import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.errors import RefusedError, StorageError
from muster.jobs.data import datafiles


def test_the_data_folder_is_the_variable_else_the_cache_else_home(tmp_path: Path):
    both = {"MUSTER_DATA": str(tmp_path / "a"), "XDG_CACHE_HOME": str(tmp_path / "b")}
    assert datafiles.data_root(both) == tmp_path / "a"
    assert datafiles.data_root({"XDG_CACHE_HOME": str(tmp_path / "b")}) == tmp_path / "b" / "muster"
    assert datafiles.data_root({}) == Path.home() / ".cache" / "muster"


def test_missing_cifar10_names_the_command_that_fetches_it(tmp_path: Path):
    with pytest.raises(RefusedError, match="run: muster data cifar10"):
        datafiles.cifar10_files(tmp_path)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of a few files, with everything that must be left out."""
    folder = tmp_path / "library"
    for name, content in {
        "zipapp.py": "z",
        "abc.py": "a",
        "json/__init__.py": "j",
        "json/tool.py": "t",
        "json-notes.txt": "no",
        "site-packages/torch/x.py": "no",
        "dist-packages/y.py": "no",
        "test/test_abc.py": "no",
        "unittest/test/t.py": "no",
        "unittest/mock.py": "u",
        "__pycache__/abc.py": "no",
        "_sysconfigdata__linux.py": "no",
        "config-3.11-x86_64/python-config.py": "no",
        "sitecustomize.py": "no",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_python_source_is_the_library_in_order_without_what_belongs_to_others(library: Path, tmp_path: Path):
    made = datafiles.prepare_python_source(tmp_path, library)
    assert made.path.read_bytes() == b"ajtuz"
    assert made.sha256 == hashlib.sha256(b"ajtuz").hexdigest()
    assert f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}" in made.path.name
    facts = json.loads(made.path.with_suffix(".json").read_text())
    assert (facts["bytes"], facts["files"], facts["sha256"]) == (5, 5, made.sha256)


def test_python_source_is_prepared_once_and_again_when_it_is_torn(library: Path, tmp_path: Path):
    first = datafiles.prepare_python_source(tmp_path, library)
    for change in (lambda: (library / "zzz.py").write_text("no"), lambda: first.path.write_bytes(b"aj")):
        change()
        assert datafiles.prepare_python_source(tmp_path, library) == first
        assert first.path.read_bytes() == b"ajtuz"
        (library / "zzz.py").unlink(missing_ok=True)


def test_the_real_library_gives_megabytes_of_source(tmp_path: Path):
    made = datafiles.prepare_python_source(tmp_path)
    assert made.bytes > 2 * 2**20
    assert b"def namedtuple(" in made.path.read_bytes()


def test_ranks_that_ask_at_once_all_get_the_one_file(library: Path, tmp_path: Path):
    code = (
        "import sys, pathlib; from muster.jobs.data.datafiles import prepare_python_source as prepare; "
        "print(prepare(*map(pathlib.Path, sys.argv[1:])).sha256)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(library)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    made = {rank.communicate(timeout=30)[0].strip() for rank in ranks}
    assert made == {hashlib.sha256(b"ajtuz").hexdigest()}
    assert sorted(path.suffix for path in (tmp_path / "python-source").glob("python-*")) == [".json", ".u8"]


def test_a_library_without_source_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match=r"no \*\.py files"):
        datafiles.prepare_python_source(tmp_path, tmp_path / "empty")


def test_a_data_folder_that_is_a_file_is_a_storage_error(library: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="set MUSTER_DATA"):
        datafiles.prepare_python_source(tmp_path / "file", library)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path):
    def write_half() -> None:
        with datafiles.written(tmp_path / "file") as temporary:
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device; free some space"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_text_must_be_there_and_hold_something(tmp_path: Path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "some").write_bytes(b"text")
    assert datafiles.text_file(str(tmp_path / "some")) == tmp_path / "some"
    for name, message in {"none": "no such file", "empty": "the file is empty", ".": "a folder"}.items():
        with pytest.raises(RefusedError, match=message):
            datafiles.text_file(str(tmp_path / name))


def test_the_sha256_of_several_files_is_that_of_their_bytes_in_order(tmp_path: Path):
    contents = [b"x" * (2**20 + 3), b"", b"y"]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    found = datafiles.sha256_of(*(tmp_path / str(number) for number in range(3)))
    assert found == hashlib.sha256(b"".join(contents)).hexdigest()


def test_data_is_fetched_without_torch():
    code = (
        "import sys, muster.jobs.data.cifar10, muster.jobs.models.shapes, muster.launch.commands.data; "
        "sys.exit('torch' in sys.modules or 'numpy' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
