"""Inspect View and Phoenix with the runs of the dashboard's benchmark, as far as they open them.

Inspect View reads a log for each loop, and one for each special run (`export --format eval`).
Phoenix is sent OpenTelemetry's spans (`export --format otel`), whose GenAI attributes it converts;
what it has taken after INGEST seconds is what it shows. Both run from environments of their own
(requirements/environment.sh inspect, phoenix). Called by dashboard.py. Prints a row per measure, or
why there is none.
"""

import base64
import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.dashboard_root import HUGE, HUGE_TURNS
from bench.rivals.environments import ROOT, make_environments
from bench.rivals.server_process import answers, foreign, free_port, program, wait_until
from bench.timed_pages import TimedPage, print_row
from bench.views import LONG, TURNS
from cray_agents.paths import Home

START = 300.0  # seconds a server may take to answer
EXPORT, INGEST = 900.0, 300.0  # seconds that an export, and Phoenix's intake, may take
MEMORY = 8 * 2**30  # bytes that an export may take
SPANS = 500  # in a request
TIMES = 3
LOOP = "loop-3"
TASK, AGENT = r"Task \d+: what", "invoke_agent (calc|search|coder|support)"
FIRST = "(^|\\D)0:? abcdefghij"
PAGE = "#root, #app, body"


@dataclass
class Server:
    """A viewer's address and process."""

    url: str
    pid: int


def main(browser: Any, home: Home, *, huge: bool) -> None:
    """Print how both open the runs of a root."""
    rivals = make_environments(
        {"Inspect View": ("inspect", "inspect-ai"), "Phoenix": ("phoenix", "arize-phoenix")}
    )
    measures = {"Inspect View": measure_inspect_view, "Phoenix": measure_phoenix}
    for name, measure in measures.items():
        if name in rivals.missing:
            print(f"| {name} | no environment: {rivals.missing[name]} | | |", flush=True)
            continue
        title = f"{name} {rivals.versions[name]}"
        with tempfile.TemporaryDirectory(dir=home.root.parent) as folder, attempt(title):
            measure(title, browser, home, rivals.pythons[name], folder, huge)


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Print in a row why it failed, and go on after the block."""
    from playwright.sync_api import Error

    try:
        yield
    except (Error, RuntimeError, OSError, subprocess.SubprocessError) as error:
        reason = re.sub(r"\s+", " ", str(error)).replace("|", "/")[:160]
        print(f"| {what} | {type(error).__name__}: {reason} | | |", flush=True)


def measure_inspect_view(
    title: str, browser: Any, home: Home, python: Path, folder: str, huge: bool
) -> None:
    """Print how Inspect View lists and opens runs."""
    logs = Path(folder) / "logs"
    logs.mkdir()
    loops = [f"loop-{number}" for number in range(8)]
    begun = time.perf_counter()
    for loop in loops:
        export(home, "eval", logs / f"{loop}.eval", "--loop", loop)
    print_row(f"{title}: export of all runs", [time.perf_counter() - begun], "s", "-")
    special = {LONG: f"run of {TURNS:,} turns"}
    if huge:
        special[HUGE] = f"run of {HUGE_TURNS * 2:,} events"
    for run, what in special.items():
        with attempt(f"{title}: export of the {what}"):
            export(home, "eval", logs / f"{run}.eval", run)
    program = str(python.parent / "inspect")
    command = [program, "view", "start", "--log-dir", str(logs), "--host", "127.0.0.1"]
    with served(command, "--port", folder, {}) as server:
        page = TimedPage(browser, server.url)
        samples = f"#/logs/{LOOP}.eval/samples"
        measure_list(title, page, "#/logs/", r"loop-3|agents|several", samples, TASK)
        for run, what in special.items():
            sample = f"#/logs/{run}.eval/samples/sample/{run}/1/transcript"
            with attempt(f"{title}: {what}"):
                measure_run(title, what, page, sample, server)
        page.close()


def measure_phoenix(
    title: str, browser: Any, home: Home, python: Path, folder: str, huge: bool
) -> None:
    """Print how many spans Phoenix takes, and how it lists and opens them."""
    settings = {
        "PHOENIX_WORKING_DIR": folder,
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
    }
    with served([python.parent / "phoenix", "serve"], "PHOENIX_PORT", folder, settings) as server:
        special = {LONG: f"run of {TURNS:,} turns"}
        if huge:
            special[HUGE] = f"run of {HUGE_TURNS * 2:,} events"
        spans = Path(folder) / "spans.otel"
        traces = {}
        for run, what in special.items():
            with attempt(f"{title}: export of the {what}"):
                export(home, "otel", spans, run)
                traces[run] = ingest(f"{title}: spans of the {what} taken", server.url, spans)
        export(home, "otel", spans, "--loop", LOOP)
        ingest(f"{title}: spans of {LOOP} taken", server.url, spans)
        project = ask(server.url, "{projects{edges{node{id}}}}")["projects"]["edges"][0]["node"][
            "id"
        ]
        page = TimedPage(browser, server.url)
        listed = f"projects/{project}/traces"
        measure_list(title, page, "projects", "default", listed, AGENT)
        for run, trace in traces.items():
            what, trace = special[run], f"{listed}/{trace}"
            with attempt(f"{title}: {what}"):
                measure_run(title, what, page, trace, server)
        page.close()


def measure_list(
    title: str, page: TimedPage, listed: str, pattern: str, runs: str, row: str
) -> None:
    """Print how soon the first screen, and the list of one loop's runs, are there.

    `pattern`, `row`: what their texts match then.
    """
    print_row(
        f"{title}: page and its list",
        [page.load(listed, PAGE, pattern) for _ in range(TIMES)],
        "ms",
        "-",
    )
    times = [page.load(runs, PAGE, row) for _ in range(TIMES)]
    print_row(f"{title}: page and the runs of a loop", times, "ms", "-")
    print_row("heap with it", [page.heap()], "MB", "-")


def measure_run(title: str, what: str, page: TimedPage, address: str, server: Server) -> None:
    """Print how soon a run is there, and its first turn: in Phoenix the one that a click shows."""
    outline = [page.load(address, PAGE, "turn 1|chat calc") for _ in range(TIMES)]
    print_row(f"{title}: {what}: page and outline", outline, "ms", "-")
    with attempt(f"{title}: a turn of it"):
        first = []
        for _ in range(TIMES):
            begun, pattern = page.load(address, PAGE, "turn 1|chat calc"), FIRST
            if title.startswith("Phoenix"):
                page.page.get_by_text("chat calc@1").first.click()
                pattern = "abcdefghij"
            first.append(begun + page.see(PAGE, pattern))
        print_row("page and its first turn readable", first, "ms", "-")
    print_row("heap with it", [page.heap()], "MB", "-")
    print_row("the server's memory", [memory(server.pid)], "MB", "-")


def export(home: Home, name: str, target: Path, *which: str) -> None:
    """Export runs of a root. Raises RuntimeError with the end of what the command said."""
    program = str(ROOT / ".venv/bin/cray-agents")
    limited = ["prlimit", f"--as={MEMORY}", program, "export", "--quiet", "--home", str(home.root)]
    done = subprocess.run(
        [*limited, "--format", name, "--restart", "-o", target, *which],
        capture_output=True,
        text=True,
        timeout=EXPORT,
    )
    if done.returncode != 0:
        raise RuntimeError(f"export ended with {done.returncode}: {done.stderr.strip()[-200:]}")


@contextmanager
def served(
    command: Sequence[str | Path], port_name: str, folder: str, settings: dict[str, str]
) -> Iterator[Server]:
    """A viewer on a free port of the loopback, named by an option or a variable."""
    port, place = str(free_port()), Path(folder)
    by_option = port_name.startswith("-")
    argv = [*command, *([port_name, port] if by_option else ())]
    more = settings if by_option else {**settings, port_name: port}
    url = f"http://127.0.0.1:{port}"
    with program(argv, place, foreign(place, **more)) as process:
        wait_until(lambda: answers(url, 10), process, place, START)
        yield Server(url, process.pid)


def ingest(what: str, url: str, spans: Path) -> str:
    """Send spans until all are sent, or INGEST seconds are over; return the first one's trace.

    Prints how many were taken, and how many a second.
    """
    begun, before, sent, trace = time.monotonic(), taken(url), 0, ""
    for request, count, first in trace_requests(spans):
        trace = trace or first
        send(url, request)
        sent += count
        if time.monotonic() > begun + INGEST:
            break
    while taken(url) - before < sent and time.monotonic() < begun + INGEST:
        time.sleep(0.5)
    count, seconds = taken(url) - before, time.monotonic() - begun
    print(
        f"| {what} | {count:,} of {sent:,} sent | {count / seconds:,.0f} a second | - |", flush=True
    )
    return trace


def trace_requests(spans: Path) -> Iterator[tuple[bytes, int, str]]:
    """Yield requests in protobuf of an export's lines: their bytes, spans, and a trace's id."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    pieces: list[dict[str, Any]] = []
    count, first = 0, ""
    for resource, scope, span in spans_of(spans):
        first = first or span["traceId"]
        for name in ("traceId", "spanId", "parentSpanId"):
            if span.get(name):
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        pieces.append({"resource": resource, "scopeSpans": [{"scope": scope, "spans": [span]}]})
        count += 1
        if count == SPANS:
            message = json_format.ParseDict({"resourceSpans": pieces}, ExportTraceServiceRequest())
            yield message.SerializeToString(), count, first
            pieces, count = [], 0
    if pieces:
        message = json_format.ParseDict({"resourceSpans": pieces}, ExportTraceServiceRequest())
        yield message.SerializeToString(), count, first


def spans_of(path: Path) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield the spans of an export, each with its resource and scope.

    Each trace ends now: Phoenix lists those of the last days.
    """
    with path.open("rb") as lines:
        for line in lines:
            groups = orjson.loads(line)["resourceSpans"]
            spans = [
                span for group in groups for one in group["scopeSpans"] for span in one["spans"]
            ]
            shift = time.time_ns() - max(int(span["endTimeUnixNano"]) for span in spans)
            for span in spans:
                for name in ("startTimeUnixNano", "endTimeUnixNano"):
                    span[name] = str(int(span[name]) + shift)
            for group in groups:
                for scope in group["scopeSpans"]:
                    for span in scope["spans"]:
                        yield group["resource"], scope["scope"], span


def send(url: str, body: bytes) -> None:
    """Send spans; a server that is busy is asked again."""
    headers = {"Content-Type": "application/x-protobuf"}
    request = urllib.request.Request(f"{url}/v1/traces", body, headers)
    for _ in range(600):
        try:
            with urllib.request.urlopen(request, timeout=120):
                return
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise
            time.sleep(0.5)
    raise RuntimeError("Phoenix takes no more spans")


def taken(url: str) -> int:
    """Return how many spans Phoenix has stored."""
    edges = ask(url, "{projects{edges{node{recordCount}}}}")["projects"]["edges"]
    return sum(edge["node"]["recordCount"] for edge in edges)


def ask(url: str, query: str) -> Any:
    """Return the data of a query in GraphQL."""
    headers = {"Content-Type": "application/json"}
    body = orjson.dumps({"query": query})
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/graphql", body, headers), timeout=120
    ) as answer:
        return orjson.loads(answer.read())["data"]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> float:
    """Return the megabytes that a process has in memory."""
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) / 1000
