"""Boards and alerts: each expression names metrics and labels that a real scrape has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cray_agents.cli import app
from cray_agents.config.price_section import PriceSettings
from cray_agents.errors import BadInput
from cray_agents.runtime.disk import durable
from cray_agents.runtime.observability.boards.board_files import board_files
from cray_agents.runtime.observability.boards.catalog import ALERTS, BOARDS
from cray_agents.runtime.registry.canary import Canary, CanaryTest
from tests.support import costly_root
from tests.support.bare_models import bare_model
from tests.support.promql import UsedMetric, used_metrics
from tests.support.scraped_metrics import labels_of, write_loop_and_jobs
from tests.support.scripted_gateway import served


def expressions() -> Iterator[tuple[str, str]]:
    for board in BOARDS:
        for panel in board.panels:
            for expression, legend in panel.curves:
                yield f"{board.name}: {panel.title}", expression
                assert legend
    for alert in ALERTS:
        yield alert.name, alert.expression


def unknown(used: UsedMetric, known: dict[str, set[str]]) -> str | None:
    if used.name not in known:
        return f"no metric {used.name}"
    missing = used.labels - known[used.name]
    return f"{used.name} has no {sorted(missing)}" if missing else None


def test_the_extractor() -> None:
    def used(text: str) -> list[tuple[str, set[str]]]:
        return [(name, set(labels)) for name, labels in used_metrics(text)]

    assert used('a{b="x y{z",c=~"d"}[5m]') == [("a", {"b", "c"})]
    assert used("sum by (le, v) (rate(h_bucket[$__rate_interval]))") == [("h_bucket", {"le", "v"})]
    assert used('a == 0 and on (r) b:c{d!="1"} > 1.5e3') == [("a", {"r"}), ("b:c", {"r", "d"})]
    assert used("time() - max without (x) (g) offset 5m") == [("g", {"x"})]
    for broken in ('a{b="x"', "a[5m", "a; b", "sum by (a"):
        with pytest.raises(BadInput):
            used_metrics(broken)


async def test_every_expression_names_what_a_scrape_has(tmp_path: Path) -> None:
    prices = PriceSettings(gpu_hour={"gpu": 1.0}, core_hour=0.1)
    async with served(tmp_path, prices=prices) as gateway:
        services = gateway.services
        write_loop_and_jobs(services.home)
        costly_root.write_ledger(services.home)
        costly_root.write_loop(services.home)
        await costly_root.write_runs(services.store)
        services.metrics.swapped(1.0, True)
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


def test_files_are_what_prometheus_and_grafana_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["observability", "init", str(tmp_path), "--target", "a:8000", "--key-file", "/k ey"]
    )
    assert done.exit_code == 0, done.output
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert {job["metrics_path"] for job in config["scrape_configs"]} == {
        "/metrics", "/metrics/engines",
    }  # fmt: skip
    assert config["scrape_configs"][0]["authorization"] == {"credentials_file": "/k ey"}
    assert json.loads((tmp_path / "targets.json").read_text()) == [{"targets": ["a:8000"]}]
    rules = yaml.safe_load((tmp_path / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [(rule["alert"], rule["expr"]) for rule in rules] == [
        (alert.name, alert.expression) for alert in ALERTS
    ]
    shown = 0
    for board in BOARDS:
        model = json.loads((tmp_path / f"grafana/dashboards/{board.name}.json").read_text())
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in model["panels"]]
        assert len(set(places)) == len(board.panels)
        shown += sum(len(panel["targets"]) for panel in model["panels"])
    assert shown == sum(len(panel.curves) for board in BOARDS for panel in board.panels)
    for path in ("datasources/prometheus.yml", "dashboards/cray-agents.yml"):
        assert yaml.safe_load((tmp_path / "grafana/provisioning" / path).read_text())


def test_promtool_takes_them(tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    for path, text in board_files(["a:8000"]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    done = subprocess.run(
        [tool, "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_alerts_say_what_to_do_and_names_stand_once() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert re.fullmatch(r"(?:[A-Z][a-z]+)+", alert.name) and alert.summary.endswith(".")
        for label in re.findall(r"\$labels\.(\w+)", alert.summary):
            assert label in ("replica", "version", "loop", "job")


def test_a_folder_of_other_files_is_not_overwritten(tmp_path: Path) -> None:
    run = CliRunner().invoke
    (tmp_path / "alerts.yml").write_text("mine")
    done = run(app, ["observability", "init", str(tmp_path)])
    assert isinstance(done.exception, BadInput) and "--force" in str(done.exception)
    assert (tmp_path / "alerts.yml").read_text() == "mine"
    assert run(app, ["observability", "init", str(tmp_path), "--force"]).exit_code == 0
    assert run(app, ["observability", "init", str(tmp_path)]).exit_code == 0  # the same again
    wrong = run(app, ["observability", "init", str(tmp_path), "--target", "http://a"])
    assert isinstance(wrong.exception, BadInput) and "host:port" in str(wrong.exception)
