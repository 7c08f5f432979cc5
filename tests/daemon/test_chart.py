"""The Helm chart: what it renders is valid, and a daemon runs from it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier import Unavailable
from kvtier.units import GIB, parse_bytes
from kvtier_daemon.app import STOP_S
from kvtier_daemon.config.schema import load
from support.daemons import SERVE, Daemon, kvtier
from support.ports import reserved_port

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "daemon" / "helm" / "kvtier"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
validating = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.skipif(HELM is None, reason="there is no helm")
SECRET = bytes(range(32))
EVERYTHING: dict[str, Any] = {
    "warm": {"size": "64GiB"},
    "cold": {"directories": ["/mnt/a", "/mnt/with space"], "size": "1TiB"},
    "tenants": {
        "search": {"uids": [2001, 2002], "quota": "60%"},
        "chat": {"uids": ["*"], "quota": "40%"},
    },
    "secrets": {"data": {"search": base64.b64encode(SECRET).decode()}},
    "config": 'log_level = "debug"\n[cold]\ncodec = "r32"\n',
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"team": "inference"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "no port": {"http": {"enabled": False}},
    "huge pages": {"warm": {"size": "2GiB", "hugePages": True}},
    "a Secret of theirs": {"secrets": {"existing": "mine", "tenants": ["search"]}},
    "IPv6": {"http": {"address": "::"}},
    "resources": {"resources": {"limits": {"memory": "80Gi"}}},
}


def rendering(values: dict[str, Any], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(values))
    command = [HELM, "template", "kvtier", str(CHART), "--namespace", "llm", "--values", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(values: dict[str, Any], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The objects, by kind."""
    done = rendering(values, tmp_path)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert len({one["kind"] for one in objects}) == len(objects)
    return {one["kind"]: one for one in objects}


def pod_of(objects: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod, and its only container."""
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def written(objects: dict[str, dict[str, Any]], folder: Path) -> tuple[Path, dict[str, str]]:
    """Write the configuration files of the pod below this folder. Returns its environment."""
    pod, container = pod_of(objects)
    assert container["args"] == ["serve", "--config", "/etc/kvtier/kvtier.toml"]
    (volume,) = [one["configMap"] for one in pod["volumes"] if "configMap" in one]
    assert volume["name"] == objects["ConfigMap"]["metadata"]["name"]
    for item in volume["items"]:
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(objects["ConfigMap"]["data"][item["key"]])
    return folder / "kvtier.toml", {one["name"]: one["value"] for one in container["env"]}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_all_objects_are_valid(values: dict[str, Any], tmp_path: Path) -> None:
    objects = rendered(values, tmp_path)
    assert {"DaemonSet", "ConfigMap"} <= objects.keys()
    for kind, one in objects.items():
        if kind != "ServiceMonitor":  # its schema comes with the operator
            validating.validate(one, validating.latest_version(), strict=True)
    assert ("Secret" in objects) is bool(values.get("secrets", {}).get("data"))
    assert ("ServiceMonitor" in objects) is bool(values.get("serviceMonitor"))


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_the_daemon_accepts_the_configuration_of_the_pod(
    values: dict[str, Any], tmp_path: Path
) -> None:
    container = (ROOT / "Containerfile").read_text()
    objects = rendered(values, tmp_path)
    pod, daemon = pod_of(objects)
    file, asked = written(objects, tmp_path / "etc")
    image = dict(re.findall(r"(KVTIER_\w+)=(\S+)", container))
    config = load(file, environ=image | asked, uid=10001).config
    assert config.warm.size_bytes == parse_bytes(values.get("warm", {}).get("size", "64GiB"))
    limits = daemon["resources"]["limits"]
    huge = parse_bytes(limits.get("hugepages-2Mi", "0Gi") + "B")
    assert huge + parse_bytes(limits["memory"] + "B") >= config.warm.size_bytes + GIB
    assert config.warm.huge_pages is bool(huge)
    (paths,) = pod["initContainers"]
    mounts = {one["mountPath"] for one in daemon["volumeMounts"]}
    cold = () if config.cold is None else config.cold.directories
    assert [str(one) for one in cold] == values.get("cold", {}).get("directories", [])
    for path in (config.socket.parent, config.state, *cold):
        assert str(path) in mounts & {one["mountPath"] for one in paths["volumeMounts"]}
        assert f"'{path}'" in paths["command"][2]
    volumes = {one["name"] for one in pod["volumes"]}
    for one in (*daemon["volumeMounts"], *paths["volumeMounts"]):
        assert one["name"] in volumes
    user = daemon["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in container and f"-o {user} " in paths["command"][2]
    assert config.socket_group == user
    assert pod["terminationGracePeriodSeconds"] > 2 * STOP_S
    if config.http is not None:
        assert daemon["ports"][0]["containerPort"] == config.http.listen[1]
    assert (config.http is None) is ("ports" not in daemon)
    assert set(config.tenants) == set(values.get("tenants", {})) or not values.get("tenants")


def test_the_pod_has_no_more_permissions_than_the_systemd_unit(tmp_path: Path) -> None:
    _, daemon = pod_of(rendered({}, tmp_path))
    may = daemon["securityContext"]
    assert may["capabilities"] == {"drop": ["ALL"]} and may["readOnlyRootFilesystem"]
    assert may["runAsNonRoot"] and not may["allowPrivilegeEscalation"] and not may["privileged"]
    unit = (ROOT / "systemd" / "kvtierd.service").read_text()
    for line in ("CapabilityBoundingSet=\n", "NoNewPrivileges=yes", "ProtectSystem=strict"):
        assert line in unit


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"warm": {"size": "64GB"}}, "warm.size is 64GB: write whole GiB, such as 64GiB"),
        ({"cold": {"directories": ["/a"]}}, "cold.size: write how much may be in"),
        ({"secrets": {"data": {"a": "AAAA"}}}, "secrets.data.a has 3 bytes: write 32"),
        ({"http": {"enabled": False}, "serviceMonitor": {"enabled": True}}, "needs http.enabled"),
    ],
    ids=["size", "cold", "secret", "monitor"],
)
def test_values_that_make_no_sense_are_refused(
    values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    done = rendering(values, tmp_path)
    assert done.returncode != 0 and says in done.stderr


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"] == chart["version"]


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """The chart rendered for this folder, and a daemon that was started from it as a pod starts it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    values = EVERYTHING | {
        "runDirectory": str(tmp_path / "run"), "stateDirectory": str(tmp_path / "state"),
        "warm": {"size": "1GiB"}, "cold": {"directories": [str(disk)], "size": "1GiB"},
        "http": {"address": "127.0.0.1", "port": reserved_port()},
        "tenants": {"search": {"uids": ["*"]}},
    }  # fmt: skip
    objects = rendered(values, tmp_path)
    pod, container = pod_of(objects)
    for name in ("secrets", "credentials"):
        (tmp_path / name).mkdir()
    for name, text in objects["Secret"]["data"].items():
        # The kubelet mounts files as links too.
        (tmp_path / "secrets" / f"..{name}").write_bytes(base64.b64decode(text))
        (tmp_path / "secrets" / name).symlink_to(f"..{name}")
    script = pod["initContainers"][0]["command"][2].replace("-o 10001 -g 10001 ", "")
    for path in ("/secrets", "/run/credentials"):
        script = re.sub(rf"(?<=[ ']){path}/", f"{tmp_path}/{Path(path).name}/", script)
    subprocess.run(["sh", "-ec", script], check=True)
    file, environ = written(objects, tmp_path / "etc")
    file.write_text(file.read_text().replace("socket_group = 10001\n", ""))
    environ["CREDENTIALS_DIRECTORY"] = str(tmp_path / "credentials")
    done = kvtier("config", "check", str(file), **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "log").open("wb") as log:
        command = [*SERVE, "--config", str(file)]
        process = subprocess.Popen(command, stderr=log, env=os.environ | environ)
    daemon = Daemon(process, environ["KVTIER_SOCKET"], tmp_path / "log")
    yield daemon, container, values["http"]["port"]
    daemon.stop()


def test_a_daemon_runs_from_the_rendered_chart(served: Any, tmp_path: Path) -> None:
    daemon, container, port = served
    assert list(when_complete(daemon)["tenants"]) == ["search"]
    ready = container["readinessProbe"]["httpGet"]
    assert ready["port"] == container["ports"][0]["name"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{ready['path']}") as answer:
            assert answer.status == 200
    except urllib.error.HTTPError as error:
        assert b"its event loop stalled" in error.read(), "on a busy machine"
    assert not (tmp_path / "state" / "secrets" / "search").exists(), "the Secret's is used"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o750
    alive = container["livenessProbe"]["exec"]["command"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "KVTIER_SOCKET": daemon.socket}
    answered = (not subprocess.run(alive, env=environ, check=False).returncode for _ in range(20))
    assert any(answered)
    assert daemon.stop() == 0
    assert subprocess.run(alive, env=environ, check=False).returncode == 1


def when_complete(daemon: Daemon) -> dict[str, Any]:
    """The stats after all memory is allocated. On a busy machine single requests may time out."""
    while True:
        assert daemon.process.poll() is None, daemon.log.read_text()
        with contextlib.suppress(Unavailable):
            stats = daemon.stats()
            if stats["tiers"]["warm"]["allocated_bytes"] == GIB:
                return stats
        time.sleep(0.02)


@pytest.mark.parametrize(("code", "lives"), [(0, True), (2, True), (3, False)])
def test_a_pod_is_restarted_only_without_an_answer(tmp_path: Path, code: int, lives: bool) -> None:
    _, container = pod_of(rendered({}, tmp_path))
    asked = tmp_path / "kvtier"
    asked.write_text(f"#!/bin/sh\nexit {code}\n")
    asked.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(container["livenessProbe"]["exec"]["command"], env=path, check=False)
    assert (done.returncode == 0) is lives


def test_the_documented_pod_of_an_engine_reaches_the_socket(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    engine = yaml.safe_load(text)
    validating.validate(engine, validating.latest_version(), strict=True)
    pod, daemon = pod_of(rendered({}, tmp_path))
    asked = {one["name"]: one["value"] for one in daemon["env"]}
    (mount,) = engine["spec"]["containers"][0]["volumeMounts"]
    (volume,) = engine["spec"]["volumes"]
    assert str(Path(asked["KVTIER_SOCKET"]).parent) == mount["mountPath"]
    assert volume["hostPath"]["path"] in {
        one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one
    }
    group = daemon["securityContext"]["runAsGroup"]
    assert engine["spec"]["securityContext"]["supplementalGroups"] == [group]


def test_the_documented_command_renders(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^helm install ((?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert HELM is not None
    done = subprocess.run(
        ["sh", "-c", f"exec {HELM} template {command}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "/mnt/nvme0/kvtier" in done.stdout, done.stderr
