"""`jobs/examples/course/layerwise.py`: its two classes hold every property that `muster verify --with` checks."""

import json

import pytest

from muster.jobs.spec.load import EXAMPLES
from muster.launch.cli import main

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

PROGRAM = EXAMPLES / "course/layerwise.py"


@pytest.mark.parametrize(("name", "kind"), [("LayerwiseFSDP", "sharded"), ("LayerwisePipeline", "pipeline")])
def test_a_class_passes_on_the_test_bench(name, kind, tmp_path, capfd):
    settings = ("nodes=3", "train.batch_size=12", "train.model.tied=false")  # 3 ranks: shards are padded
    words = [word for each in settings for word in ("--set", each)]
    words += ["--steps", "1", "--runs", str(tmp_path), "--json"]
    code = main(["verify", str(EXAMPLES / "gpt-nano.yaml"), "--with", f"{PROGRAM}:{name}", *words])
    record = json.loads(capfd.readouterr().out)
    assert (code, record["kind"], record["world_size"], record["pass"]) == (0, kind, 3, True), record
    assert {row["state"] for row in record["rows"]} == {"ok"}, record
