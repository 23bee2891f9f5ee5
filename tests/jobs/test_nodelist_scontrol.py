"""Node lists against Slurm's own reading of them. `scontrol show hostnames` needs a configuration and no daemon."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.hosts.nodelist import expand, fold

pytestmark = pytest.mark.command

LISTS = [
    "n1",
    "n01,n02",
    "n[08-11]",
    "n[9-11]",
    "n[098-101]",
    "n[1,3-4,7],login",
    "n[01,1]",
    "n[0-0]",
    "[1-2]",
    "rack[1-2]n[01-02]",
    "n[0-1][0-1]",
    "n-[1-2]-x_[1-2]",
    "a[1-2]b[3,5-6]c[01-02]",
    "b2,b1,a[3-4],b3",
    "n[1-2,2-3]",
    "a,b,a",
]
Environment = Mapping[str, str]


def scontrol(what: str, text: str, environment: Environment) -> list[str]:
    """Run `scontrol show WHAT LIST` and return its lines."""
    command = ["scontrol", "show", what, text]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=20, check=True
    )
    return ended.stdout.split()


def compare(texts: list[str], environment: Environment) -> None:
    """Hold our reading and writing of lists against Slurm's; a name that comes again counts once with us."""
    for text in texts:
        names = expand(text)
        for spelling in (text, fold(names)):
            theirs = list(dict.fromkeys(scontrol("hostnames", spelling, environment)))
            # Slurm 22.05 lets the first of three brackets count faster than the second; it writes no such list itself.
            assert names == theirs if spelling.count("[") < 3 else sorted(names) == sorted(theirs), text
        (sorted_list,) = scontrol("hostlistsorted", ",".join(names), environment)
        assert set(expand(sorted_list)) == set(names), text


@pytest.fixture(scope="module")
def without_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A configuration that names no real machine."""
    path: Path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\n", encoding="utf-8")
    return {"SLURM_CONF": str(path)}


def test_lists_mean_what_slurm_says_they_mean(without_a_cluster: Environment) -> None:
    compare(LISTS, without_a_cluster)


# Slurm 22.05 takes no suffix behind a bracket, so these end with it.
names = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}}",
    st.sampled_from(["n", "r1n", "x-"]),
    st.integers(0, 120),
    st.integers(1, 3),
)


@given(st.lists(names, min_size=1, max_size=30))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_we_fold_slurm_unfolds(without_a_cluster: Environment, found: list[str]) -> None:
    assert scontrol("hostnames", fold(found), without_a_cluster) == list(dict.fromkeys(found))


@pytest.mark.cluster
def test_lists_mean_what_the_slurm_of_the_box_says(box: Any) -> None:
    compare([*LISTS, fold(host.name for host in box.hosts.hosts)], box.environment)
