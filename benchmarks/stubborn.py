"""A program that does not want to end: it ignores HUP, INT and TERM, and has children in sessions of their own."""

import os
import signal
import subprocess
import sys
import time

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("ready", flush=True)
time.sleep(1000)
