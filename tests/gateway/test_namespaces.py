"""What a tenant's code can reach from a sandbox in namespaces, with a gateway as root and as another user."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

import headway
from headway.cluster.backends.sandbox import Sandboxes, check_namespaces
from headway.config import Backend as Settings
from headway.errors import ConfigError

SECRET = "sk-of-all-tenants"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
ANOTHER = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.{} < 0:
    raise OSError(ctypes.get_errno(), "")
"""
CLONE, ADD_KEY = (56, 248) if os.uname().machine == "x86_64" else (220, 217)
# What code tries, and the error that it gets. FOLDER: what the gateway has on disk. GATEWAY: its process.
ATTACKS = {
    "reads the configuration": ("open('FOLDER/headway.toml').read()", "FileNotFoundError"),
    "rewrites the queue": ("open('FOLDER/queue.sqlite', 'r+b').write(b'x')", "FileNotFoundError"),
    "reads a file of root's": ("open('/etc/shadow').read()", "FileNotFoundError"),
    "reads the environment": ("import os; os.environ['API_KEY']", "KeyError"),
    "reads process 1's environment": ("open('/proc/1/environ').read()", "PermissionError"),
    "reads process 1's memory": ("open('/proc/1/mem', 'rb').read()", "PermissionError"),
    "reads process 1's files": ("open('/proc/1/root/etc/shadow').read()", "PermissionError"),
    "changes the gateway's code": (f"open({headway.__file__!r}, 'a')", "OSError|NotFound|Permission"),
    "changes the interpreter": ("import sys; open(sys.executable, 'r+b')", "OSError|PermissionError"),
    "changes the library": ("import os; open(os.__file__, 'a')", "OSError|PermissionError"),
    "changes the kernel's settings": ("open('/proc/sys/kernel/core_pattern', 'w')", "PermissionError"),
    "kills the gateway": ("import os; os.kill(GATEWAY, 9)", "ProcessLookupError"),
    "kills its supervisor": ("import os\nfor s in (9, 2, 15, 19): os.kill(1, s)\n1 / 0", "ZeroDivisionError"),
    "connects to a port": ("import socket; socket.create_connection(('127.0.0.1', PORT))", "OSError|Refused"),
    "connects to a socket": ("import socket; socket.socket(1).connect('FOLDER/socket')", "FileNotFoundError"),
    "connects to an abstract socket": (
        "import socket; socket.socket(1).connect(b'\\0headway-PORT')",
        "ConnectionRefusedError",
    ),
    "talks to the hypervisor": ("import socket; socket.socket(40, 1)", "not supported"),
    "becomes root": ("import os; os.setuid(0)", "PermissionError|Invalid argument"),
    "makes a user namespace": (CALL.format("unshare(0x10000000)"), "PermissionError"),
    "makes one with a process": (CALL.format(f"syscall({CLONE}, 0x10000011, 0, 0, 0, 0)"), "No space|Errno 28"),
    "mounts": (CALL.format("mount(b'none', b'/tmp', b'tmpfs', 0, None)"), "PermissionError"),
    "leaves a key in a keyring": (CALL.format(f"syscall({ADD_KEY}, b'user', b'k', b'v', 1, -3)"), "PermissionError"),
    "forks 10,000 processes": (
        "import os, time\nfor _ in range(10_000):\n    if os.fork() == 0: time.sleep(60)",
        "BlockingIOError",
    ),
    "allocates 10 GB": ("held = bytearray(10 << 30)", "MemoryError"),
    "allocates memory of no process": ("import os; os.memfd_create('x')", "PermissionError"),
    "fills the disk": ("for n in range(9): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))", "No space left"),
    "fills the disk with names": ("for n in range(5000): open(str(n), 'w')", "No space left"),
}
# What code tries, and what it prints.
ORDINARY = {
    "libraries": (
        "import json, math, sqlite3, asyncio\n"
        "print(json.dumps([math.gcd(4, 6), sqlite3.connect(':memory:').execute('select 42').fetchone()]))",
        "[2, [42]]",
    ),
    "own folder": (
        "import os, tempfile\nopen('x', 'w').write('y')\ntempfile.mkdtemp()\nprint(open('/tmp/x').read())",
        "y",
    ),
    "processes": (
        "import subprocess, sys, multiprocessing\nmultiprocessing.Lock()\n"
        "print(subprocess.check_output([sys.executable, '-c', 'print(7)'], text=True))",
        "7",
    ),
    "leaves": ("for folder in ('/tmp', '/dev/shm', '.'): open(f'{folder}/left', 'w')", ""),
    "finds": (
        "import os\nfound = {*os.listdir('/tmp'), *os.listdir('/dev/shm')}\n"
        f"print(found - {set(Path(sys.prefix).parts)})",
        "set()",  # Python itself may be in /tmp
    ),
    "users": ("import os; print(os.getresuid(), os.getgroups())", "(65534, 65534, 65534) []"),
    "environments": (
        f"import glob\nprint(any(b'{SECRET}' in open(p, 'rb').read() for p in glob.glob('/proc/[2-9]*/environ')))",
        "False",
    ),
    "descriptors": ("import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])", "[0, 1, 2]"),
    "folders": (
        "import os\nplaces = '/home /var /run /sys /opt /old /usr/bin/env /root/.bashrc FOLDER'\n"
        "print([place for place in places.split() if os.path.exists(place)])",
        "[]",
    ),
    "writable mounts": (
        "lines = [line.split() for line in open('/proc/self/mountinfo')]\n"
        "print(sorted(w[4] for w in lines if not w[5].startswith('ro,') and not w[4].startswith('/dev/')))",
        "['/proc', '/tmp']",
    ),
    "devices": (
        "import os; print(sorted(os.listdir('/dev')))",
        "['fd', 'full', 'null', 'random', 'shm', 'urandom', 'zero']",
    ),
    "status": (
        "import re\nstatus = open('/proc/self/status').read()\n"
        "print(re.findall(r'(?:CapPrm|CapEff|NoNewPrivs|Seccomp):\\s*(\\w+)', status))",
        "['0000000000000000', '0000000000000000', '1', '2']",
    ),
}
GATEWAY = """
import asyncio, json, os, sys
from headway.cluster.backends.sandbox import Sandboxes
from headway.config import Backend
async def main():
    backend = Sandboxes("python", Backend("sandbox", isolation=sys.argv[1], disk_mib=2))
    for name, code in json.load(sys.stdin).items():
        ran = await backend.run("tenant", {"code": code.replace("GATEWAY", str(os.getpid()))})
        print(json.dumps([name, ran.output]), flush=True)
    await backend.close()
with open(0, closefd=False):
    asyncio.run(main())
"""


def namespaces_or_skip() -> None:
    try:
        check_namespaces("python")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["own", "another"])
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Execute everything above in sandboxes of a gateway of this user's, or of one without rights."""
    namespaces_or_skip()
    paths = (str(Path(headway.__file__).parents[1]), sysconfig.get_path("purelib"))
    env = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(paths), "API_KEY": SECRET}
    argv = [sys.executable]
    if request.param == "another":
        argv = [*ANOTHER, f"/usr/bin/{PYTHON}"]
        tried = subprocess.run([*argv, "-c", GATEWAY, "namespaces"], env=env, input=b"{}", capture_output=True)
        if tried.returncode != 0:
            pytest.skip("no other user can run a gateway here")
    with tempfile.TemporaryDirectory(dir="/tmp") as name, socket.create_server(("127.0.0.1", 0)) as server:
        folder = Path(name)
        folder.chmod(0o755)
        for file in ("headway.toml", "queue.sqlite"):
            (folder / file).write_text(SECRET)
            (folder / file).chmod(0o666)
        port = str(server.getsockname()[1])
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as abstract:
            for one, address in ((listening, f"{name}/socket"), (abstract, f"\0headway-{port}")):
                one.bind(address)
                one.listen()
            codes = {name: code for name, (code, _) in (ATTACKS | ORDINARY).items()}
            sent = json.dumps(codes).replace("FOLDER", name).replace("PORT", port)
            ran = subprocess.run(
                [*argv, "-c", GATEWAY, "namespaces"], env=env, input=sent.encode(), capture_output=True
            )
    assert ran.returncode == 0, ran.stderr.decode()
    return dict(map(json.loads, ran.stdout.splitlines()))


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_code_must_not_do_fails(told: dict[str, Any], attack: str) -> None:
    output = told[attack]
    assert output["exit_code"] == 1, output
    assert re.search(ATTACKS[attack][1], output["stderr"].splitlines()[-1]), output


@pytest.mark.parametrize("code", ORDINARY)
def test_ordinary_code_works_and_sees_only_its_own(told: dict[str, Any], code: str) -> None:
    assert (told[code]["stdout"].strip(), told[code]["exit_code"]) == (ORDINARY[code][1], 0), told[code]


async def test_code_that_hides_from_its_supervisor_ends_with_its_time() -> None:
    namespaces_or_skip()
    code = "import contextlib, ctypes, os, subprocess, sys\nctypes.CDLL(None).prctl(1, 0)\n"
    code += "with contextlib.suppress(OSError): os.setsid()\n"
    code += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(79)'], start_new_session=True)"
    backend = Sandboxes("python", Settings("sandbox", timeout_s=1))
    ran = await backend.run("tenant", {"code": code})
    await backend.close()
    assert ran.output["timed_out"]
    for _ in range(1000):
        if not [p for p in psutil.process_iter(["cmdline"]) if "time.sleep(79)" in str(p.info["cmdline"])]:
            return
        await asyncio.sleep(0.01)
    pytest.fail("it runs on")
