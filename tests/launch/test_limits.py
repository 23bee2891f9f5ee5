"""The limit on open files: a supervisor's is raised, its children's are as before."""

import json
import resource
import subprocess
import sys

from muster.jobs.basics.boot import CODE_ROOT

LOOK = "import json, resource; print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))"
CODE = f"""
import json, resource, subprocess, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
sys.path.insert(0, {str(CODE_ROOT)!r})
from muster.launch.common.limits import raise_open_files, restore_open_files
raise_open_files()
own = resource.getrlimit(resource.RLIMIT_NOFILE)
child = subprocess.Popen([sys.executable, "-c", "input(); " + {LOOK!r}], stdin=-1, stdout=-1)
restore_open_files(child.pid)
print(json.dumps([own, json.loads(child.communicate(b"\\n")[0])]))
restore_open_files(child.pid)  # it has ended: no error
"""


def test_a_supervisor_may_open_more_files_and_its_children_as_many_as_before() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = subprocess.run([sys.executable, "-I", "-c", CODE], capture_output=True, text=True, check=True)
    own, child = json.loads(done.stdout)
    assert own[0] == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))
    assert child == [256, hard]
