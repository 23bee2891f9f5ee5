"""All rows, and what cannot be injected here."""

from faults import contents, kills, nodes, processes, resumes, storage
from faults.table import Absent, Fault

FAULTS: tuple[Fault, ...] = tuple(
    sorted(
        (fault for rows in (processes, nodes, kills, contents, storage, resumes) for fault in rows.FAULTS),
        key=lambda fault: fault.number,  # stable: rows of one number keep their order
    )
)

ABSENT: tuple[Absent, ...] = (
    Absent(9, "store's veth detached", "the store is on node 0: that is `node 0 loses power`"),
    Absent(13, "quota", "root is above quotas, and EDQUOT takes the way of ENOSPC"),
    Absent(13, "EIO of single sectors", "no device-mapper in this kernel; ext4's shutdown gives EIO instead"),
    Absent(14, "dmsetup suspend", "no device-mapper in this kernel; FIFREEZE stops the writers instead"),
    Absent(15, "dm-log-writes", "no device-mapper in this kernel; ext4's shutdown drops what is not durable instead"),
    Absent(16, "stale view of an NFS folder", "no nfsd in this kernel"),
    Absent(21, "requeue loop", "needs Slurm's own requeue; the rule that ends it is tested in tests/launch/scheduler"),
    Absent(24, "zombie GPU process", "no GPU here"),
)
