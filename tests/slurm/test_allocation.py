"""What a process reads of its allocation; the variables are those of Slurm 22.05 in a real job."""

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.launchers import in_step
from muster.slurm.allocation import clean_environment, inside_allocation, read_allocation

# A batch script on two nodes of a real cluster, `env | grep SLURM`.
BATCH = {
    "SLURMD_NODENAME": "sd0",
    "SLURM_CLUSTER_NAME": "sd",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_JOBID": "24",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "24",
    "SLURM_JOB_NAME": "requeue",
    "SLURM_JOB_NODELIST": "sd[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_MEM_PER_NODE": "400",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "sd[0-1]",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
TASK = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "sd[0-1]"}


def test_a_batch_script_is_in_an_allocation_and_is_no_task() -> None:
    assert inside_allocation(BATCH)
    assert not in_step(BATCH)
    allocation = read_allocation(BATCH)
    assert (allocation.job_id, allocation.nodes, allocation.cpus) == ("24", ("sd0", "sd1"), (2, 2))
    assert (allocation.end_time, allocation.restarts, allocation.requeue_id) == (None, 0, "24")


def test_unequal_nodes_and_what_newer_versions_tell() -> None:
    environ = {
        **BATCH,
        "SLURM_JOB_NODELIST": "rack[1-2]n[01-02]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_CPUS_PER_NODE": "4(x3),2",
        "SLURM_JOB_END_TIME": "1795255022",
        "SLURM_RESTART_COUNT": "3",
        "SLURM_ARRAY_JOB_ID": "20",
        "SLURM_ARRAY_TASK_ID": "4",
        "SLURM_GPUS_PER_NODE": "a100:4",
    }
    allocation = read_allocation(environ)
    assert allocation.nodes == ("rack1n01", "rack1n02", "rack2n01", "rack2n02")
    assert allocation.cpus == (4, 4, 4, 2)
    assert allocation.cpus_per_task == 2
    assert (allocation.end_time, allocation.restarts) == (1795255022.0, 3)
    assert (allocation.requeue_id, allocation.gpus_per_node) == ("20_4", "a100:4")
    assert [(host.name, host.address, host.slots) for host in allocation.hosts()][-1] == ("rack2n02", "", 2)


def test_without_the_list_this_nodes_cores_are_taken_for_all() -> None:
    environ = {name: value for name, value in BATCH.items() if name != "SLURM_JOB_CPUS_PER_NODE"}
    assert read_allocation(environ).cpus == (2, 2)
    del environ["SLURM_CPUS_ON_NODE"]
    assert read_allocation(environ).cpus == (1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_JOB_NUM_NODES": "3"}, r"SLURM_JOB_NODELIST=sd\[0-1\] has 2 nodes, but SLURM_JOB_NUM_NODES is 3"),
        ({"SLURM_JOB_CPUS_PER_NODE": "2"}, "is for 1 nodes, but the job has 2"),
        ({"SLURM_JOB_CPUS_PER_NODE": "two"}, "must be of the form"),
        ({"SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT must be a whole number"),
    ],
)
def test_variables_that_contradict_one_another_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        read_allocation({**BATCH, **change})


def test_outside_of_a_job_there_is_no_allocation() -> None:
    assert not inside_allocation({"SLURM_CONF": "/etc/slurm/slurm.conf"})
    with pytest.raises(RefusedError, match=r"in no Slurm allocation .* sbatch, salloc, or muster submit --on slurm"):
        read_allocation({})


def test_a_job_that_submits_a_job_hands_on_neither_its_rank_nor_its_allocation() -> None:
    users = {"PATH": "/bin", "SLURM_CONF": "/x", "SBATCH_ACCOUNT": "lab", "MUSTER_RUNS": "/runs", "PMIC": "mine"}
    of_a_rank = """
        RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT GROUP_RANK MUSTER_RUN_ID MUSTER_RUN_DIR MUSTER_STATUS_FD
        TORCHELASTIC_RUN_ID PMI_RANK PMIX_RANK OMPI_COMM_WORLD_RANK MV2_COMM_WORLD_RANK SRUN_CPUS_PER_TASK
        SBATCH_MEM_BIND
    """
    assert clean_environment({**TASK, **users, **dict.fromkeys(of_a_rank.split(), "1")}) == users
    chosen = {"CUDA_VISIBLE_DEVICES": "2"}  # by the user; the other one by Slurm
    assert clean_environment(chosen) == chosen
    assert clean_environment({**chosen, "SLURM_JOB_GPUS": "2"}) == {}
