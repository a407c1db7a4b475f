"""An engine that does not end by SIGTERM ends all the same when its Headway was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

ENGINE = """
import signal, subprocess, sys, time
from headway.engines.vllm.plugin.guard import end_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
end_with_parent(0.5)
print(core.pid, flush=True)
time.sleep(600)
"""
HEADWAY = f"""
import os, subprocess, sys, time
env = dict(os.environ, HEADWAY_PARENT=str(os.getpid()))
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}], env=env, start_new_session=True)
print(engine.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_engine_and_its_core_end_after_the_process_that_started_them() -> None:
    headway = subprocess.Popen([sys.executable, "-c", HEADWAY], stdout=subprocess.PIPE, text=True)
    assert headway.stdout is not None
    engine, core = int(headway.stdout.readline()), int(headway.stdout.readline())
    try:
        time.sleep(1.5)
        assert not gone(engine)
        headway.kill()
        headway.wait()
        deadline = time.monotonic() + 20
        while not (gone(engine) and gone(core)):
            assert time.monotonic() < deadline, "they live on"
            time.sleep(0.05)
    finally:
        headway.kill()
        headway.stdout.close()
        if not gone(engine):
            os.killpg(engine, signal.SIGKILL)


def test_a_process_that_headway_did_not_start_is_left_alone() -> None:
    code = "from headway.engines.vllm.plugin.guard import end_with_parent; import threading\n"
    code += "end_with_parent(); print(threading.active_count())"
    env = {name: value for name, value in os.environ.items() if name != "HEADWAY_PARENT"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
