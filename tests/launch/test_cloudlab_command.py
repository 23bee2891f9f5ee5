"""`muster cloudlab rspec`: its defaults, its options, and where it writes."""

from pathlib import Path

import pytest

from muster.cloudlab.rspec import RspecSpec, rspec_text
from muster.launch.cli import main


def test_without_options_it_prints_the_default_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cloudlab", "rspec"]) == 0
    assert capsys.readouterr().out == rspec_text(RspecSpec())


def test_every_option_reaches_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--nodes 8 --hardware m510 --lan fast --lan-bandwidth 25gbit --nfs 300 --repository https://example.org/r.git"
    )
    image = "urn:publicid:IDN+emulab.net+image+emulab-ops//UBUNTU24-64-STD"
    assert main(["cloudlab", "rspec", *words.split(), "--image", image]) == 0
    wanted = RspecSpec(8, "m510", image, "fast", 25_000_000, 300, "https://example.org/r.git")
    assert capsys.readouterr().out == rspec_text(wanted)


def test_nfs_without_a_size_and_any_hardware_at_any_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cloudlab", "rspec", "--nfs", "--hardware", "any", "--lan-bandwidth", "any"]) == 0
    assert capsys.readouterr().out == rspec_text(RspecSpec(hardware="", kbit_per_s=None, nfs_gb=100))


def test_it_writes_to_a_file_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.rspec"
    assert main(["cloudlab", "rspec", "-o", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == rspec_text(RspecSpec())
    assert capsys.readouterr() == ("", f"muster: wrote {path}\n")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--nodes", "0"], 2, "--nodes: must be from 1 to 250, got 0"),
        (["--lan-bandwidth", "fast"], 2, "--lan-bandwidth: 'fast' is no rate; wanted one such as 10gbit or 500mbit"),
        (["-o", "/none/x"], 73, "/none/x: cannot be written: no such file or directory"),
    ],
)
def test_mistakes_are_one_line_with_their_code(
    options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cloudlab", "rspec", *options]) == code
    assert capsys.readouterr() == ("", f"muster: {message}\n")
