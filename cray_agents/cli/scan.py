"""`scan`: look for something in stored runs after the fact, and record the findings beside them."""

import asyncio
import hashlib
import http.client
import json
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.runs import chunks
from cray_agents.cli.screen import make_store, say, settings, show
from cray_agents.cli.user_files import find_function
from cray_agents.cli.where import WhereOption, parse_where
from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.errors import BadInput
from cray_agents.processes import die_with_parent
from cray_agents.promotion.e_process import Stream
from cray_agents.queries import RunQuery
from cray_agents.records import CLEAR, OUTCOMES, SCAN, UNJUDGED, scanned_tags
from cray_agents.server.platform_process import client, key, running

if TYPE_CHECKING:
    from cray_agents.config.settings import WatchSettings
    from cray_agents.platform.client import Platform
    from cray_agents.records import Reward, Run
    from cray_agents.rewards.reward import RewardFunction
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.index import RunFacts

SHOWN_FAILURES = 3
FALSE_ALARM = 0.025  # greatest probability of one, for a scanner, version and day
POST_TIMEOUT = 10.0  # seconds that a webhook may take

commands = Commands()


class BatchEngine(OpenAIEngine):
    """An engine whose requests yield to all others of the gateway."""

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request, after those that people wait for."""
        return await super().chat(_yielding(request))

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer as chunks, after those that people wait for."""
        async with aclosing(super().stream(_yielding(request))) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk


def _yielding(request: dict[str, Any]) -> dict[str, Any]:
    headers = request.get("extra_headers") or {}
    return {**request, "extra_headers": {**headers, "X-Priority": "batch"}}


@commands.command("scan")
def scan(
    scanners: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="`secrets`, `pii`, `toxicity`, `sentiment` (of answers; `prompt-secrets` and so on"
            " of what users wrote), `jailbreak`, `policy`, `jailbreak-judge`, or your own @scanner"
            " functions as FILE.py:NAME or MODULE:NAME; or `memorisation NAME` and `drift NAME@N"
            " NAME@M`, which look at versions. None: the scanners that `watch` lists, which"
            " look at live runs alone.",
        ),
    ] = None,
    terms: WhereOption = None,
    share: Annotated[
        float, typer.Option(help="The share of the runs to scan, chosen by a hash of their ids.")
    ] = 1.0,
    again: Annotated[
        bool, typer.Option("--again", help="Scan runs that the scanner has scanned before, too.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(min=1, help="Go on, and scan what came in since, each so many seconds."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Record nothing.")] = False,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="memorisation: a dataset to compare with \\[default: the model's own]; repeatable."
        ),
    ] = None,
    planted: Annotated[
        Path | None, typer.Option(help="memorisation: a file of planted strings, one a line.")
    ] = None,
    length: Annotated[
        int,
        typer.Option(
            min=4, max=10_000, help="memorisation: the tokens in a row that count as repeated."
        ),
    ] = 50,
    alpha: Annotated[
        float,
        typer.Option(help="drift: the greatest probability of reporting one where there is none."),
    ] = 0.05,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Look for something in stored runs, and record what was found.

    A finding is a reward of source `scan:NAME`, which counts in no sum. A run with one gets the tag
    `scan:NAME`, one in which nothing was found `clear:NAME`, and one on which a judge gave no
    verdict `unjudged:NAME`: filters, recipes of training sets and canaries take these tags. Runs
    with a finding stay out of training sets. The rates by version and day follow; `watch` in
    cray-agents.toml has alarms. A judge asks the platform that runs on this root, else that
    at $CRAY_AGENTS_URL, with requests that yield to all others.

    `memorisation NAME` shows how often a model's runs repeat its training sets. `drift NAME@N
    NAME@M` compares the habits of two versions; the exit code is 1 if one has drifted. These two
    record nothing.
    """
    if parent is not None:
        die_with_parent(parent)
    config = settings()
    watch, live = config.watch, not scanners
    name, *versions = scanners or watch.scanners or [""]
    chosen = parse_where(terms)
    if not name:
        raise BadInput(
            "no scanner is named: give one, as in `cray-agents scan secrets`, or those of a watch "
            "as `scanners` in the section [watch] of cray-agents.toml",
            param="scanner",
        )
    if name in ("drift", "memorisation"):
        if share != 1 or again or every is not None or dry_run:
            raise BadInput(
                f"scan {name}: it looks at versions, and takes no --share, --again, --every or"
                " --dry-run",
                param="scanner",
            )
        if len(versions) != (2 if name == "drift" else 1):
            words = "drift NAME@N NAME@M" if name == "drift" else "memorisation NAME"
            raise BadInput(f"write it as `cray-agents scan {words}`", param="scanner")
        if chosen.model is not None or chosen.text is not None:
            raise BadInput(f"scan {name}: --where takes no model and no text", param="where")
        from cray_agents.cli import version_scans

        if name == "drift":
            version_scans.drift(versions[0], versions[1], chosen, alpha)
        else:
            version_scans.memorisation(versions[0], chosen, dataset, planted, length)
        return
    if not 0 < share <= 1:
        raise BadInput(f"--share {share:g}: give a share above 0, up to 1", param="share")
    functions = find_scanners(scanners or [], watch)
    hours = watch.hours if live else None
    scan_of_runs = RunScan(functions, chosen, share, again, dry_run, hours)
    alarms = Alarms(watch)
    while True:
        report = asyncio.run(scan_of_runs.report())
        report["alarms"] = [] if dry_run else alarms.send(report["rates"])
        if given().json:
            print(json.dumps(report, indent=None if every else 2), flush=True)
        else:
            _print(report, dry_run, quiet=parent is not None)
        if every is None:
            return
        time.sleep(every)


def check_watch(watch: "WatchSettings") -> None:
    """Raise BadInput or SetupError for a watch that cannot be.

    `up` tells it at once, else it stands in the log of the process that scans. What users' files
    put on the path of imports is taken away again: this process goes on as the platform.
    """
    path = [*sys.path]
    try:
        find_scanners([], watch)
    finally:
        sys.path[:] = path


def find_scanners(targets: Sequence[str], watch: "WatchSettings") -> "dict[str, RewardFunction]":
    """Return these scanners, else those of the watch, by name. Raises BadInput, SetupError."""
    from cray_agents.rewards.scanner import scanner_name

    functions = [find_scanner(target, watch) for target in targets or watch.scanners]
    by_name = {str(scanner_name(function)): function for function in functions}
    if len(by_name) < len(functions):
        raise BadInput("two scanners have the same name", param="scanner")
    if not targets and (unknown := watch.alarms.keys() - by_name.keys()):
        names = ", ".join(sorted(unknown))
        raise BadInput(f"watch.alarms: {names} is not among its scanners", param="watch.alarms")
    return by_name


def find_scanner(target: str, watch: "WatchSettings | None" = None) -> "RewardFunction":
    """Return the scanner of a built-in's name, FILE.py:NAME or MODULE:NAME. Raises BadInput."""
    from cray_agents.rewards.scanner import scanner_name

    if ":" not in target:
        from cray_agents.runtime.scans.built_in_scanners import built_in_scanner

        return built_in_scanner(target, watch)
    function: RewardFunction = find_function(target, "scanner")
    if scanner_name(function) is None:
        raise BadInput(
            f"{target} is no scanner: put @scanner above the function, or make it by "
            "scanner(judge(...), name=...)",
            param="scanner",
        )
    return function


class RunScan:
    """A scan of the runs that match a filter. `report` does it once, and can be called again.

    `hours`: only live runs that began since the day, in UTC, of so many hours ago; None: all runs.
    """

    def __init__(
        self,
        functions: "Mapping[str, RewardFunction]",
        chosen: Any,
        share: float,
        again: bool,
        dry_run: bool,
        hours: float | None = None,
    ) -> None:
        self._functions = functions
        self._query = RunQuery(**chosen.model_dump(), order="id")
        self._config = settings()
        self._share, self._again, self._dry_run, self._hours = share, again, dry_run, hours

    async def report(self) -> dict[str, Any]:
        """Scan, record the findings, and return the counts of each scanner."""
        info = running(self._config.root)
        platform = None if info is None else client(info)
        engine = BatchEngine() if info is None else BatchEngine(info["url"], api_key=key(info))
        functions = self._with_engine(engine)
        counts = {
            name: {"scanner": name, "scanned": 0, "found": 0, "failed": 0, "failures": []}
            for name in functions
        }
        runs, rates = 0, Rates()
        store = make_store(self._config)
        try:
            for some in chunks(self._chosen(store)):
                read_at = time.time()  # what comes later is looked at the next time
                missing_of = {facts.run_id: self._missing(facts) for facts in some}
                stored = list(
                    store.runs_by_id(name for name, missing in missing_of.items() if missing)
                )
                runs += len(some)
                by_run = await asyncio.gather(
                    *(
                        self._scan(
                            run, {name: functions[name] for name in missing_of[run.id]}, counts
                        )
                        for run in stored
                    )
                )
                findings = [
                    (run_id, finding.model_copy(update={"time": read_at}))
                    for one in by_run
                    for run_id, finding in one
                ]
                if not self._dry_run:
                    await self._record(store, platform, findings)
                fresh: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
                for run_id, each in findings:
                    fresh[run_id].append((each.source, each.value, each.time))
                for facts in some:
                    tags = scanned_tags((), fresh[facts.run_id])
                    for name in functions:
                        looked = name in missing_of[facts.run_id]
                        rates.add(name, facts, tags if looked else facts.tags)
        finally:
            await store.close()
            if platform is not None:
                await platform.close()
        return {"runs": runs, "scanners": list(counts.values()), "rates": rates.rows()}

    def _with_engine(self, engine: BatchEngine) -> "dict[str, RewardFunction]":
        from cray_agents.rewards.llm_judge import bind_engine

        bound = bind_engine(self._functions.values(), engine)
        return dict(zip(self._functions, bound, strict=True))

    def _chosen(self, store: "Store") -> "Iterator[RunFacts]":
        query, live = self._query, self._hours is not None
        if self._hours is not None:
            start = time.time() - 3600 * self._hours
            since = max(query.since or 0.0, start - start % 86_400)  # rates are of whole days, UTC
            query = query.model_copy(update={"since": since})
        for facts in store.facts(query):
            if live and (facts.loop is not None or facts.imported is not None):
                continue
            if _fraction(facts.run_id) < self._share and "judge" not in facts.tags:
                yield facts

    def _missing(self, facts: "RunFacts") -> list[str]:
        """Return the names of the scanners that have to look at a run."""
        return [
            name for name in self._functions if self._again or _outcome(facts.tags, name) is None
        ]

    async def _scan(
        self, run: "Run", functions: "dict[str, RewardFunction]", counts: dict[str, Any]
    ) -> "list[tuple[str, Reward]]":
        from cray_agents.rewards.scanner import scan as look

        rewards = []
        for name, function in functions.items():
            findings, failures = await look(run, [function])
            count = counts[name]
            count["scanned"] += not failures
            count["found"] += any(each.value for each in findings)
            count["failed"] += len(failures)
            if failures and len(count["failures"]) < SHOWN_FAILURES:
                count["failures"].append(f"{run.id}: {failures[0]}")
            rewards += [(run.id, finding) for finding in findings]
        return rewards

    async def _record(
        self, store: "Store", platform: "Platform | None", findings: "Iterable[tuple[str, Reward]]"
    ) -> None:
        """Record findings through the platform that runs, whose canaries then count them."""
        from cray_agents.runtime.store.feedback import check_rewards, reward_event

        given = list(findings)
        for run_id, finding in given:
            check_rewards([finding], self._config.reward_limit, f"{finding.name} of {run_id}")
        if platform is not None:
            await asyncio.gather(
                *(
                    platform.reward(
                        run_id,
                        each.value,
                        name=each.name,
                        who=each.source,
                        turn=each.turn,
                        comment=each.comment,
                        time=each.time,
                    )
                    for run_id, each in given
                )
            )
            return
        if given:
            await store.append([reward_event(*one) for one in given], new=True)


class Rates:
    """How often scanners found something, by version and day (UTC) of the runs."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)

    def add(self, scanner: str, facts: "RunFacts", tags: Iterable[str]) -> None:
        """Count a run to which a scanner gave one of these tags, or none."""
        if (outcome := _outcome(tags, scanner)) is not None:
            try:
                day = datetime.fromtimestamp(facts.started, UTC).date().isoformat()
            except (ValueError, OverflowError, OSError):  # a client's own, as one in milliseconds
                day = "unknown"
            self._counts[scanner, facts.version, day][outcome] += 1

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each scanner, version and day, in this order."""
        from cray_agents.runtime.scans.memorisation import wilson_interval

        rows = []
        for (name, version, day), counts in sorted(self._counts.items()):
            found, judged = counts[SCAN], counts[SCAN] + counts[CLEAR]
            about = {"scanner": name, "version": version, "day": day, "scanned": judged}
            rate = {"found": found, "not_judged": counts[UNJUDGED], "rate": found / (judged or 1)}
            rows.append(about | rate | {"interval": wilson_interval(found, judged)})
        return rows


class Alarms:
    """Alarms of scanners whose rate is above its limit, each once for a version and day.

    If each run has a finding with a probability of at most the limit, there is an alarm that day
    with one of at most FALSE_ALARM, however often one looks (promotion/e_process.py). One that the
    webhook did not take is sent again at the next look.
    """

    def __init__(self, watch: "WatchSettings") -> None:
        self._limits, self._webhook = watch.alarms, watch.webhook
        self._sent: set[tuple[str, str, str]] = set()

    def send(self, rates: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Send what is new, and return it. `error`: why it could not be sent."""
        alarms = []
        for row in rates:
            key = (row["scanner"], row["version"], row["day"])
            limit = self._limits.get(row["scanner"])
            if limit is None or key in self._sent:
                continue
            if not _above(limit, row["found"], row["scanned"]):
                continue
            text = "{scanner} found something in {found} of {scanned} runs of {version} on {day}"
            alarm = {**row, "limit": limit, "text": f"{text.format(**row)}: above {limit:.1%}"}
            error = None if self._webhook is None else _post(self._webhook, alarm)
            if error is None:
                self._sent.add(key)
            alarms.append(alarm | {"error": error})
        return alarms


def _above(limit: float, found: int, scanned: int) -> bool:
    """Tell whether so many findings refute that at most this share of runs has one."""
    evidence = Stream(limit)
    evidence.add(0.0, scanned - found)
    evidence.add(1.0, found)  # last: its wealth counts at the end alone
    return found > 0 if limit == 0 else evidence.evidence >= 1 / FALSE_ALARM


def _post(url: str, alarm: Mapping[str, Any]) -> str | None:
    """Send an alarm as JSON; return why that failed, if it did."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(alarm).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=POST_TIMEOUT):
            return None
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"the webhook {url} did not take it: {error}"


def _outcome(tags: Iterable[str], scanner: str) -> str | None:
    """Return the beginning of the tag that a scanner gave a run, if it did."""
    return next((kind for kind in OUTCOMES if kind + scanner in tags), None)


def _fraction(run_id: str) -> float:
    """Return a number in [0, 1) that is always the same for a run."""
    return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=8).digest()) / 2**64


def _print(report: dict[str, Any], dry_run: bool, *, quiet: bool) -> None:
    """Print a report. `quiet`: only what went wrong, and alarms."""
    if not quiet:
        show(report["scanners"], ["scanner", "scanned", "found", "failed"])
        recorded = "would be recorded" if dry_run else "are recorded"
        say(f"{report['runs']} runs; the findings {recorded}")
        columns = ["scanner", "version", "day", "scanned", "found", "not_judged", "rate"]
        show([row | {"rate": f"{row['rate']:.1%}"} for row in report["rates"]], columns)
    for alarm in report["alarms"]:
        say(f"  alarm: {alarm['text']}" + (f" ({alarm['error']})" if alarm["error"] else ""))
    for row in report["scanners"]:
        for failure in row["failures"]:
            say(f"  failed: {failure}")
        if row["found"] and not quiet:
            say(f"  cray-agents runs list --where tag={SCAN}{row['scanner']}")
