"""Sandboxes hold what they promise, also against programs that try."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import jsonschema
import pytest
from sandbox_traces import left_behind, running

from stackrl.runtime.environments.sandboxes import SCHEMA, Settings, cgroups, docker, folders, machine
from stackrl.runtime.environments.sandboxes.base import SandboxError
from stackrl.runtime.environments.sandboxes.bubblewrap import Bubblewraps
from stackrl.runtime.environments.sandboxes.cgroups import Cgroups

needs_bubblewrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
BOX = {
    "type": "bubblewrap",
    "memory": "128MiB",
    "processes": 32,
    "file_size": "4MiB",
    "disk": "12MiB",
    "timeout": 60.0,
}
UNSAFE = {"type": "host", "unsafe_allow_host": True, "disk": "12MiB", "file_size": "4MiB", "timeout": 60.0}
AS_ROOT = pytest.param(True, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"))


async def bubblewrap(root=None, **changes):
    """A machine that has been tried; ``root``: whether its sandboxes change the user, or make a namespace."""
    made = Bubblewraps(Settings.of({**BOX, **changes}), root)
    await made.check()
    return made


async def said(sandbox, program, *words, **more):
    """What a Python program in the sandbox printed as JSON."""
    result = await sandbox.run(["python3", "-I", "-c", program, *words], **more)
    assert result.code == 0, (result.code, result.text, result.errors.decode())
    return json.loads(result.text)


ATTACK = """
import ctypes, glob, json, os, signal, socket, subprocess, sys
host, port, process, secret, folder = sys.argv[1:]
port, process = int(port), int(process)
won = []

def attack(name, act):
    try:
        if act() is not False: won.append(name)
    except Exception: pass

def connect(address):
    with socket.socket() as s:
        s.settimeout(2)
        s.connect(address)

def environment_of(path):
    with open(path, "rb") as file: return b"STACKRL_TEST_SECRET" in file.read()

attack("outside", lambda: connect(("1.1.1.1", 53)))
attack("loopback of the machine", lambda: connect(("127.0.0.1", port)))
attack("address of the machine", lambda: connect((host, port)))
attack("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + secret))
places = ["/", "/usr", "/usr/bin", "/etc", "/dev", "/root", "/proc", "/home", folder, sys.base_prefix]
for place in [*places, os.path.dirname(sys.base_prefix)]:
    attack("write in " + place, lambda: open(os.path.join(place, "stackrl-was-here"), "w"))
attack("read a file of the machine", lambda: open(secret).read())
attack("read shadow", lambda: open("/etc/shadow").read())
attack("list the folder of another", lambda: os.listdir(folder))
attack("end a process of the machine", lambda: os.kill(process, signal.SIGTERM))
pids = [int(p) for p in os.listdir("/proc") if p.isdigit()]
attack("see other processes", lambda: len(pids) > 5)
for pid in pids:
    attack("variables of process %d" % pid, lambda: environment_of("/proc/%d/environ" % pid))
attack("be root", lambda: os.setuid(0))
attack("chroot", lambda: os.chroot("/box"))
libc = ctypes.CDLL(None, use_errno=True)
attack("mount", lambda: libc.mount(b"none", b"/mnt", b"tmpfs", 0, b"") == 0)
attack("writable again", lambda: libc.mount(b"none", b"/usr", b"none", 4096 | 32, b"") == 0)
attack("another name", lambda: libc.sethostname(b"x", 1) == 0)
attack("a device", lambda: os.mknod("/box/sda", 0o60666, os.makedev(254, 0)))
attack("the terminal", lambda: os.open("/dev/tty", os.O_RDWR))
def capable():
    return int([l for l in open("/proc/self/status") if l.startswith("CapEff")][0].split()[1], 16) != 0
attack("capabilities", capable)
def through_a_namespace():
    code = "mkdir /tmp/m; mount -o remount,rw,bind /usr && touch /usr/stackrl-was-here"
    return subprocess.run(["unshare", "-Urm", "sh", "-c", code], capture_output=True).returncode == 0
attack("writable in a namespace of its own", through_a_namespace)
print(json.dumps(won))
"""


@needs_bubblewrap
@pytest.mark.parametrize("root", [AS_ROOT, False])
async def test_no_attack_gets_out(root, tmp_path, monkeypatch):
    monkeypatch.setenv("STACKRL_TEST_SECRET", "1")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    victim = await asyncio.create_subprocess_exec("sleep", "600")
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + str(secret))
    abstract.listen()
    try:
        with socket.create_server(("0.0.0.0", 0)) as listener:
            port = str(listener.getsockname()[1])
            host = socket.gethostbyname(socket.gethostname())
            made = await bubblewrap(root)
            async with made.sandbox() as other, made.sandbox() as sandbox:
                await other.write("notes", b"private")
                folder = str(other._folder)
                assert await said(sandbox, ATTACK, host, port, str(victim.pid), str(secret), folder) == []
                assert await said(sandbox, "import os; print(os.getuid())") >= 0x40000000
                assert await other.read("notes", 100) == b"private"
        assert victim.returncode is None
    finally:
        abstract.close()
        victim.kill()
        await victim.wait()
    assert list(tmp_path.iterdir()) == [secret] and left_behind() == []


FORKS = """
import json, os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(100); os._exit(0)
        made += 1
except OSError: pass
print(json.dumps(made), flush=True)
os._exit(0)
"""
FILES = """
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with open("large", "wb") as file:
        for _ in range(10): file.write(bytes(1 << 20))
except OSError: pass
print(os.path.getsize("large"))
"""
MANY = """
import time
for n in range(100):
    open(str(n), "wb").write(bytes(1 << 20))
    time.sleep(0.02)
time.sleep(100)
"""
TOGETHER = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(60 << 20)
        for n in range(0, len(held), 4096): held[n] = 1
        time.sleep(30); os._exit(0)
os.wait()
"""


@needs_bubblewrap
@pytest.mark.parametrize("root", [AS_ROOT, False])
@pytest.mark.slow
async def test_bounds_hold(root):
    made = await bubblewrap(root)
    async with made.sandbox() as sandbox:
        assert await said(sandbox, FORKS) < 32
        assert await said(sandbox, FILES) <= 4 << 20
        flood = await sandbox.run(["python3", "-c", MANY])
        assert flood.out_of_disk and not flood.timed_out
    async with made.sandbox() as sandbox:
        slow = await sandbox.run(
            ["sh", "-c", "trap '' TERM INT; sleep 98765.5 & setsid sleep 98765.5"], seconds=1
        )
        assert slow.timed_out and slow.code == 128 + signal.SIGKILL and not running("98765.5")
        assert (await sandbox.run(["python3", "-c", "while True: pass"], seconds=2)).code != 0
    assert left_behind() == []


@needs_bubblewrap
@pytest.mark.slow
async def test_memory_of_all_processes_together_is_bounded():
    made = await bubblewrap()
    if made.cgroups is None:
        pytest.skip("no control groups can be made here")
    async with made.sandbox() as sandbox:
        alone = await sandbox.run(["python3", "-c", "print(len(bytearray(600 << 20)))"])
        assert alone.code and alone.out_of_memory
        together = await sandbox.run(["python3", "-c", TOGETHER])
        assert together.out_of_memory, "each of them would fit"
        assert not (await sandbox.run(["true"])).out_of_memory, "what was is not told again"


@needs_bubblewrap
async def test_without_control_groups_each_process_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(Cgroups, "find", lambda: None)
    made = await bubblewrap()
    assert "no control groups can be made here" in caplog.text
    async with made.sandbox() as sandbox:
        result = await sandbox.run(["python3", "-c", "bytearray(600 << 20)"])
        assert b"MemoryError" in result.errors
        assert await said(sandbox, FORKS) < 32


@pytest.mark.parametrize(
    "args", [pytest.param(BOX, marks=needs_bubblewrap), UNSAFE], ids=["bubblewrap", "host"]
)
async def test_verbs(args):
    made = machine(args)
    await made.check()
    async with made.sandbox() as sandbox:
        result = await sandbox.run(["sh", "-c", "cat; pwd; echo wrong >&2; exit 3"], stdin=b"in\n")
        assert (result.code, result.text, result.errors) == (3, f"in\n{sandbox.home}\n", b"wrong\n")
        data = bytes(range(256)) * 400
        await sandbox.write("a folder/it's here", data)
        assert await sandbox.read("a folder/it's here", 1 << 20) == data
        assert await sandbox.read("a folder/it's here", 10) == data[:10]
        with pytest.raises(SandboxError, match=r"nothing could not be read in the sandbox: .*No such file"):
            await sandbox.read("nothing", 10)
        assert (await sandbox.run(["no-such-program"])).code == 127
        much = await sandbox.run(["head", "-c", "3000000", "/dev/zero"], keep=1000)
        assert (len(much.output), much.truncated) == (1000, True)
        background = await sandbox.run(["sh", "-c", "sleep 98765.75 & echo started"])
        assert background.text == "started\n" and not running("98765.75"), (
            "nobody waits for it, and it is ended"
        )
        assert (await sandbox.run(["true"], stdin=b"x" * (1 << 20))).code == 0, "nobody need read it"
        slow = await sandbox.run(["sh", "-c", "echo begun; sleep 600"], seconds=1)
        assert slow.timed_out and slow.text == "begun\n"
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.run(["true"])
    assert left_behind() == []


@needs_bubblewrap
async def test_a_process_that_hides_its_files_has_sandboxes_too():
    before = os.umask(0o077)
    try:
        made = await bubblewrap()
        async with made.sandbox() as sandbox:
            result = await sandbox.run(["sh", "-c", "id -un; touch /tmp/file file && cat /etc/group"])
    finally:
        os.umask(before)
    assert result.text.startswith("box\nroot:x:0:") and left_behind() == []


@needs_bubblewrap
@pytest.mark.slow
async def test_a_planted_link_leads_nowhere(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("secret")
    made = await bubblewrap()
    async with made.sandbox() as sandbox:
        await sandbox.run(["sh", "-c", f"ln -s {outside} link; ln -s {tmp_path} folder"])
        for path in ("link", "folder/outside"):
            with pytest.raises(SandboxError):
                await sandbox.read(path, 100)
            with pytest.raises(SandboxError):
                await sandbox.write(path, b"written")
        deep = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')"
        await sandbox.run(["python3", "-c", deep])
    assert outside.read_text() == "secret" and left_behind() == []


@needs_bubblewrap
async def test_a_cancelled_command_ends_and_leaves_nothing():
    made = await bubblewrap()

    async def work():
        async with made.sandbox() as sandbox:
            await sandbox.run(["sh", "-c", "setsid sleep 98765.125 & sleep 98765.125"])

    working = asyncio.ensure_future(work())
    async with asyncio.timeout(60):
        while not running("98765.125"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not running("98765.125") and left_behind() == []


@needs_bubblewrap
async def test_no_more_commands_at_a_time_than_may_be():
    made = await bubblewrap(concurrent=1)
    async with made.sandbox() as one, made.sandbox() as other:
        first = asyncio.ensure_future(one.run(["sh", "-c", "sleep 1; date +%s%N"]))
        await asyncio.sleep(0)
        second = await other.run(["date", "+%s%N"])
        assert int(second.text) > int((await first).text)


@needs_bubblewrap
async def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    stale, own = tmp_path / f"stackrl-sandbox-{gone.pid}-x", tmp_path / f"stackrl-sandbox-{os.getpid()}-x"
    for folder in (stale, own):
        (folder / "box").mkdir(parents=True)
    await bubblewrap()
    assert list(tmp_path.iterdir()) == [own]


# ---- what is not there is said, and nothing takes its place


def program(folder, name, text):
    """An executable script."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@needs_bubblewrap
async def test_bubblewrap_that_does_not_work_is_an_error(tmp_path, monkeypatch):
    program(tmp_path, "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        SandboxError, match=r"does not work here \(.*bwrap: No permissions .*seccomp=unconfined"
    ):
        await machine(BOX).check()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SandboxError, match=r"(git|prlimit|setpriv) is not installed here; type `apt-get install"
    ):
        await machine(BOX).check()
    assert left_behind() == []


@pytest.mark.parametrize(
    ("args", "tool"),
    [
        pytest.param(BOX, "bwrap", marks=needs_bubblewrap),
        pytest.param(BOX, "prlimit", marks=needs_bubblewrap),
        (UNSAFE, "prlimit"),
    ],
)
async def test_a_command_that_never_begins_is_a_fault_of_the_machine(args, tool, tmp_path, monkeypatch):
    made = machine(args)
    await made.check()
    async with made.sandbox() as sandbox:
        assert (await sandbox.run(["sh", "-c", "echo 'bwrap: no' >&2; exit 1"])).errors == b"bwrap: no\n"
        program(tmp_path, tool, "echo 'no more namespaces' >&2; exit 1")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(os, "defpath", f"{tmp_path}:{os.defpath}")
        monkeypatch.setattr(sys, "base_prefix", "/nowhere")
        if tool == "prlimit" and args is BOX:
            made.seen += ["--ro-bind", str(tmp_path / tool), "/usr/bin/prlimit"]
        with pytest.raises(SandboxError, match=r"a command did not begin: .*no more namespaces"):
            await sandbox.run(["true"])
        program(tmp_path, tool, "sleep 600")
        with pytest.raises(SandboxError, match="a command did not begin in time"):
            await sandbox.run(["true"], seconds=1)
    assert left_behind() == []


async def test_what_fails_on_a_full_disk_is_a_fault_of_the_machine(monkeypatch):
    async with machine(UNSAFE).sandbox() as sandbox:
        assert (await sandbox.run(["false"])).code == 1
        monkeypatch.setattr(folders, "LEAST_FREE", 1 << 60)
        assert (await sandbox.run(["true"])).code == 0
        with pytest.raises(SandboxError, match=r"the disk that holds .* is full"):
            await sandbox.run(["false"])


MANY_EMPTY = """
import os, time
for n in range(3000): open(str(n), "w").close()
time.sleep(100)
"""


@pytest.mark.parametrize(
    "args", [pytest.param(BOX, marks=needs_bubblewrap), UNSAFE], ids=["bubblewrap", "host"]
)
async def test_files_are_counted_also_where_nothing_is_in_them(args):
    made = machine({**args, "disk": "64MiB", "files": 2000})
    await made.check()
    async with made.sandbox() as sandbox:
        flood = await sandbox.run(["python3", "-c", MANY_EMPTY])
        assert flood.out_of_disk and not flood.timed_out


@needs_bubblewrap
async def test_folders_to_read_must_be_there(tmp_path):
    with pytest.raises(SandboxError, match=r"no/such is no folder on this machine"):
        await bubblewrap(read=["/no/such"])
    (tmp_path / "data").write_text("read me")
    if os.geteuid() == 0:
        with pytest.raises(SandboxError, match=r"another user, who may not read .*type `chmod"):
            await bubblewrap(read=[str(tmp_path)])
        tmp_path.chmod(0o755)
    made = await bubblewrap(read=[str(tmp_path)])
    async with made.sandbox() as sandbox:
        assert (await sandbox.run(["cat", str(tmp_path / "data")])).text == "read me"
        assert (await sandbox.run(["touch", str(tmp_path / "new")])).code == 1


def test_the_machine_itself_only_where_that_is_said():
    with pytest.raises(ValueError, match=r"isolates nothing, .*add unsafe_allow_host: true"):
        machine({"type": "host"})


@pytest.mark.parametrize(
    "args, said",
    [
        ({}, "'type' is a required property"),
        ({"type": "bwrap"}, "'bwrap' is not one of"),
        ({"type": "host"}, "'unsafe_allow_host' is a required property"),
        ({"type": "host", "unsafe_allow_host": False}, "True was expected"),
        ({"type": "bubblewrap", "image": "x"}, "'image' was unexpected"),
        ({"type": "docker", "read": ["/srv"]}, "'read' was unexpected"),
        ({"type": "bubblewrap", "read": ["relative"]}, "does not match"),
        ({"type": "docker", "memory": "lots"}, "does not match"),
        ({"type": "docker", "timeout": 0}, "less than or equal to the minimum"),
    ],
)
def test_what_args_may_say(args, said):
    errors = [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(args)]
    assert any(said in error for error in errors), errors


def test_settings_are_read():
    settings = Settings.of({"type": "docker", "memory": "1GiB", "image": "python:3.12", "concurrent": 3})
    assert (settings.memory, settings.image, settings.at_once) == (1 << 30, "python:3.12", 3)
    assert Settings.of({"type": "bubblewrap"}).at_once == os.cpu_count()
    jsonschema.validate({**BOX, "read": ["/srv"]}, SCHEMA)
    jsonschema.validate(UNSAFE, SCHEMA)


# ---- control groups, version 2


def test_groups_of_version_2_are_made_where_they_may_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "_EMPTY_SECONDS", 0.1)  # plain files do not lose their processes
    mount = tmp_path / "cgroup"
    own = mount / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    (mount / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("\n")
    (tmp_path / "self").write_text("0::/user.slice/session.scope\n")
    groups = Cgroups.find(mount, tmp_path / "self")
    group = groups.make("stackrl-1-a", 1 << 20, 7)
    assert group.folders == (mount / "user.slice" / "stackrl-1-a",)
    names = ("memory.max", "pids.max", "memory.swap.max")
    written = {name: (group.folders[0] / name).read_text() for name in names}
    assert written == {"memory.max": "1048576", "pids.max": "7", "memory.swap.max": "0"}
    (group.folders[0] / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.out_of_memory() == 2
    (mount / "user.slice" / "cgroup.subtree_control").write_text("cpu\n")
    assert Cgroups.find(mount, tmp_path / "self") is None


# ---- docker


FAKE_DOCKER = """
printf '%s\\n' "$*" >> "{log}"
case "$1" in
version) {version} ;;
ps) cat "{log}.ps" ;;
run) {run} ;;
exec) shift; while [ "${{1#-}}" != "$1" ]; do [ "$1" = --workdir ] && shift; shift; done; shift; exec "$@" ;;
esac
"""


def fake_docker(folder, monkeypatch, version="echo 28.0", run="echo 0123"):
    """A `docker` that runs commands on this machine, and the list of what it was asked."""
    log = folder / "orders"
    (folder / "orders.ps").touch()
    program(folder, "docker", FAKE_DOCKER.format(log=log, version=version, run=run))
    # what ends all commands of a container must not do so here
    program(folder, "sh", '[ "$*" = "-c kill -9 -1" ] || exec /bin/sh "$@"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: log.read_text().splitlines()


async def test_containers_are_closed_and_removed(tmp_path, monkeypatch):
    orders = fake_docker(tmp_path, monkeypatch)
    bounds = {"memory": "1GiB", "processes": 50, "user": "65534", "disk": "1GiB", "files": 5000}
    made = machine({"type": "docker", **bounds})
    async with made.sandbox("own/image:1") as sandbox:
        assert (await sandbox.run(["echo", "hello"], folder="/tmp")).text == "hello\n"
    start, command, end, remove = orders()
    for option in (
        "--network none", "--cap-drop ALL", "--security-opt no-new-privileges", "--pids-limit 50",
        "--user 65534",
        "--memory 1073741824 --memory-swap 1073741824", "--rm",
        "--tmpfs /box:exec,mode=1777,size=1073741824,nr_inodes=5000",
    ):  # fmt: skip
        assert f" {option} " in start, option
    assert start.endswith("own/image:1 21600")
    name = start.split("--name ")[1].split()[0]
    assert command.startswith(f"exec --interactive --workdir /tmp {name} sh -c ")
    assert command.endswith(" sh echo hello")
    assert (end, remove) == (f"exec {name} sh -c kill -9 -1", f"rm --force --volumes {name}")


async def test_a_docker_that_does_not_work_is_an_error(tmp_path, monkeypatch):
    fake_docker(tmp_path, monkeypatch, version="echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    with pytest.raises(SandboxError, match=r"does not answer \(Cannot connect .*; start it"):
        await machine({"type": "docker"}).check()
    orders = fake_docker(tmp_path, monkeypatch, run="echo 'Unable to find image' >&2; exit 125")
    with pytest.raises(SandboxError, match="other:1 does not start: Unable to find image"):
        async with machine({"type": "docker", "image": "other:1"}).sandbox():
            pass
    assert orders()[-1].startswith("rm --force"), "also where it did not start"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="docker is not here; install it"):
        await machine({"type": "docker"}).check()


async def test_a_container_that_is_gone_is_a_fault_of_the_machine(tmp_path, monkeypatch):
    fake_docker(tmp_path, monkeypatch)
    made = machine({"type": "docker", "image": "own/image:1"})
    async with made.sandbox() as sandbox:
        assert (await sandbox.run(["sh", "-c", "echo Error response from daemon >&2; exit 1"])).code == 1
        program(tmp_path, "docker", "echo 'Error response from daemon: No such container: x' >&2; exit 1")
        with pytest.raises(SandboxError, match="did not begin: Error response from daemon: No such"):
            await sandbox.run(["git", "diff"])


async def test_containers_of_processes_that_are_no_more_are_removed(tmp_path, monkeypatch):
    orders = fake_docker(tmp_path, monkeypatch)
    gone = await asyncio.create_subprocess_exec("sleep", "600")
    left, own = docker.owner(gone.pid), docker.owner(os.getpid())
    gone.kill()
    await gone.wait()
    another_beginning = own.rpartition(".")[0] + ".1"
    elsewhere = "another-boot" + left
    makers = {"left": left, "own": own, "elsewhere": elsewhere, "number": another_beginning, "old": ""}
    listed = "".join(f"{name} {made_by}\n" for name, made_by in makers.items())
    (tmp_path / "orders.ps").write_text(listed)
    await machine({"type": "docker"}).check()
    removed = [order for order in orders() if order.startswith("rm")]
    assert removed == ["rm --force --volumes left", "rm --force --volumes number"]
    async with machine({"type": "docker", "image": "own/image:1"}).sandbox():
        pass
    assert any(f" --label stackrl.sandbox={own} " in order for order in orders())


def daemon():
    answer = ["docker", "version", "--format", "{{.Server.Version}}"]
    return bool(shutil.which("docker")) and subprocess.run(answer, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not daemon(), reason="no Docker daemon answers")
async def test_a_real_container():
    made = machine(
        {"type": "docker", "image": "busybox", "memory": "64MiB", "processes": 32, "timeout": 60.0}
    )
    await made.check()
    async with made.sandbox() as sandbox:
        await sandbox.write("a/b", b"text")
        assert await sandbox.read("a/b", 10) == b"text"
        assert (await sandbox.run(["ping", "-c1", "1.1.1.1"], seconds=10)).code != 0
        assert (await sandbox.run(["sh", "-c", "sleep 600"], seconds=1)).timed_out
        assert b"sleep 600" not in (await sandbox.run(["ps"])).output
