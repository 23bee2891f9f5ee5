"""The step of agents: srun's argv in full."""

from muster.slurm.steps import srun_argv, step_environment

AGENT = ["/opt/muster/bin/python", "-I", "/opt/muster/launch/boot.py", "muster.launch.agent", "--node", "slurm"]


def test_one_agent_per_node_and_nothing_of_slurms_ends_it() -> None:
    assert srun_argv(nodes=4, argv=AGENT, cpus_per_task=8, gpus_per_node="a100:4") == [
        "srun",
        "--nodes=4",
        "--ntasks=4",
        "--ntasks-per-node=1",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--overlap",
        "--input=none",
        "--export=ALL",
        "--cpus-per-task=8",
        "--gpus-per-node=a100:4",
        *AGENT,
    ]


def test_a_part_of_an_allocation_is_named() -> None:
    argv = srun_argv(nodes=3, argv=["agent"], hosts=["n01", "n02", "n03"])
    assert argv[-2:] == ["--nodelist=n01,n02,n03", "agent"]
    assert not [word for word in argv if word.startswith(("--cpus", "--gpus"))]


def test_what_an_enclosing_step_or_a_profile_holds_does_not_change_the_agents_step() -> None:
    """A shell inside `srun --pty` is bound to one core, and hands that on; labels would break every line."""
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "SLURM_MEM_PER_NODE": "400"}
    changing = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_CPU_BIND_LIST": "0x1",
        "SLURM_LABELIO": "1",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_DISTRIBUTION": "arbitrary",
        "SLURM_STEP_ID": "0",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_TRES_PER_TASK": "cpu:1",
    }
    assert step_environment({**kept, **changing}) == kept
