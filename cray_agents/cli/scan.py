"""`scan`: look for something in stored runs after the fact, and record the findings beside them."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
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
from cray_agents.queries import RunQuery
from cray_agents.records import CLEAR, SCAN
from cray_agents.server.platform_process import client, key, running

if TYPE_CHECKING:
    from cray_agents.platform.client import Platform
    from cray_agents.records import Reward, Run
    from cray_agents.rewards.reward import RewardFunction
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.index import RunFacts

SHOWN_FAILURES = 3


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
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="`secrets`, `pii`, or your own @scanner functions as FILE.py:NAME or MODULE:NAME;"
            " or `memorisation NAME` and `drift NAME@N NAME@M`, which look at versions.",
        ),
    ],
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
) -> None:
    """Look for something in stored runs, and record what was found.

    A finding is a reward of source `scan:NAME`, which counts in no sum. A run with one gets the tag
    `scan:NAME`, and a run in which nothing was found `clear:NAME`: filters, recipes of training
    sets and canaries take these tags. A judge asks the platform that runs on this root, else that
    at $CRAY_AGENTS_URL, with requests that yield to all others.

    `memorisation NAME` shows how often a model's runs repeat its training sets. `drift NAME@N
    NAME@M` compares the habits of two versions; the exit code is 1 if one has drifted. These two
    record nothing.
    """
    name, *versions = scanners
    chosen = parse_where(terms)
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
    functions = [find_scanner(target) for target in scanners]
    scan_of_runs = RunScan(functions, chosen, share, again, dry_run)
    while True:
        report = asyncio.run(scan_of_runs.report())
        if given().json:
            print(json.dumps(report, indent=None if every else 2), flush=True)
        else:
            _print(report, dry_run)
        if every is None:
            return
        time.sleep(every)


def find_scanner(target: str) -> "RewardFunction":
    """Return the scanner of a built-in's name, FILE.py:NAME or MODULE:NAME. Raises BadInput."""
    from cray_agents.rewards.scanner import scanner_name

    if ":" not in target:
        from cray_agents.runtime.scans.built_in_scanners import built_in_scanner

        return built_in_scanner(target)
    function: RewardFunction = find_function(target, "scanner")
    if scanner_name(function) is None:
        raise BadInput(
            f"{target} is no scanner: put @scanner above the function, or make it by "
            "scanner(judge(...), name=...)",
            param="scanner",
        )
    return function


class RunScan:
    """A scan of the runs that match a filter. `report` does it once, and can be called again."""

    def __init__(
        self,
        functions: "Sequence[RewardFunction]",
        chosen: Any,
        share: float,
        again: bool,
        dry_run: bool,
    ) -> None:
        from cray_agents.rewards.scanner import scanner_name

        self._functions = {str(scanner_name(function)): function for function in functions}
        if len(self._functions) < len(functions):
            raise BadInput("two scanners have the same name", param="scanner")
        self._query = RunQuery(**chosen.model_dump(), order="id")
        self._config = settings()
        self._share, self._again, self._dry_run = share, again, dry_run

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
        runs = left = 0
        store = make_store(self._config)
        try:
            for some in chunks(self._chosen(store)):
                missing_of = {facts.run_id: self._missing(facts) for facts in some}
                stored = list(
                    store.runs_by_id(name for name, missing in missing_of.items() if missing)
                )
                runs += len(some)
                left += sum(run.redacted != [] for run in stored)
                by_run = await asyncio.gather(
                    *(
                        self._scan(
                            run, {name: functions[name] for name in missing_of[run.id]}, counts
                        )
                        for run in stored
                        if not run.redacted
                    )
                )
                if not self._dry_run:
                    await self._record(store, platform, [each for one in by_run for each in one])
        finally:
            await store.close()
            if platform is not None:
                await platform.close()
        return {"runs": runs, "redacted": left, "scanners": list(counts.values())}

    def _with_engine(self, engine: BatchEngine) -> "dict[str, RewardFunction]":
        from cray_agents.rewards.llm_judge import bind_engine

        bound = bind_engine(self._functions.values(), engine)
        return dict(zip(self._functions, bound, strict=True))

    def _chosen(self, store: "Store") -> "Iterator[RunFacts]":
        for facts in store.facts(self._query):
            if _fraction(facts.run_id) < self._share and "judge" not in facts.tags:
                yield facts

    def _missing(self, facts: "RunFacts") -> list[str]:
        """Return the names of the scanners that have to look at a run."""
        return [
            name
            for name in self._functions
            if self._again or not {SCAN + name, CLEAR + name} & set(facts.tags)
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
                    )
                    for run_id, each in given
                )
            )
            return
        if given:
            await store.append([reward_event(*one) for one in given], new=True)


def _fraction(run_id: str) -> float:
    """Return a number in [0, 1) that is always the same for a run."""
    return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=8).digest()) / 2**64


def _print(report: dict[str, Any], dry_run: bool) -> None:
    show(report["scanners"], ["scanner", "scanned", "found", "failed"])
    recorded = "would be recorded" if dry_run else "are recorded"
    say(f"{report['runs']} runs; the findings {recorded}")
    if report["redacted"]:
        say(f"  {report['redacted']} runs left out: redacted")
    for row in report["scanners"]:
        for failure in row["failures"]:
            say(f"  failed: {failure}")
        if row["found"]:
            say(f"  cray-agents runs list --where tag={SCAN}{row['scanner']}")
