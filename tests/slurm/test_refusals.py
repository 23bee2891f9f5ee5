"""What sbatch says when it refuses, recorded from a real one (22.05), and what we make of it."""

import pytest

from muster.jobs.basics.errors import RefusedError, UnreachableError
from muster.jobs.spec.slurm import SlurmSettings
from muster.slurm.refusals import not_set_up, refusal

FAILED = "sbatch: error: Batch job submission failed: "
NO_NODE = f"{FAILED}Requested node configuration is not available\n"
PARTITIONS = "main (4 nodes of 4 cores and 2000 MB, limit infinite)"
TRY = 'Try "sbatch --help" for more information\n'
RECORDED = [  # a row that does not begin with "sbatch: " is what follows FAILED
    (
        f"sbatch: error: invalid partition specified: nosuch\n{FAILED}Invalid partition name specified\n",
        {"partition": "nosuch"},
        "slurm.partition: sbatch says: invalid partition specified: nosuch; name one of the partitions; available: ",
    ),
    (
        f"sbatch: error: Memory specification can not be satisfied\n{NO_NODE}",
        {"mem": "9G"},
        "slurm.mem: sbatch says: Memory specification can not be satisfied (slurm.mem: 9G); request no more than one",
    ),
    (
        "sbatch: error: Invalid generic resource (gres) specification\n",
        {"gpus_per_node": 2},
        "slurm.gpus_per_node: sbatch says: Invalid generic resource (gres) specification (slurm.gpus_per_node: 2)",
    ),
    ("Invalid feature specification", {"constraint": "x&y"}, "slurm.constraint: sbatch says: Invalid feature"),
    ("Requested reservation is invalid", {"reservation": "x"}, "slurm.reservation: sbatch says: Requested reser"),
    ("Invalid node name specified", {"nodelist": "x"}, "slurm.nodelist: sbatch says: Invalid node name"),
    ("Invalid node name specified", {"exclude": "x"}, "slurm.exclude: sbatch says: Invalid node name"),
    (
        NO_NODE,
        {"nodelist": "sd3", "partition": "small"},
        "nodes and slurm.partition: sbatch says: Requested node configuration is not available (nodes: 2, ",
    ),
    (
        f"sbatch: unrecognized option '--bogus=1'\n{TRY}",
        {"extra": ["--bogus=1"]},
        "slurm.extra: sbatch says: unrecognized",
    ),
    (
        "sbatch: option '--nod' is ambiguous; possibilities: '--nodefile' '--nodelist' '--nodes'\n" + TRY,
        {},
        "slurm.extra: sbatch says: option '--nod' is ambiguous",
    ),
    ("Invalid job array specification", {}, "array: sbatch says: Invalid job array specification; run fewer"),
    # From Slurm's own list of errors (slurm_strerror); they need accounting, which the cluster did not have.
    (
        "Invalid account or account/partition combination specified",
        {"account": "x"},
        "slurm.account: sbatch says: Invalid account or account/partition combination specified (slurm.account: x)",
    ),
    ("Invalid qos specification", {"qos": "x"}, "slurm.qos: sbatch says: Invalid qos specification"),
    (
        "Requested time limit is invalid (missing or exceeds some limit)",
        {"time": "90:00:00"},
        "slurm.time: sbatch says: Requested time limit is invalid (missing or exceeds some limit) (slurm.time: 90",
    ),
    ("Time limit specification required, but not provided", {}, "slurm.time: sbatch says: Time limit spec"),
    ("User's group not permitted to use this partition", {"partition": "x"}, "slurm.partition: sbatch says: User"),
    ("Node count specification invalid", {}, "nodes: sbatch says: Node count specification invalid (nodes: 2)"),
    (
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        {"qos": "x"},
        "slurm.qos and nodes: sbatch says: Job violates accounting/QOS policy",
    ),
    ("Access/permission denied", {}, "slurm: sbatch says: Access/permission denied; ask the cluster's admin"),
    (
        f"sbatch: error: please name a project\n{FAILED}Unspecified error\n",
        {},
        "slurm: sbatch says: please name a project; correct the slurm: section",
    ),
]
UNREACHABLE = [
    f"{FAILED}Unable to contact slurm controller (connect failure)\n",
    f"{FAILED}Socket timed out on send/recv operation\n",
    f"{FAILED}Unable to create job record, try again\n",
    "sbatch: error: If munged is up, restart with --num-threads=10\n"
    'sbatch: error: Munge encode failed: Failed to access "/run/munge/sock": No such file or directory\n'
    f"{FAILED}Protocol authentication error\n",
]
NOT_SET_UP = [
    "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "sbatch: error: fetch_config: DNS SRV lookup failed\n"
    "sbatch: error: _establish_config_source: failed to fetch config\n"
    "sbatch: fatal: Could not establish a configuration source\n",
    "sbatch: error: s_p_parse_file: cannot stat file /x/slurm.conf: No such file or directory, retrying in 1sec\n"
    "sbatch: error: ClusterName needs to be specified\n"
    "sbatch: fatal: Unable to process configuration file\n",
]


@pytest.mark.parametrize(("said", "settings", "message"), RECORDED)
def test_a_refusal_names_the_setting_what_was_found_and_what_to_do(said: str, settings: dict, message: str) -> None:
    lines = said if said.startswith("sbatch: ") else f"{FAILED}{said}\n"
    error = refusal(lines, SlurmSettings(**settings), 2, partitions=PARTITIONS)
    assert isinstance(error, RefusedError)
    assert str(error).startswith(message)
    assert "\n" not in str(error)


@pytest.mark.parametrize("said", UNREACHABLE)
def test_a_controller_that_is_not_there_is_no_fault_of_the_job(said: str) -> None:
    error = refusal(said, SlurmSettings(partition="x"), 2)
    assert isinstance(error, UnreachableError)
    assert "nothing was submitted" in str(error)


@pytest.mark.parametrize("said", NOT_SET_UP)
def test_a_machine_outside_of_the_cluster_is_told_so(said: str) -> None:
    error = refusal(said, SlurmSettings(), 2)
    assert str(error) == str(not_set_up(said))
    last = said.strip().rpartition("fatal: ")[2]
    assert str(error).startswith(f"slurm: this machine belongs to no Slurm cluster ({last}); run this on a login node")


def test_nothing_said_is_still_a_sentence() -> None:
    assert str(refusal("", SlurmSettings(), 1)).startswith("slurm: sbatch says: (no message); correct")
