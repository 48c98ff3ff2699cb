"""Cost: devices' time to requests, jobs, loops and successes, by hand and on a real platform."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cray_agents.cli import app
from cray_agents.config.settings import PriceSettings
from cray_agents.errors import BadInput, ConfigError, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.accounting.cost_account import CostAmount
from cray_agents.runtime.accounting.cost_table import CostQuery, CostTable, cost_table, run_cost
from cray_agents.runtime.accounting.ledger import HeldDevices, LedgerFile, keep_ledger, read_ledger
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.store import Store
from cray_agents.runtime.telemetry import file_metrics
from tests.support.costly_root import HOUR, T, run_events, write_ledger, write_loop, write_runs
from tests.support.scripted_gateway import served, until

PRICES = PriceSettings(gpu_hour={"h100": 3.0, "gpu": 1.0}, core_hour=0.1, kwh=0.5)
NAMES = {"": "", "key_1": "ada", "key_2": "bob"}
# An hour of the replica: 2 GPUs of 3.0, 8 cores of 0.1
REPLICA_HOUR = 6.8


@asynccontextmanager
async def costly(tmp_path: Path) -> AsyncIterator[tuple[Home, Store]]:
    home = Home(tmp_path)
    write_ledger(home)
    write_loop(home)
    store = Store(home)
    try:
        await write_runs(store)
        yield home, store
    finally:
        await store.close()


def table(home: Home, store: Store, prices: PriceSettings = PRICES, **query: Any) -> CostTable:
    return cost_table(home, store, prices, CostQuery(**query), NAMES)


def added(amounts: list[CostAmount]) -> list[float]:
    """The sums of seconds, joules and cost."""
    return [
        sum(getattr(amount, name) or 0.0 for amount in amounts)
        for name in ("gpu_seconds", "core_seconds", "joules", "cost")
    ]


async def test_the_lines_say_what_came_of_all_that_was_held_and_add_up(tmp_path: Path) -> None:
    async with costly(tmp_path) as (home, store):
        whole = table(home, store)
        assert whole.currency == "USD" and whole.unpriced == []
        hours = {use: amount.core_seconds / HOUR for use, amount in whole.uses.items()}
        assert hours == pytest.approx(
            {
                "requests": 8 * 0.5,
                "unattributed": 8 * 0.25,
                "idle": 8 * 2.25,
                "asleep": 8,
                "training": 4 * 1.25 + 2 * 0.75,
                "lost": 2 * 0.25,
                "other": 8 + 4 * 2.75 + 2,
            }
        )
        held = 2 * 5 * HOUR, (8 * 5 + 4 * 4 + 2 * 2) * HOUR, 3.6e6, None
        cost = 10 * 3.0 + 60 * 0.1 + 0.5
        assert added([whole.total]) == pytest.approx([*held[:3], cost])
        assert added(list(whole.uses.values())) == pytest.approx(added([whole.total]))
        assert added([row.spent for row in whole.data]) == pytest.approx(added([whole.total]))
        requests = whole.uses["requests"]
        assert requests.cost == pytest.approx(REPLICA_HOUR / 2 + 1.2 / 3.6 * 0.5)
        assert requests.joules == pytest.approx(1.2e6) and requests.measured_share == 1
        assert whole.uses["asleep"].joules is None and whole.uses["training"].joules is None


async def test_keys_and_models_share_the_time_by_weighted_tokens(tmp_path: Path) -> None:
    """Weights: 20 + 4 x 20 = 100, 40 + 60 = 100, 20 + 60 = 80 and 60 + 60 = 120."""
    async with costly(tmp_path) as (home, store):
        keys = table(home, store, by="key")
        gpu_seconds = {row.name: row.spent.gpu_seconds for row in keys.data}
        assert gpu_seconds == pytest.approx({"ada": 900, "bob": 900, "": 1800})
        everything = added([row.spent for row in keys.data])
        assert everything == pytest.approx(added([keys.uses["requests"]]))
        ada = table(home, store, by="key", key="key_1").whole
        assert ada is not None and ada.per_success is not None
        assert (ada.runs, ada.succeeded, ada.per_success) == (1, 1, ada.spent)
        assert table(home, store, by="key", key="key_1", owner="key_2").data == []
        (mine,) = table(home, store, by="key", owner="key_2").data
        assert mine.name == "bob" and mine.per_success is None
        models = table(home, store, by="model")
        assert {row.model: row.spent.gpu_seconds for row in models.data} == pytest.approx(
            {"m@1": 2520, "m@2": 1080}
        )
        days = table(home, store, by="key", key="", bucket=24 * HOUR)
        assert [row.time for row in days.data] == sorted(row.time or 0 for row in days.data)
        assert sum(row.spent.gpu_seconds for row in days.data) == pytest.approx(1800)
        first = table(home, store, by="key", limit=1)
        rest = table(home, store, by="key", after=first.last_id)
        assert first.has_more and [*first.data, *rest.data] == keys.data


async def test_a_loop_has_its_success_and_its_points(tmp_path: Path) -> None:
    """Iteration 0 warmed up for 0.25 h on 4 cores, 1 trained for 1 h; 0.1 is ten points."""
    async with costly(tmp_path) as (home, store):
        loop = table(home, store, by="iteration", loop="loop")
        first, second = loop.data
        assert first.iteration == 0 and first.training.core_seconds == pytest.approx(HOUR)
        assert (first.gain, first.per_point, first.holdout_success) == (0.0, None, 0.2)
        assert second.training.core_seconds == pytest.approx(4 * HOUR)
        # the run of 80, and that of 120 which evaluated this iteration's candidate
        assert second.serving.gpu_seconds == pytest.approx(3600 * 200 / 400)
        assert (second.runs, second.succeeded) == (2, 2) and second.gain == pytest.approx(0.1)
        assert second.per_success is not None and second.per_point is not None
        assert second.per_success.cost == pytest.approx((second.spent.cost or 0) / 2)
        assert second.per_point.cost == pytest.approx((second.spent.cost or 0) / 10)
        whole = loop.whole
        assert whole is not None and whole.per_point is not None
        assert whole.gain == pytest.approx(0.1)
        both = (first.spent.cost or 0) + (second.spent.cost or 0)
        assert whole.per_point.cost == pytest.approx(both / 10)
        loops = table(home, store, by="loop")
        assert {row.loop for row in loops.data} == {"loop", ""}
        assert loops.data[1].spent == whole.spent
        spent = added([row.spent for row in loops.data])
        used = [loops.uses["requests"], loops.uses["training"]]
        assert spent == pytest.approx(added(used))
        jobs = table(home, store, by="job")
        assert {row.job for row in jobs.data} == {"job-warm", "job-one", "job-own"}
        trained = added([row.training for row in jobs.data])
        assert trained == pytest.approx(added([loops.uses["training"]]))
        with pytest.raises(BadInput, match="by job is of all"):
            table(home, store, by="job", loop="loop")


async def test_metrics_say_the_same_under_bounded_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_metrics, "MOST_KEYS", 1)
    async with costly(tmp_path) as (home, store):
        families = list(file_metrics.cost_families(home, store, PRICES, {"loop"}))
        samples = {each.name: each.samples for each in families}
        whole = table(home, store)
        assert sum(each.value for each in samples["cray_cost"]) == pytest.approx(whole.total.cost)
        assert sum(each.value for each in samples["cray_energy_joules"]) == pytest.approx(3.6e6)
        held = {unit: sum(each.value for each in samples["cray_held_seconds"]
                if each.labels["unit"] == unit) for unit in ("gpu", "core")}  # fmt: skip
        assert held["gpu"] == whole.total.gpu_seconds
        assert held["core"] == pytest.approx(whole.total.core_seconds)
        loop = table(home, store, by="iteration", loop="loop").whole
        assert loop is not None and loop.per_point is not None
        (point,) = samples["cray_loop_cost_per_point"]
        assert point.value == pytest.approx(loop.per_point.cost)
        keys = {each.labels["key"]: each.value for each in samples["cray_key_cost"]}
        assert set(keys) == {"none", "other"}
        assert sum(keys.values()) == pytest.approx(whole.uses["requests"].cost)
        none = list(file_metrics.cost_families(home, store, PriceSettings(), ()))
        assert all(not each.samples for each in none if each.name.startswith("cray_loop"))
        assert all(not each.samples for each in none if each.name.endswith("cost"))


async def test_a_run_is_divided_by_its_requests(tmp_path: Path) -> None:
    async with costly(tmp_path) as (home, store):
        extra = run_events("train", 1.3, 20, 15, loop="loop")[0]
        body = extra.body | {"id": "train.1", "prompt_token_ids": [1] * 80, "token_ids": []}
        turns = {"turns": [{"call_id": "train.0"}, {"call_id": "train.1"}]}
        described = run_events("train", 1.3, 0, 0, loop="loop", trajectory=turns)[1]
        await store.append(
            [extra.model_copy(update={"id": "train.1", "body": body}),
             described.model_copy(update={"id": "train.again", "time": T + 1})]
        )  # fmt: skip
        cost = run_cost(home, store, PRICES, "train", NAMES)
        assert cost.requests is not None
        assert [each.prompt_tokens for each in cost.requests] == [20, 80]
        assert added([each.spent for each in cost.requests]) == pytest.approx(
            added([cost.data[0].spent])
        )
        assert cost.data[0].spent.gpu_seconds == pytest.approx(3600 * 160 / 480)
        with pytest.raises(NotFound):
            run_cost(home, store, PRICES, "nobody", NAMES)


async def test_a_part_of_the_time_begins_with_a_whole_hour(tmp_path: Path) -> None:
    async with costly(tmp_path) as (home, store):
        late = table(home, store, since=T + 2.9 * HOUR, until=T + 3.1 * HOUR)
        assert (late.since, late.until) == (T + 2 * HOUR, T + 4 * HOUR)
        assert late.uses["requests"].gpu_seconds == 0
        assert late.uses["unattributed"].gpu_seconds == pytest.approx(HOUR / 2)
        bounds: list[dict[str, Any]] = [{"until": T + 2 * HOUR}, {"since": T + 2 * HOUR}]
        parts = [table(home, store, **bound).total for bound in bounds]
        assert added(parts) == pytest.approx(added([table(home, store).total]))


async def test_without_a_price_there_is_no_cost_and_a_missing_one_is_named(tmp_path: Path) -> None:
    async with costly(tmp_path) as (home, store):
        free = table(home, store, PriceSettings())
        assert (free.currency, free.total.cost, free.unpriced) == (None, None, [])
        assert free.total.gpu_seconds == 10 * HOUR
        other = table(home, store, PriceSettings(gpu_hour={"a100": 2.0}, currency="EUR"))
        assert other.currency == "EUR" and other.total.cost == 0
        assert other.unpriced == ["cores", "nvidia_h100_80gb_hbm3"]
        only = table(home, store, PriceSettings(kwh=0.5, core_hour=0.1, gpu_hour={"h100": 0}))
        assert only.total.cost == pytest.approx(6.0 + 0.5) and only.unpriced == []


def test_the_longest_type_that_is_a_part_of_the_model_counts() -> None:
    prices = PriceSettings(gpu_hour={"H100": 3.0, "h100_80gb": 4.0, "gpu": 1.0})
    assert prices.of_gpu("nvidia_h100_80gb_hbm3") == 4.0
    assert (prices.of_gpu("h100"), prices.of_gpu("a100"), prices.of_gpu("")) == (3.0, 1.0, 1.0)
    assert PriceSettings(gpu_hour={"h100": 3.0}).of_gpu("a100") is None


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"by": "colour"}, "by"),
        ({"by": "iteration"}, "loop"),
        ({"by": "use", "key": ""}, "by"),
        ({"by": "loop", "key": ""}, "by"),
        ({"by": "key", "bucket": 60.0}, "bucket"),
        ({"by": "loop", "bucket": 3600.0}, "bucket"),
        ({"by": "key", "after": "nobody"}, "after"),
    ],
)
async def test_a_question_without_an_answer_is_refused(
    tmp_path: Path, query: dict[str, Any], param: str
) -> None:
    async with costly(tmp_path) as (home, store):
        with pytest.raises(BadInput) as refused:
            table(home, store, **query)
        assert refused.value.param == param


def test_the_command_shows_lines_loops_keys_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"

    async def fill() -> None:
        async with costly(home):
            pass

    home.mkdir(mode=0o700)
    asyncio.run(fill())
    record, _ = Keys(Home(home)).create("ada")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cray-agents.toml").write_text(
        '[prices]\ncore_hour = 0.1\ngpu_hour = {h100 = 3.0}\nkwh = 0.5\ncurrency = "EUR"\n'
    )

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["usage", "cost", "--home", str(home), *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "36.5" in run() and "EUR" in run()
    whole = CostTable.model_validate_json(run("--json"))
    assert whole.total.cost == pytest.approx(36.5)
    assert "loop in all" in run("--loop", "loop") and "iteration 1" in run("--loop", "loop")
    assert "0 " in run("--key", "ada", "--since", "7d")
    assert "train.0" in run("--run", "train")
    by_key = json.loads(run("--by", "key", "--json"))
    assert {row["key"] for row in by_key["data"]} == {"", "key_1", "key_2"} and record.id
    for wrong, said in (
        (["--loop", "x"], "no loop 'x'"),
        (["--key", "x"], "no key 'x'"),
        (["--key", "ada", "--run", "train"], "one of"),
        (["--run", "train", "--by", "key"], "alone"),
        (["--since", "week"], "30m, 12h or 7d"),
        (["--by", "colour"], "use, key, model, loop, iteration"),
    ):
        failed = CliRunner().invoke(app, ["usage", "cost", "--home", str(home), *wrong])
        assert said in str(failed.exception)
    (tmp_path / "cray-agents.toml").write_text("[prices]\ngpu_hours = {h100 = 3.0}\n")
    failed = CliRunner().invoke(app, ["usage", "cost", "--home", str(home)])
    assert isinstance(failed.exception, ConfigError) and "gpu_hour?" in str(failed.exception)


async def test_a_platforms_keys_pay_for_what_they_asked(tmp_path: Path) -> None:
    """A gateway with a pool whose ledger is kept; the lines of its account add up to its hours."""
    async with served(tmp_path, prices=PriceSettings(core_hour=1.0)) as gateway:
        home, devices = gateway.services.home, [HeldDevices(cores=3)]
        boss = Keys(home).create("boss", Role.admin)[1]
        trainer = Keys(home).create("trainer", Role.train)[1]
        user, secret = Keys(home).create("user")
        me = {"authorization": f"Bearer {secret}"}
        file = LedgerFile(home.ledger, "platform")
        sampled = gateway.services.metrics
        keeping = asyncio.create_task(
            keep_ledger(
                file, gateway.pool.status, lambda: sampled.sampled_tokens, devices,
                every=0.01, beat=0.05,
            )
        )  # fmt: skip

        def is_busy() -> bool:
            return any(each.event == "busy" for lines in read_ledger(home.ledger) for each in lines)

        async def cost(key: str, query: str = "") -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {key}"}
            return await gateway.call("GET", f"/v1/cost{query}", headers=headers)

        try:
            await until(lambda: list(read_ledger(home.ledger)))
            for text in ("one", "one and two and three"):
                assert (await gateway.ask(text, headers=me)).status == 200
            bosses = {"authorization": f"Bearer {boss}"}
            run = (await gateway.ask("not yours", headers=bosses)).run_id
            await until(is_busy)
            status, answer = await cost(boss)
            whole = CostTable.model_validate(answer)
            assert status == 200 and whole.total.cost == pytest.approx(
                sum(amount.cost or 0 for amount in whole.uses.values())
            )
            assert whole.total.cost == pytest.approx(whole.total.core_seconds / HOUR)
            assert whole.uses["requests"].core_seconds > 0 and whole.total.gpu_seconds == 0
            rows = CostTable.model_validate((await cost(boss, "?by=key&bucket=1h"))[1]).data
            assert {row.name for row in rows} == {"user", "boss"}
            (mine,) = (await cost(secret, "?by=key"))[1]["data"]
            assert (mine["name"], mine["runs"]) == ("user", 2) and mine["spent"]["cost"] > 0
            assert (await cost(secret, f"?key={user.id}"))[1]["whole"]["runs"] == 2
            assert (await cost(boss, "?key=user&by=model"))[1]["data"][0]["model"] == "calc@1"
            assert (await cost(trainer, "?by=loop"))[0] == 200
            assert (await cost(boss, "?key=none"))[1]["data"] == []
            one = CostTable.model_validate((await cost(secret, f"?run={run}"))[1])
            assert one.requests is not None and len(one.requests) == 1
            for key, query, refusal, param in (
                (secret, "?by=loop", 403, None),
                (secret, "?by=job", 403, None),
                (secret, "?key=boss", 403, None),
                (trainer, "?key=boss", 403, None),
                (trainer, "?loop=none", 404, "loop"),
                (boss, "?key=nobody", 404, "key"),
                (boss, "?run=none", 404, None),
                (boss, f"?run={run}&by=key", 400, "run"),
                (boss, "?by=colour", 400, "by"),
                (boss, "?bucket=1h", 400, "bucket"),
                (boss, "?by=key&limit=0x", 400, "limit"),
                (boss, "?since=soon", 400, "since"),
            ):
                status, error = await cost(key, query)
                assert status == refusal, query
                assert param in (None, error["error"]["param"]), error
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
