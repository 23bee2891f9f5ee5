"""The table of `muster verify --with`, and what its command line refuses."""

import io

import pytest
from rich.console import Console

from muster.jobs.basics import exits
from muster.launch.cli import main
from muster.launch.look.proof_view import render

pytestmark = pytest.mark.command

ROWS = [
    {"name": "mean", "title": "gradients are the mean", "state": "ok", "evidence": "of 3 steps"},
    {"name": "overlap", "title": "collectives overlap", "state": "fails", "evidence": "rank 0: 0 of 2 are early"},
    {"name": "buckets", "title": "buckets", "state": "n/a", "evidence": "takes no bucket_size_mb"},
    {"name": "unused", "title": "unused", "state": "fails", "evidence": "rank 1, step 1: IndexError: 7"},
]
RECORD = {
    "job": "gpt",
    "with": "my.py:DDP",
    "kind": "wrapper",
    "world_size": 2,
    "device": "cpu",
    "rows": ROWS,
    "waived": ["overlap"],
    "pass": False,
    "tracebacks": [{"rank": 1, "step": "step 1", "error": "IndexError: 7", "traceback": 'File "my.py", line 3'}],
}


def test_the_table_names_failed_properties_and_shows_tracebacks():
    stream = io.StringIO()
    Console(file=stream, width=140).print(render(RECORD))
    text = stream.getvalue()
    assert "waived" in text
    assert 'rank 1, step 1:\nFile "my.py", line 3' in text
    assert "FAIL  1 of 3 properties hold; unused failed" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--with", "my.py"], "--with: must be FILE.py:NAME"),
        (["--with", "my.py:DDP", "--args", "[1]"], "--args: must be a JSON object"),
        (["--with", "my.py:DDP", "--args", "{"], "--args: is not valid JSON"),
        (["--with", "my.py:DDP", "--waive", "overlaps"], "no property overlaps; did you mean 'overlap'"),
        (["--waive", "overlap"], "add --with FILE.py:CLASS"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, words, said):
    assert main(["verify", "jobs/examples/gpt-nano.yaml", *words]) == exits.USAGE
    assert said in capsys.readouterr().err


def test_one_rank_is_refused(capsys):
    words = ["--with", "my.py:DDP", "--set", "nodes=1"]
    assert main(["verify", "jobs/examples/gpt-nano.yaml", *words]) == exits.REFUSED
    assert "--with: needs at least two ranks" in capsys.readouterr().err
