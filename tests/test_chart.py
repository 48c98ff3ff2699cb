"""deploy/chart: rendered by Helm, checked by Kubernetes' schemas, its commands parsed and run.

Helm's engine and the schemas are in .venv-chart. `tests/support/chart/resources.json` pins the
fields of custom resources that the chart sets.
"""

import base64
import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from cray_agents.cli import app
from cray_agents.config import Config, load_config
from cray_agents.errors import ConfigError
from cray_agents.runtime.gateway.app import routes
from cray_agents.server.platform_process import ReplicaCount, fetch_text
from tests.support.boards import ALERTS, BOARDS, OBSERVABILITY
from tests.support.campaign import free_port
from tests.support.environments.pythons import ROOT, venv
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # the venv may have to be made, once

CHART = ROOT / "deploy" / "chart"
SUPPORT = ROOT / "tests" / "support" / "chart"
PINNED = json.loads((SUPPORT / "resources.json").read_text())
EXAMPLES = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("examples/*.yaml"))
}
NODES = "slurm.slinky.nodeSets.gpu"
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
#: What is wrong | the example that it is in | what is changed there | what the refusal says
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "no image": ("one_gateway", {"image": ""}, "image"),
    "an image of no version": ("one_gateway", {"image": "registry.example.org/cray"}, "image"),
    "a misspelled value": ("slinky", {"gateways.counts": 4}, "counts"),
    "a setting of the chart's": ("slinky", {"settings.home": "/tmp"}, "home"),
    "a role that is none": ("existing", {"keys.roles.web": "root"}, "roles"),
    "replicas that are none": ("slinky", {"controller.replicas": "slurm:all"}, "replicas"),
    "nodes without memory": ("slinky", {f"{NODES}.memory": None}, "memory"),
    "a partition of two lines": ("slinky", {f"{NODES}.partition": "a=1\nb=2"}, "partition"),
    "a site's Slurm without a key": ("slurm_outside", {"slurm.outside.secret": ""}, "secret"),
    "gateways beside replicas here": ("slinky", {"controller.replicas": 1}, "in Slurm alone"),
    "replicas without a Slurm": ("one_gateway", {"controller.replicas": "slurm:2"}, "slurm.kind"),
    "a standby alone": ("one_gateway", {"controller.standbys": 1}, "a standby needs gateways"),
    "a way to no node": ("existing", {"settings.replica_interface": ""}, "replica_interface"),
    "no key for Prometheus": ("existing", {"keys.roles.metrics": "train"}, "keys.roles.metrics"),
    "a Slurm without nodes": ("slinky", {"slurm.slinky.nodeSets": None}, "nodeSets"),
    "a toleration of no form": ("slinky", {"gateways.tolerations": [{"keys": "gpu"}]}, "'keys'"),
    "a node's toleration, too": ("slinky", {f"{NODES}.tolerations": [{"keys": "g"}]}, "'keys'"),
    "a setting that is none": ("slinky", {"settings.train_nods": 8}, "train_nodes"),
    **{f"no {role}": ("slinky", {f"slurm.slinky.images.{role}": ""}, f"images.{role} is empty")
       for role in ("slurmctld", "slurmrestd", "sackd", "login")},
    "no sackd outside": ("existing", {"slurm.outside.image": ""}, "outside.image is empty"),
    "Prometheus shut out": ("existing", {"networkPolicy": {}}, "networkPolicy.monitoring"),
}  # fmt: skip


def changed(example: str, changes: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(EXAMPLES[example])
    for path, value in changes.items():
        *folders, name = path.split(".")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        if value is None:
            place.pop(name)
        else:
            place[name] = value
    return values


def render(*values: dict[str, Any]) -> list[dict[str, Any]]:
    argv = [venv("chart") / "bin" / "python", SUPPORT / "render.py"]
    done = subprocess.run(argv, input=json.dumps(values), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@cache
def rendered() -> dict[str, dict[str, Any]]:
    """All examples and all broken values, rendered by one process."""
    values = EXAMPLES | {name: changed(*row[:2]) for name, row in BROKEN.items()}
    return dict(zip(values, render(*values.values()), strict=True))


def objects(name: str, *kinds: str) -> list[dict[str, Any]]:
    found = rendered()[name]
    assert "refused" not in found, found
    return [one for one in found["objects"] if not kinds or one["kind"] in kinds]


def faults(name: str) -> list[str]:
    """What is wrong with the objects, and with the settings in them."""
    found: list[str] = list(rendered()[name]["faults"])
    for one in objects(name, *(set(PINNED) - {"$defs", "$comment"})):
        schema = PINNED[one["kind"]] | {"$defs": PINNED["$defs"]}
        errors = jsonschema.Draft202012Validator(schema).iter_errors(one["spec"])
        found += [f"{one['kind']}: {error.json_path}: {error.message}" for error in errors]
    return found


def settings(name: str, folder: Path) -> Config:
    """The configuration as a pod in that folder reads it."""
    (folder / "cray-agents.toml").write_text(toml(objects(name)))
    return load_config(directory=folder)


def toml(found: list[dict[str, Any]]) -> str:
    (text,) = [inner for key, inner in pairs(found) if key == "cray-agents.toml"]
    return str(text)


def containers(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The containers of our own pods."""
    specs = [one["spec"]["template"]["spec"] for one in found if one["kind"] == "Deployment"]
    return [one for spec in specs for one in [*spec.get("initContainers", ()), *spec["containers"]]]


def parsed(argv: list[str]) -> dict[str, Any]:
    """The options of a command line of ours, by our own parser."""
    assert argv[0] == "cray-agents"
    command: Any = typer.main.get_command(app)
    words, context = argv[1:], None
    while True:
        context = command.make_context(command.name, [*words], parent=context)
        if not hasattr(command, "commands"):
            return dict(context.params)
        left = [*context._protected_args, *context.args]
        _, command, words = command.resolve_command(context, left)


def pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value within a tree."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield str(key), inner
        if isinstance(inner, dict | list):
            yield from pairs(inner)


@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_takes_the_objects(example: str) -> None:
    assert faults(example) == []
    names = [(one["kind"], one["metadata"]["name"]) for one in objects(example)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_values_are_refused(broken: str, tmp_path: Path) -> None:
    found, said = rendered()[broken], BROKEN[broken][2]
    if "refused" in found:
        assert said in found["refused"]
    elif wrong := faults(broken):
        assert all(said in fault for fault in wrong)
    else:
        with pytest.raises(ConfigError, match=said):
            settings(broken, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_run_commands_and_settings_that_exist(example: str, tmp_path: Path) -> None:
    config = settings(example, tmp_path)
    root, given = EXAMPLES[example]["root"].get("path", "/shared"), EXAMPLES[example]
    assert str(config.home) == f"{root}/cray-agents" and config.api_keys == "required"
    assert config.scheduler == ("slurm" if "slurm" in given else "local")
    for name, value in given.get("settings", {}).items():
        assert name == "job" or getattr(config, name) == value
    ours = [one for one in containers(objects(example)) if one["command"][0] == "cray-agents"]
    seen = {one["name"]: parsed(one["command"]) for one in ours}
    further = given.get("gateways", {}).get("count", 0)
    assert seen["controller"]["standby"] == (further > 0) == ("gateway" in seen)
    assert ReplicaCount.parse(seen["controller"]["replicas"]).total > 0
    assert not further or seen["gateway"]["gateway_only"]
    made = {one["name"]: one["role"] for one in seen.values() if "secret_file" in one}
    assert made == given.get("keys", {}).get("roles", {"admin": "admin", "metrics": "use"})
    for one in ours:
        names = {entry["name"].removeprefix("CRAY_AGENTS_").lower() for entry in one["env"]}
        assert names <= {"home", "host"} and one["workingDir"] == "/etc/cray-agents"


@pytest.mark.parametrize("example", EXAMPLES)
def test_probes_and_scrapes_are_routes(example: str) -> None:
    roles = {route.path: route.role for route in routes() if "GET" in route.methods}
    probes = [inner["path"] for key, inner in pairs(objects(example)) if key == "httpGet"]
    assert probes and {roles[path] for path in probes} == {"open"}
    monitors = objects(example, "ServiceMonitor")
    scraped = [inner for key, inner in pairs(monitors) if key == "path"]
    assert {getattr(roles[path], "name", "") for path in scraped} <= {"use"}
    monitored = EXAMPLES[example].get("monitoring", {}).get("enabled", False)
    assert bool(scraped) == monitored == bool(objects(example, "PrometheusRule"))
    for policy in objects(example, "NetworkPolicy") if monitored else ():
        assert any(PROMETHEUS in one.get("from", [PROMETHEUS]) for one in policy["spec"]["ingress"])


@pytest.mark.parametrize("example", EXAMPLES)
def test_names_and_selectors_lead_somewhere(example: str) -> None:
    found, given = objects(example), {str(value) for _, value in pairs(EXAMPLES[example])}
    made = {(one["kind"], one["metadata"]["name"]) for one in found}
    secrets = ("secret", "credentials", "slurmKeyRef", "jwtKeyRef", "sssdConfRef")
    refers = dict.fromkeys(secrets, "Secret") | {"controllerRef": "Controller",
        "configMap": "ConfigMap", "persistentVolumeClaim": "PersistentVolumeClaim"}  # fmt: skip
    count = 0
    for key, inner in pairs(found):
        if key in refers:
            name = inner.get("name") or inner.get("secretName") or inner.get("claimName")
            assert (refers[key], name) in made or name in given, (key, name)
            count += 1
        if key in ("slurmctld", "slurmrestd", "login"):
            assert f"/{key}:" in inner["image"]  # SchedMD's images have one role each
    assert count >= 3
    deployments = objects(example, "Deployment")
    ours = [one["spec"]["template"]["metadata"]["labels"] for one in deployments]
    services = [one["metadata"]["labels"] for one in objects(example, "Service")]
    for one in found:
        spec = one.get("spec", {})
        if selector := spec.get("selector") or spec.get("podSelector"):
            among = services if one["kind"] == "ServiceMonitor" else ours
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= labels.items() for labels in among), one


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_have_no_rights_that_they_do_not_need(example: str) -> None:
    for one in objects(example, "Deployment"):
        pod = one["spec"]["template"]["spec"]
        # Kubernetes would set CRAY_AGENTS_PORT for a Service named cray-agents
        assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    for one in containers(objects(example)):
        safe = one["securityContext"]
        assert safe["readOnlyRootFilesystem"] and not safe["allowPrivilegeEscalation"]
        assert safe["capabilities"] == {"drop": ["ALL"]}
        assert safe.get("runAsUser") is None or one["name"] in ("munged", "sackd")
        ours = EXAMPLES[example]["image"]  # which has no sackd where it has slurmd
        assert "/sackd:" in one["image"] if one["name"] == "sackd" else one["image"] == ours


def test_boards_and_alerts_have_one_copy() -> None:
    assert (CHART / "observability").is_symlink()
    (rules,) = objects("slinky", "PrometheusRule")
    assert [rule for group in rules["spec"]["groups"] for rule in group["rules"]] == ALERTS
    maps = {one["metadata"]["name"]: one["data"] for one in objects("slinky", "ConfigMap")}
    boards = {name.removesuffix(".json"): text for name, text in maps["cray-boards"].items()}
    assert {name: json.loads(text) for name, text in boards.items()} == BOARDS
    assert (CHART / "observability").resolve() == OBSERVABILITY.resolve()


def test_a_large_platform() -> None:
    """4 gateways, a standby, 64 nodes of 8 GPUs, as the docs say."""
    deployments = objects("slinky", "Deployment")
    sizes = {one["metadata"]["name"]: one["spec"]["replicas"] for one in deployments}
    assert sizes == {"cray-gateway": 4, "cray-controller": 2}
    assert len(objects("slinky", "PodDisruptionBudget")) == 2
    (nodes,) = [one["spec"] for one in objects("slinky", "NodeSet")]
    limits = nodes["slurmd"]["resources"]["limits"]
    assert (nodes["replicas"], limits["nvidia.com/gpu"]) == (64, 8)
    assert nodes["extraConf"] == "Gres=gpu:h200:8"
    assert nodes["slurmd"]["securityContext"] == {"runAsUser": 0}  # the image's user is not root
    commands = {one["name"]: one["command"] for one in containers(deployments)}
    (slurm,) = objects("slinky", "Controller")  # whose operator makes the Service NAME-controller
    assert commands["sackd"][-1] == f"{slurm['metadata']['name']}-controller.agents:6817"
    assert nodes["template"]["spec"]["runtimeClassName"] == "nvidia"
    # without accounting there is no QOS: a partition has the priority
    [conf] = re.findall(r"PartitionName=serve (.*)", slurm["spec"]["extraConf"])
    assert {"Nodes=gpu", "PriorityTier=10"} <= set(conf.split())
    assert 'replica = ["--partition=serve"]' in toml(objects("slinky"))
    assert "GraceTime=300" in nodes["partition"]["config"]


def test_nothing_is_made_that_exists() -> None:
    assert objects("existing", "Secret", "PersistentVolumeClaim", "NodeSet") == []
    kinds = {one["kind"] for one in objects("no_prometheus")}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "NetworkPolicy"}


def test_the_pods_commands_serve(tmp_path: Path) -> None:
    """A controller and a gateway, by the commands, settings, keys and probes of their pods."""
    values = changed("one_gateway", {"root.path": str(tmp_path / "root"), "gateways.count": 1,
                                     "controller.replicas": 0, "model.source": ""})  # fmt: skip
    (found,) = render(values)
    made = found["objects"]
    (tmp_path / "cray-agents.toml").write_text(toml(made))
    (secret,) = [one["data"] for one in made if one["kind"] == "Secret"]
    secrets = {name: base64.b64decode(text).decode() for name, text in secret.items()}
    for name, text in secrets.items():
        (tmp_path / name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if name[:12] != "CRAY_AGENTS_"}
    kept |= {"CRAY_AGENTS_CACHE": str(tmp_path / "cache"), "CRAY_AGENTS_HOST": "0.0.0.0"}

    def ask(port: int, path: str, key: str = "") -> int:
        try:
            fetch_text({"url": f"http://127.0.0.1:{port}"}, path, secrets.get(key))
        except OSError as error:
            return int(getattr(error, "code", 0))
        return 200

    with ExitStack() as stack:
        running = []
        for one in sorted(containers(made), key=lambda one: "gateway" in one["name"]):
            port = free_port()
            program = str(Path(sys.executable).with_name("cray-agents"))
            argv = [program, *(w.replace("/keys/", f"{tmp_path}/") for w in one["command"][1:])]
            here = kept | {"CRAY_AGENTS_PORT": str(port)}
            process = subprocess.Popen(argv, cwd=tmp_path, env=here)
            stack.callback(process.kill)
            if "ports" not in one:
                assert process.wait() == 0
                continue
            assert wait_until(partial(ask, port, "/health/live")) == 200
            answers = [ask(port, "/metrics", key) for key in ("", "metrics", "admin")]
            assert answers == [401, 200, 200]
            running.append((process, port))
        assert ask(running[1][1], "/metrics/engines", "metrics") == 200  # by the controller
        for process, _ in reversed(running):
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0


@pytest.mark.skipif(os.environ.get("CRAY_TEST_KUBERNETES") != "1", reason="make soak")
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_cluster_takes_the_objects(example: str) -> None:
    """The API server that kubectl knows, with the operators' resources: nothing is kept there."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects(example)})
    argv = ["kubectl", "apply", "--dry-run=server", "-f", "-"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
