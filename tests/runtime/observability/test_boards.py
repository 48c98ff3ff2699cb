"""Boards and alerts: each expression names metrics and labels that a real scrape has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cray_agents.config.settings import PriceSettings
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.canary import Canary, CanaryTest
from tests.support import costly_root
from tests.support.bare_models import bare_model
from tests.support.boards import ALERTS, BOARDS, OBSERVABILITY, PANELS
from tests.support.promql import UsedMetric, used_metrics
from tests.support.scraped_metrics import labels_of, write_loop_and_jobs
from tests.support.scripted_gateway import served


def expressions() -> Iterator[tuple[str, str]]:
    for place, panel in PANELS:
        for curve in panel["targets"]:
            yield place, curve["expr"]
            assert curve["legendFormat"]
    for alert in ALERTS:
        yield alert["alert"], alert["expr"]


def unknown(used: UsedMetric, known: dict[str, set[str]]) -> str | None:
    if used.name not in known:
        return f"no metric {used.name}"
    missing = used.labels - known[used.name]
    return f"{used.name} has no {sorted(missing)}" if missing else None


async def test_every_expression_names_what_a_scrape_has(tmp_path: Path) -> None:
    prices = PriceSettings(gpu_hour={"gpu": 1.0}, core_hour=0.1)
    async with served(tmp_path, prices=prices) as gateway:
        services = gateway.services
        write_loop_and_jobs(services.home)
        costly_root.write_ledger(services.home)
        costly_root.write_loop(services.home)
        await costly_root.write_runs(services.store)
        services.metrics.swapped(1.0, True)
        services.metrics.model_calls.scanned("scan:jailbreak", "calc@1", 1.0)
        await gateway.ask("hi", stream=True)
        registry = services.registry
        model = bare_model(tmp_path / "other", b"others")
        registry.register("calc", *registry.import_checkpoint(model))
        test = CanaryTest(share=0.5)
        registry.start_canary("calc", 2, who="test", reason="", numbers=test.model_dump())
        start = registry.canary("calc")
        assert start is not None
        canary = Canary(start)
        canary.add_answer("s", "canary", failed=False)
        canary.add_reward("run-1", "canary", 0.5)
        durable.replace_file(services.home.canary("calc", start.number), canary.to_bytes())
        await gateway.call("GET", "/v1/models/unknown")
        text = (await gateway.call("GET", "/metrics"))[1]
        text += (await gateway.call("GET", "/metrics/engines"))[1]
    known = labels_of(text)
    # those of vLLM itself are checked in test_vllm_two_replicas.py
    wrong = [
        f"{place}: {problem}"
        for place, expression in expressions()
        for used in used_metrics(expression)
        if not used.name.startswith("vllm:") and (problem := unknown(used, known)) is not None
    ]
    assert wrong == []


def test_files_are_what_prometheus_and_grafana_read() -> None:
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    paths = {job["metrics_path"] for job in config["scrape_configs"]}
    assert paths == {"/metrics", "/metrics/engines"}
    assert json.loads((OBSERVABILITY / "targets.json").read_text())[0]["targets"]
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)
    for board in BOARDS.values():
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(places)) == len(places)
    for path in ("datasources/prometheus.yml", "dashboards/cray-agents.yml"):
        assert yaml.safe_load((OBSERVABILITY / "grafana/provisioning" / path).read_text())


def test_promtool_takes_them() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    command = [tool, "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=OBSERVABILITY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_alerts_say_what_to_do_and_names_stand_once() -> None:
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        summary = alert["annotations"]["summary"]
        assert re.fullmatch(r"(?:[A-Z][a-z]+)+", alert["alert"]) and summary.endswith(".")
        for label in re.findall(r"\$labels\.(\w+)", summary):
            assert label in ("replica", "version", "loop", "job", "scanner")
