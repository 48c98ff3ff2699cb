"""Serving plan: replicas for a load, by calls that a simulated pool answered in known times."""

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from cray_agents.config.settings import PriceSettings
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.records import Event
from cray_agents.runtime.accounting.holdings import read_holdings
from cray_agents.runtime.accounting.ledger import LedgerFile, LedgerLine
from cray_agents.runtime.accounting.serve_plan import Calibration, ServedLoad, calibrate, plan_load
from cray_agents.runtime.store import Store
from tests.support.command_line import claimed, cli, refused
from tests.support.costly_root import T
from tests.support.scripted_gateway import served

READ, STEP, BESIDE = 0.0002, 0.004, 0.001  # seconds, as in serve_plan.py
PRICES = PriceSettings(gpu_hour={"h100": 3.6})
DRAW = 0.001  # seconds of the simulation at a time


def simulate(rate: float, prompt: int, sampled: int, seconds: float) -> list[tuple[float, float]]:
    """Start and length of the calls of one replica, which come at random.

    The replica reads each prompt as it comes, while nobody samples, and then gives all that are
    under way a token in STEP + BESIDE times their number.
    """
    draw, now, arrivals = random.Random(3), 0.0, []
    while now < seconds:
        now += draw.expovariate(rate)
        arrivals.append(now)
    waiting, under_way, done, now = arrivals[::-1], [], [], 0.0  # type: ignore[var-annotated]
    while waiting or under_way:
        if not under_way:
            now = max(now, waiting[-1])
        while waiting and waiting[-1] <= now:
            under_way.append([waiting.pop(), sampled])
            now += READ * prompt
        now += STEP + BESIDE * len(under_way)
        for one in under_way:
            one[1] -= 1
        done += [(one[0], now - one[0]) for one in under_way if not one[1]]
        under_way = [one for one in under_way if one[1]]
    return done


def events(name: str, start: float, length: float, prompt: int, sampled: int) -> list[Event]:
    call = {
        "id": f"{name}.0", "run_id": name, "model": "m@1", "messages": [],
        "message": {"role": "assistant", "content": "a"}, "prompt_token_ids": [1] * prompt,
        "token_ids": [2] * sampled, "started": T + start, "seconds": length,
    }  # fmt: skip
    return [Event(id=f"{name}.0", run_id=name, kind="call", body=call, time=T + start)]


@pytest.fixture
def root(tmp_path: Path) -> Home:
    """A root whose replica on two H100s answered calls of two loads."""
    home, store = Home(tmp_path / "home"), Store(Home(tmp_path / "home"))
    made, begin = list[Event](), 0.0
    for rate, prompt, sampled in ((1.0, 400, 40), (6.0, 200, 30), (9.0, 100, 25)):
        for n, (start, length) in enumerate(simulate(rate, prompt, sampled, 60)):
            made += events(f"r{rate}-{n}", begin + start, length, prompt, sampled)
        begin += 200

    async def write() -> None:
        await store.append(made)
        await store.close()

    asyncio.run(write())
    place: dict[str, object] = {
        "kind": "replica",
        "holder": "replica-0",
        "what": "m@1",
        "node": "a",
    }
    place |= {"gpus": ("0", "1"), "gpu_type": "nvidia_h100_80gb_hbm3", "state": "serving"}
    file = LedgerFile(home.ledger, "w")
    for time, event in ((T - 10, "hold"), (T + 1000, "leave")):
        file.write([LedgerLine.model_validate({"time": time, "event": event, **place})])
    file.close()
    return home


def measured(home: Home) -> Calibration:
    store = Store(home)
    try:
        return calibrate(store, read_holdings(home), "m")
    finally:
        asyncio.run(store.close())


def test_a_plan_foretells_a_load_that_was_not_measured(root: Home) -> None:
    found = measured(root)
    assert (found.gpus, found.gpu_type) == (2, "nvidia_h100_80gb_hbm3")
    assert found.error < 0.1 and found.calls > 800 and found.busiest > 2
    for rate, prompt, sampled in ((4.0, 300, 35), (8.0, 150, 25), (0.5, 500, 60)):
        truth = [length for _, length in simulate(rate, prompt, sampled, 300)]
        load = ServedLoad(rate, prompt, sampled)
        plan = plan_load(found, load, None, PRICES)
        assert plan.replicas == 1 and plan.limit == "one is enough"
        assert plan.seconds == pytest.approx(sum(truth) / len(truth), rel=0.15)
        assert plan.cost == pytest.approx(2 * 3.6 / 3600 / rate)
    more = plan_load(found, ServedLoad(40.0, 150, 25), None, PRICES, price=7.2)
    assert more.replicas > 3 and more.gpus == 2 * more.replicas
    assert more.cost == pytest.approx(more.gpus * 7.2 / 3600 / 40)
    quick = plan_load(found, ServedLoad(40.0, 150, 25), 0.2, PriceSettings())
    assert quick.replicas > more.replicas and quick.seconds <= 0.2 and quick.cost is None
    assert "more than 0.2 s" in quick.limit
    alone = found.model_copy(update={"busiest": 1.0})
    held = plan_load(alone, ServedLoad(6.0, 150, 25), None, PRICES)
    assert held.under_way <= 1 and "were not measured" in held.limit
    with pytest.raises(BadInput, match="s alone on a replica"):
        plan_load(found, ServedLoad(1.0, 400, 40), 0.01, PRICES)
    with pytest.raises(BadInput, match="too many replicas"):
        plan_load(found, ServedLoad(1e9, 400, 40), None, PRICES)


def test_the_command_and_what_it_refuses(root: Home, tmp_path: Path) -> None:
    words = ["plan", "serve", "--model", "m@3", "--home", root.root, "--tokens-in", 200]
    load = ["--tokens-out", 30, "--rate", 20]
    told = json.loads(cli(*words, *load, "--price", 3, "--json", cwd=tmp_path).stdout)
    assert told["replicas"] > 1 and told["calibration"]["model"] == "m"
    shown = cli(*words, *load, cwd=tmp_path).stdout
    assert f"{told['replicas']}, with {told['gpus']} GPUs" in shown and "give --price" in shown
    refused(cli(*words, "--tokens-out", 30, "--rate", 0, cwd=tmp_path), "--rate 0 must be above 0")
    refused(cli(*words, *load, "--latency", "nan", cwd=tmp_path), "--latency nan must be above 0")
    assert cli(*words, *load, "--price", -1, cwd=tmp_path).returncode == 2
    refused(cli(*words, *load, "--since", "1h", cwd=tmp_path), "0 answered calls of 'm'")
    words[3] = "other"
    refused(cli(*words, *load, cwd=tmp_path), "'other'", "put a load like yours on it")


async def test_the_reading_of_weights_beside_what_was_measured(tmp_path: Path) -> None:
    words = ("plan", "start", "--storage", 2, "--model")

    async def plan(*more: object) -> CompletedProcess[str]:
        return await asyncio.to_thread(partial(cli, *words, *more, cwd=tmp_path))

    shown = (await plan("7B")).stdout
    assert "14 GB in bfloat16" in shown and "measured" not in shown
    assert "7 s at 2 GB/s; the engine's copying follows" in shown
    refused(await plan("7B", "--storage", 0), "--storage 0 must be above 0")
    refused(await plan("missing"), "missing")
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    async with served(tmp_path / "home") as gateway:
        home = gateway.services.home
        with claimed(home, gateway.url):
            told = json.loads((await plan(tmp_path, "--json", "--home", home.root)).stdout)
            assert (told["weights"], told["read_seconds"], told["measured"]) == (3e6, 0.0015, [])
            assert "measured" not in (await plan("10M", "--home", home.root)).stdout
            shown = (await plan("calc", "--home", home.root)).stdout
            assert "measured seconds of the last start" in shown and "first token" in shown
