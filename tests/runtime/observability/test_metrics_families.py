"""The families of /metrics and /metrics/engines."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.exposition import generate_latest

from cray_agents.cli.platform import start_rows
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.telemetry import call_metrics
from cray_agents.runtime.telemetry.call_metrics import CallMetrics, EngineCollector, EngineText
from cray_agents.runtime.telemetry.file_metrics import JobTails
from tests.support.scraped_metrics import Samples, parse, put, write_loop_and_jobs
from tests.support.scripted_gateway import Gateway, served, until

ENGINE = """\
# HELP vllm:num_requests_running Running
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",version="mine"} 3.0
# HELP vllm:ttft_seconds First
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="1.0"} 1.0
vllm:ttft_seconds_bucket{le="+Inf"} 2.0
vllm:ttft_seconds_count 2.0
vllm:ttft_seconds_sum 1.5
# HELP vllm:ttft_seconds_created First
# TYPE vllm:ttft_seconds_created gauge
vllm:ttft_seconds_created 1.7e+09
"""


async def scrape(gateway: Gateway, path: str = "/metrics") -> Samples:
    status, text = await gateway.call("GET", path)
    assert status == 200
    return parse(text)


def test_engines_metrics_get_labels_and_each_family_stands_once() -> None:
    texts = [EngineText(("0", "h", "m@1"), ENGINE), EngineText(("1", "h", "m@2"), ENGINE)]
    texts += [EngineText(("2", "h", ""), None), EngineText(("3", "h", ""), "broken{")]
    text = generate_latest(EngineCollector(texts)).decode()  # type: ignore[arg-type]
    assert text.count("# TYPE vllm:ttft_seconds histogram") == 1
    found = parse(text)
    running = found["vllm:num_requests_running"]
    assert running == {("0", "mine", "h", "0", "m@1"): 3, ("0", "mine", "h", "1", "m@2"): 3}
    assert found["vllm:ttft_seconds_bucket"]["h", "+Inf", "1", "m@2"] == 2
    assert "vllm:ttft_seconds_created" not in found
    up = {labels[1]: value for labels, value in found["cray_engine_up"].items()}
    assert up == {"0": 1, "1": 1, "2": 0, "3": 0}


def test_a_start_has_a_sample_for_each_phase_that_was_seen() -> None:
    started: list[dict[str, Any]] = [
        {"host": "h", "last_start": {"time": 1.0, "seconds": {"spawn": 0.5, "first_token": 2.0}}},
        {"host": "h", "last_start": None},
    ]
    families = {family.name: family for family in call_metrics.replica_families(started)}
    samples = families["cray_replica_start_seconds"].samples
    found = {(one.labels["replica"], one.labels["phase"]): one.value for one in samples}
    assert found == {("0", "spawn"): 0.5, ("0", "first_token"): 2.0}
    assert start_rows(started) == [{"replica": 0, "all": 2.5, "spawn": 0.5, "first_token": 2.0}]


def test_no_caller_makes_series_at_will(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import CollectorRegistry

    monkeypatch.setattr(call_metrics, "MOST_SERIES", 10)
    registry = CollectorRegistry()
    metrics = CallMetrics(registry)
    for number in range(50):
        metrics.count(f"m@{number}", f"key-{number}", False, f"odd-{number}", (2, 1), 0.1)
    counted = parse(generate_latest(registry).decode())["cray_model_requests_total"]
    assert len(counted) == 11 and sum(counted.values()) == 50
    assert counted["interactive", "other", "other", "other"] == 40


async def test_a_calls_version_key_class_and_seconds(tmp_path: Path) -> None:
    async with served(tmp_path, api_keys="required", token="sk-platform") as gateway:
        _, key = Keys(gateway.services.home).create("web")
        headers = {"authorization": f"Bearer {key}"}
        assert (await gateway.ask("hi", headers=headers)).status == 200
        assert (await gateway.ask("hi", headers=headers, stream=True)).status == 200
        await until(lambda: gateway.store.commits.items == 2)
        _, text = await gateway.call("GET", "/metrics", headers=headers)
        found = parse(text)
        ((labels, count),) = found["cray_model_requests_total"].items()
        assert labels[0] == "interactive" and labels[1] in ("stop", "other")
        assert labels[3] == "calc@1" and count == 2
        assert labels[2] not in ("none", "web") and "web" not in text
        assert found["cray_first_token_seconds_count"][("interactive",)] == 1
        assert found["cray_queue_wait_seconds_count"] == {("interactive",): 2, ("batch",): 0}
        assert found["cray_store_append_seconds_count"][()] == 2
        assert found["cray_store_committed_appends_total"][()] == 2
        assert found["cray_replica_info"][next(iter(found["cray_replica_info"]))] == 1
        engines = (await gateway.call("GET", "/metrics/engines", headers=headers))[1]
        assert list(parse(engines)["cray_engine_up"].values()) == [0]  # it is no vLLM


async def test_what_files_of_the_root_say(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        write_loop_and_jobs(gateway.services.home)
        await gateway.ask("hi")
        found = await scrape(gateway)
    assert found["cray_loop_iteration"] == {("calc",): 1}
    assert found["cray_loop_holdout_success"] == {("calc",): 0.5}
    assert found["cray_loop_iterations_total"] == {("calc", "promoted"): 1, ("calc", "rejected"): 1}
    assert found["cray_loop_runs"]["kept", "calc"] == 3
    assert found["cray_loop_phase_seconds"] == {("calc", "train"): 4.0}
    assert found["cray_loop_evidence"] == {("calc",): 1.5}
    assert "cray_loop_loss_last" not in found
    assert found["cray_job_loss"] == {("job-1",): 1.5} and found["cray_job_step"] == {("job-1",): 2}
    assert found["cray_job_straggler_ratio"] == {("job-1",): 1.5}
    assert found["cray_jobs"][("running",)] == 1 and found["cray_jobs"][("failed",)] == 1
    assert found["cray_store_segments"] == {("open",): 1, ("sealed",): 0}
    assert found["cray_store_problems"] == {(): 0}
    assert 0 < found["cray_disk_bytes"]["free",] <= found["cray_disk_bytes"]["size",]
    assert found["cray_batch_lines"][("waiting",)] == 0


def test_a_jobs_events_are_read_on_and_anew_when_replaced(tmp_path: Path) -> None:
    tails, home = JobTails(Home(tmp_path), 5), Home(tmp_path)
    events = home.job("j") / "events.jsonl"

    def losses() -> dict[tuple[str, ...], float]:
        return parse_families(tails).get("cray_job_loss", {})

    put(home.job("j") / "spec.json", {})
    assert losses() == {}
    lines = [checksums.with_crc(orjson.dumps({"event": "step", "loss": n})) for n in (3.0, 2.0)]
    events.write_bytes(b"\n".join([*lines, b'{"event":"step","lo']))
    assert losses() == {("j",): 2.0}
    with events.open("ab") as file:
        file.write(b'ss":1.5}\n{"event":"step","loss":nonsense}\n')
    assert losses() == {("j",): 1.5}
    durable.replace_file(events, lines[0] + b"\n")  # a restart took steps back
    assert losses() == {("j",): 3.0}


def parse_families(tails: JobTails) -> Samples:
    return {
        family.name: {tuple(s.labels.values()): s.value for s in family.samples}
        for family in tails.families()
        if family.samples
    }


async def test_damage_leaves_a_family_out_and_the_rest_stands(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        home = gateway.services.home
        put(home.loop("calc") / "generations" / "0.json", {"iteration": 0, "promoted": True})
        put(home.job("job-2") / "spec.json", {})
        (home.job("job-2") / "status.json").write_text("{ not json")
        found = await scrape(gateway)
    assert "cray_jobs" not in found
    assert found["cray_loop_iteration"] == {("calc",): 0}
