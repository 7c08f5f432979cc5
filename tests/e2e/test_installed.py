"""The service as an administrator installs it: the commands that `kvtier install-service` prints run
unmodified and in order with a real systemd that is PID 1 of its own namespaces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.booting import PROGRAM, BootError, Machine, reason_not_to
from support.pages import blocks

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"

COLD = "/srv/disk/cold"
CONFIG = f'[warm]\nsize = "64MiB"\n[cold]\ndirectories = ["{COLD}"]\nsize = "256MiB"\n'
CLIENT = """
import sys, time
from kvtier import Client, KvSpec
spec = KvSpec.dense(model="m", layers=4, kv_heads=8, head_dim=64, dtype="bfloat16", block_tokens=16,
                    weights="rev:1")
def opened(client):
    space = client.open(spec)
    return space, space.keys(list(range(64)))
"""
SAVE = f"""{CLIENT}
with Client.connect() as client:
    space, keys = opened(client)
    data = [bytes([n]) * spec.block_bytes for n in range(1, 5)]
    while space.match(keys).ready < 4:
        space.save(keys, data)
        time.sleep(0.01)
    with space.load(keys) as blocks:
        print([block[-1] for block in blocks])
"""
LOAD = f"""{CLIENT}
with Client.connect() as client:
    space, keys = opened(client)
    while True:
        found = space.match(keys)
        if found.ready == 4:
            with space.load(keys) as blocks:
                print([block[-1] for block in blocks])
            break
        # Right after a start there is no memory yet to read into.
        if not found.coming and sys.argv[1:] != ["patient"]:
            sys.exit(f"not found: {{found}}")
        time.sleep(0.01)
"""
# A client that is connected while the service restarts goes on.
RECONNECT = f"""{CLIENT}
import pathlib, subprocess
with Client.connect(timeout_s=60, reconnect_s=60) as client:
    opened(client)
    subprocess.run(["systemctl", "restart", "kvtierd.service"], check=True)
    client.ping()
    opened(client)
    print("connected again")
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if reason := reason_not_to():
        pytest.skip(reason)
    try:
        booted = Machine(tmp_path)
    except BootError as error:
        pytest.skip(f"this host boots no systemd in namespaces: {error}")
    yield booted
    booted.close()


def printed(machine: Machine, flags: str = "") -> list[str]:
    """The commands that `kvtier install-service` prints for the administrator."""
    output = machine.do(f"{PROGRAM} install-service {flags}")
    _, _, commands = output.partition("now run, as root:\n")
    return [line.strip() for line in commands.splitlines()]


def python(machine: Machine, name: str, program: str, *arguments: str, as_user: str = "") -> str:
    machine.do(f"cat > /tmp/{name}.py <<'END'\n{program}\nEND")
    return machine.do(f"{as_user} /opt/kvtier/bin/python /tmp/{name}.py {' '.join(arguments)}")


def wait_for(holds: Callable[[], bool], what: Callable[[], str], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what()
        time.sleep(0.05)


def test_the_printed_commands_install_serve_reload_restart_and_upgrade(machine: Machine) -> None:
    machine.do(f"mkdir -p /etc/kvtier; cat > /etc/kvtier/kvtier.toml <<'END'\n{CONFIG}END")
    for command in printed(machine):
        machine.do(command)
    assert machine.show("ActiveState") == "active"
    main = machine.show("MainPID")

    # A hit through the socket, for root and for a member of the group.
    assert python(machine, "save", SAVE) == "[1, 2, 3, 4]"
    machine.do("useradd --system --groups kvtier member")
    member = "setpriv --reuid=member --regid=member --init-groups"
    assert python(machine, "load", LOAD, as_user=member) == "[1, 2, 3, 4]"
    assert f"d {COLD}" in machine.do(f"find {COLD} -maxdepth 0 -printf '%y %p'")
    assert machine.do("stat -c %U:%a /var/lib/kvtier /var/lib/kvtier/secrets").split() == [
        "kvtier:700",
        "kvtier:700",
    ]

    machine.do("sed -i '1i max_clients = 77' /etc/kvtier/kvtier.toml")
    machine.do("systemctl reload kvtierd")
    shown = f"{PROGRAM} config show --origin | grep '^max_clients'"
    wait_for(lambda: "max_clients = 77" in machine.do(shown), machine.journal)
    assert machine.show("MainPID") == main

    machine.do("echo 'max_clients = 0' > /etc/kvtier/conf.d/wrong.toml; systemctl reload kvtierd")
    lines = "journalctl --no-pager -u kvtierd _COMM=kvtier -o cat -p"
    wait_for(lambda: "reload refused" in machine.do(f"{lines} err"), machine.journal)
    assert "serves on" in machine.do(f"{lines} info") and "serves on" not in machine.do(
        f"{lines} notice"
    )
    # The journal removes the priority and adds the time.
    assert not re.findall(r"^(?:<\d>|\d{4}-)", machine.do(f"{lines} debug"), re.MULTILINE)
    machine.do("rm /etc/kvtier/conf.d/wrong.toml")

    # The operators' page, with the commands as printed. Dirty blocks are on the disk afterwards.
    shell = [one.text for one in blocks(OPERATIONS) if one.language == "sh"]
    page = [
        text for text in shell if "helm install" not in text
    ]  # tests/daemon/test_chart.py covers it
    assert len(page) == 4 and page[0].startswith("python3 -m venv"), "which tests/faults runs"
    for block in page[1:]:
        machine.do(f"set -e; PATH=/opt/kvtier/bin:$PATH\n{block}")
    assert machine.show("MainPID") == main
    assert python(machine, "reconnect", RECONNECT) == "connected again"
    assert machine.show("MainPID") not in ("0", main)
    assert python(machine, "load", LOAD, "patient", as_user=member) == "[1, 2, 3, 4]"

    # An upgrade: new program files, and the same command again.
    main = machine.show("MainPID")
    machine.do(
        "sed -i 's/^__version__ = .*/__version__ = \"9.9.9\"/'"
        " /opt/kvtier/lib/python3*/site-packages/kvtier/__init__.py"
    )
    for command in printed(machine):
        machine.do(command)
    assert machine.show("MainPID") not in ("0", main), "the old program serves as before"
    assert "kvtier 9.9.9 serves" in machine.journal()
    assert python(machine, "load", LOAD, "patient") == "[1, 2, 3, 4]"


def test_blocks_in_memory_survive_a_crash_a_restart_and_an_upgrade(machine: Machine) -> None:
    machine.do(
        "mkdir -p /etc/kvtier; printf '[warm]\\nsize = \"64MiB\"\\n' > /etc/kvtier/kvtier.toml"
    )
    for command in printed(machine):
        machine.do(command)
    assert python(machine, "save", SAVE) == "[1, 2, 3, 4]"

    def restarted(how: str) -> None:
        main = machine.show("MainPID")
        machine.do(how)
        wait_for(
            lambda: (
                machine.show("MainPID") not in ("0", main)
                and machine.show("ActiveState") == "active"
            ),
            machine.journal,
        )

    restarted("systemctl kill --kill-whom=main --signal=KILL kvtierd.service")
    assert python(machine, "load", LOAD) == "[1, 2, 3, 4]"
    restarted("systemctl restart kvtierd.service")
    assert python(machine, "load", LOAD) == "[1, 2, 3, 4]"
    machine.do(
        "sed -i 's/^__version__ = .*/__version__ = \"9.9.9\"/'"
        " /opt/kvtier/lib/python3*/site-packages/kvtier/__init__.py"
    )
    restarted("systemctl restart kvtierd.service")
    assert python(machine, "load", LOAD) == "[1, 2, 3, 4]"
    # A stop frees the memory.
    machine.do("systemctl stop kvtierd.service")
    assert machine.show("ActiveState") == "inactive", "nothing starts it again without a client"
    assert machine.do("ls /run/kvtier") == "kvtier.sock"
    machine.do("systemctl start kvtierd.service")
    assert machine.do("/opt/kvtier/bin/python /tmp/load.py 2>&1 || true").startswith("not found")


def test_a_disk_comes_and_goes_without_a_restart_of_the_service(machine: Machine) -> None:
    directory = "/mnt/disk/kvtier"
    mounts = "mount --bind /srv/disk /mnt/disk"

    def stored() -> int:
        status = json.loads(machine.do(f"{PROGRAM} status --json"))
        return int(status["tiers"]["cold"]["blocks"])

    def is_mounted() -> bool:
        return directory.rpartition("/")[0] in machine.do(f"cat /proc/{main}/mountinfo")

    machine.do(f"mkdir -p /etc/kvtier /mnt/disk; {mounts}")
    text = CONFIG.replace(COLD, directory)
    machine.do(f"cat > /etc/kvtier/kvtier.toml <<'END'\n{text}END")
    for command in printed(machine):
        machine.do(command)
    main = machine.show("MainPID")
    assert python(machine, "save", SAVE) == "[1, 2, 3, 4]"
    machine.do(f"{PROGRAM} tier drain warm; {PROGRAM} tier off cold")
    assert is_mounted()
    machine.do("umount /mnt/disk")
    assert not is_mounted(), "the service keeps the file system in use"
    machine.do(f"{mounts}; {PROGRAM} tier on cold")
    wait_for(lambda: stored() == 4, machine.journal)
    assert machine.show("MainPID") == main

    # A start without the disk, which is mounted afterwards.
    machine.do("systemctl stop kvtierd.socket kvtierd.service; umount /mnt/disk")
    machine.do("systemctl start kvtierd.socket kvtierd.service")
    main = machine.show("MainPID")
    assert machine.show("ActiveState") == "active" and stored() == 0
    machine.do(mounts)
    wait_for(lambda: stored() == 4, machine.journal)
    assert machine.show("MainPID") == main
    assert python(machine, "load", LOAD, "patient") == "[1, 2, 3, 4]"


def test_commands_point_to_the_service_if_it_does_not_serve(machine: Machine) -> None:
    for command in printed(machine):
        machine.do(command)
    shows = "`systemctl status kvtierd` shows whether it starts, or why it failed"
    machine.do("systemctl stop kvtierd.socket kvtierd.service")
    stopped = machine.run(f"{PROGRAM} status")
    assert stopped.returncode == 3 and f"No such file or directory; {shows}" in stopped.stderr
    # Its journal says why it does not start.
    machine.do(f"{PROGRAM} bugreport --out /tmp/report.tar.gz")
    log = machine.do("tar --extract --to-stdout --file /tmp/report.tar.gz kvtier-bugreport/log.txt")
    assert log.startswith("journalctl --unit kvtierd.service") and "serves on" in log
    dropins, line = "/etc/systemd/system/kvtierd.service.d", "ExecStartPre=/bin/sleep infinity"
    machine.do(f"mkdir -p {dropins}; printf '[Service]\\n{line}\\n' > {dropins}/slow.conf")
    machine.do("systemctl daemon-reload; systemctl start kvtierd.socket")
    starting = machine.run(f"{PROGRAM} status")
    assert starting.returncode == 3
    assert "systemd listens at /run/kvtier/kvtier.sock for a daemon" in starting.stderr
    assert starting.stderr.strip().endswith(shows)


STORE = """systemd-run --quiet --unit=store --setenv=NANIO_ACCESS_KEY=a --setenv=NANIO_SECRET_KEY=b \\
    /opt/kvtier/bin/python -c 'from nanio.cli import main; main()' serve --data-dir /srv/disk/objects \\
    --host 127.0.0.1 --port 9000 --log-level error --no-access-log"""
REMOTE = """
[remote]
bucket = "blocks"
endpoint = "http://127.0.0.1:9000"
credentials = "/etc/kvtier/s3-credentials"
deadline_s = 30
write = "all"
"""


def test_the_service_writes_to_a_store_and_reads_from_it(machine: Machine) -> None:
    """What the unit forbids, the process of the store and the threads of its tier do not need."""
    # Machines of other tests are in the same cgroup, and their filters of addresses hold for a slice of all.
    dropins = "/etc/systemd/system/kvtierd.service.d"
    machine.do(
        f"mkdir -p {dropins}; printf '[Service]\\nSlice=own.slice\\n' > {dropins}/slice.conf"
    )
    machine.do(f"mkdir -p /etc/kvtier /srv/disk/objects/blocks; {STORE}")
    machine.do(f"cat > /etc/kvtier/kvtier.toml <<'END'\n{CONFIG}END")
    for command in printed(machine):
        machine.do(command)
    credentials = "[default]\\naws_access_key_id = a\\naws_secret_access_key = b\\n"
    machine.do(
        f"cd /etc/kvtier; printf '{credentials}' > s3-credentials; chown kvtier s3-credentials;"
        " chmod 600 s3-credentials"
    )
    machine.do(f"cat >> /etc/kvtier/kvtier.toml <<'END'\n{REMOTE}END")
    for command in printed(machine):
        machine.do(command)
    answers = (
        "/opt/kvtier/bin/python -c 'import socket; socket.create_connection((\"127.0.0.1\", 9000))'"
    )
    wait_for(lambda: machine.run(answers).returncode == 0, machine.journal)
    machine.do("systemctl restart kvtierd")
    status = f"{PROGRAM} status --json"
    wait_for(lambda: json.loads(machine.do(status))["tiers"]["remote"]["on"], machine.journal)
    assert python(machine, "save", SAVE) == "[1, 2, 3, 4]"
    objects = "find /srv/disk/objects -name '*-0-0' | wc -l"
    wait_for(lambda: machine.do(objects) == "4", machine.journal)
    machine.do(
        "systemctl stop kvtierd.socket kvtierd; rm -r /srv/disk/cold; systemctl start kvtierd"
    )
    assert python(machine, "load", LOAD, "patient") == "[1, 2, 3, 4]"


def test_daemons_of_nodes_are_installed_and_removed_by_the_printed_commands(
    machine: Machine,
) -> None:
    config = CONFIG.replace(COLD, f"{COLD} of node 0") + '[http]\nlisten = "127.0.0.1:9410"\n'
    machine.do(
        f"mkdir -p /etc/kvtier/node0; cat > /etc/kvtier/node0/kvtier.toml <<'END'\n{config}END"
    )
    for command in printed(machine, "--node 0"):
        machine.do(command)
    assert machine.show("ActiveState", "kvtierd@0.service") == "active"
    socket = "KVTIER_SOCKET=/run/kvtier-node0/kvtier.sock"
    assert python(machine, "save", SAVE, as_user=f"env {socket}") == "[1, 2, 3, 4]"
    assert machine.do(f"stat -c %U:%a '{COLD} of node 0'") == "kvtier:700"
    for command in printed(machine, "--uninstall"):
        machine.do(command)
    assert machine.do("systemctl list-units --all --no-legend 'kvtierd*'") == ""
    assert machine.do("find /etc/systemd/system -name 'kvtierd*'") == ""
