"""`muster cloudlab rspec`: its defaults, its options, and where it writes."""

from pathlib import Path

import pytest

from muster.cloudlab.rspec import RspecSpec, rspec_text


def test_without_options_it_prints_the_default_profile(in_process) -> None:
    assert in_process("cloudlab", "rspec") == (0, rspec_text(RspecSpec()), "")


def test_every_option_reaches_the_profile(in_process) -> None:
    words = (
        "--nodes 8 --hardware m510 --lan fast --lan-bandwidth 25gbit --nfs 300 --repository https://example.org/r.git"
    )
    image = "urn:publicid:IDN+emulab.net+image+emulab-ops//UBUNTU24-64-STD"
    wanted = RspecSpec(8, "m510", image, "fast", 25_000_000, 300, "https://example.org/r.git")
    assert in_process("cloudlab", "rspec", *words.split(), "--image", image) == (0, rspec_text(wanted), "")


def test_nfs_without_a_size_and_any_hardware_at_any_speed(in_process) -> None:
    _, out, _ = in_process("cloudlab", "rspec", "--nfs", "--hardware", "any", "--lan-bandwidth", "any")
    assert out == rspec_text(RspecSpec(hardware="", kbit_per_s=None, nfs_gb=100))


def test_it_writes_to_a_file_and_says_so(tmp_path: Path, in_process) -> None:
    path = tmp_path / "profile.rspec"
    assert in_process("cloudlab", "rspec", "-o", str(path)) == (0, "", f"muster: wrote {path}\n")
    assert path.read_text(encoding="utf-8") == rspec_text(RspecSpec())


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--nodes", "0"], 2, "--nodes: must be from 1 to 250, got 0"),
        (
            ["--lan-bandwidth", "fast"],
            2,
            "--lan-bandwidth: 'fast' is not a rate; expected one such as 10gbit or 500mbit",
        ),
        (["-o", "/none/x"], 73, "/none/x: cannot be written: no such file or directory"),
    ],
)
def test_mistakes_are_one_line_with_their_code(options: list[str], code: int, message: str, in_process) -> None:
    assert in_process("cloudlab", "rspec", *options) == (code, "", f"muster: {message}\n")
