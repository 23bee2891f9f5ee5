"""Slurm in a box: its configuration, and the argv of its daemons. Pure.

munged and slurmctld run on `head`, one slurmd on every other node. All nodes and the host see munge's socket in the
box's folder, so Slurm's commands only need SLURM_CONF. The settings are for tests: short timeouts, a partition with
preemptible jobs, and enforced memory limits, so that a job can run out of memory.
"""

from typing import Final

from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.spec import HEAD, BoxSpec

CPUS: Final = 4  # number of cores that each node reports to Slurm, whatever the machine has
LEAST_MEMORY_MB: Final = 4000
CTLD_PORT: Final = 6817
SLURMD_PORT: Final = 6818
IDLE: Final = "idle"


def slurm_conf(spec: BoxSpec, paths: BoxPaths, machine_memory_mb: int) -> str:
    """Return the text of slurm.conf."""
    memory_mb = max(LEAST_MEMORY_MB, machine_memory_mb // spec.nodes)
    last = spec.nodes - 1
    names = f"node[0-{last}]" if last else "node0"
    hosts = f"[1-{spec.nodes}]" if last else "1"
    node = f"{paths.nodes}/%n"
    return f"""\
# Part of the box {spec.name}; `muster box down` removes this file.
ClusterName=muster-{spec.name}
SlurmctldHost={HEAD}({spec.address(HEAD)})
SlurmctldPort={CTLD_PORT}
SlurmdPort={SLURMD_PORT}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for cred_expire before it starts again.
AuthInfo=socket={paths.munge_socket},cred_expire=20
StateSaveLocation={paths.slurm}
SlurmctldPidFile={paths.slurm}/slurmctld.pid
SlurmctldLogFile={paths.node(HEAD).log("slurmctld")}
SlurmdSpoolDir={node}/spool
SlurmdPidFile={node}/slurmd.pid
SlurmdLogFile={node}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
# With UsePss, a memory page that forked processes share counts once, as it does with cgroups.
JobAcctGatherParams=OverMemoryKill,UsePss
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobRequeue=1
KillWait=5
MinJobAge=300
SlurmdTimeout=10
SlurmctldTimeout=30
ReturnToService=2
DefMemPerCPU={memory_mb // CPUS}
NodeName={names} NodeAddr=10.10.{spec.number}.{hosts} CPUs={CPUS} RealMemory={memory_mb} State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=preempt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE MaxTime=INFINITE State=UP
"""


def cgroup_conf() -> str:
    """Return the text of cgroup.conf, which constrains nothing and works on every machine.

    The plugin for version 1 works with the empty /sys/fs/cgroup of a node. The plugin for version 2 does not work with
    it, and would leave its own groups on the host.
    """
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"


def munged_argv(munged: str, paths: BoxPaths) -> list[str]:
    """Return the argv of munge's daemon, which detaches once its socket exists."""
    folder = paths.munge
    return [
        munged,
        "--force",
        f"--socket={paths.munge_socket}",
        f"--key-file={folder}/key",
        f"--log-file={folder}/log",
        f"--pid-file={folder}/pid",
        f"--seed-file={folder}/seed",
    ]


def slurmctld_argv(slurmctld: str, *, anew: bool) -> list[str]:
    """Return the argv of the controller. Unless `anew` is True, the controller restores its jobs."""
    return [slurmctld, "-D", *(["-c"] if anew else [])]


def slurmd_argv(slurmd: str, node: str) -> list[str]:
    """Return the argv of a node's slurmd."""
    return [slurmd, "-D", "-c", "-N", node]
