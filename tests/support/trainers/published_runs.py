"""Published training runs, which `plan`'s estimates are compared with: docs/planning.md.

`python -m tests.support.trainers.published_runs` prints the table of all runs, and writes the
summary of that page anew from published_runs.json.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from cray_agents.trainers.models.architecture import Architecture, Rope
from cray_agents.trainers.planning import step_time
from cray_agents.trainers.planning.arithmetic import estimate_memory, flops_per_token
from cray_agents.trainers.planning.layouts import describe_layout
from cray_agents.trainers.planning.plan import Cluster, Workload, make_plan
from cray_agents.trainers.planning.step_time import find_gpu
from cray_agents.training_jobs import Hyperparameters, Layout, Lora

FILE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[3] / "docs" / "planning.md"
MARKS = ("<!-- runs -->", "<!-- end of runs -->")
NODE = 8  # GPUs
TIME_OFF, MEMORY_OFF = 0.2, 0.1  # what a good estimate may be off
CHECKED = {"text": "checked", "quoted": "as quoted", "memory": "not checked"}


@dataclass(frozen=True)
class PublishedRun:
    """A run as its source gives it, beside what `plan` says of it.

    `published`, `estimated`: tokens per second and GPU. `gigabytes`, `estimated_gigabytes`: the
    most memory of a GPU, 1e9 bytes, where the source has it. `checked`: `text`, the figure was
    compared with the source's text; `quoted`, with what others quote of it; `memory`, with neither.
    """

    name: str
    source: tuple[str, str]
    where: str
    held_out: bool
    note: str
    published: float
    estimated: float
    gigabytes: float | None
    estimated_gigabytes: float | None
    checked: str

    @property
    def time_off(self) -> float:
        """The estimated time over the published one, less 1."""
        return self.published / self.estimated - 1

    @property
    def memory_off(self) -> float | None:
        """The estimated memory over the published one, less 1."""
        if self.gigabytes is None or self.estimated_gigabytes is None:
            return None
        return self.estimated_gigabytes / self.gigabytes - 1


def read_runs() -> list[PublishedRun]:
    """Read the file, and estimate every run anew."""
    data = json.loads(FILE.read_text())
    models = {name: _model(fields) for name, fields in data["models"].items()}
    return [_estimated(run, models[run["model"]], data["sources"]) for run in data["runs"]]


def _model(fields: dict[str, Any]) -> Architecture:
    rope = Rope({"rope_type": "default", "rope_theta": 10000.0}, positions=1 << 20)
    head = fields["hidden"] // fields["heads"]
    usual: dict[str, Any] = {"kind": "llama", "head_size": head, "tied": False, "rope": rope}
    return Architecture(**{**usual, "max_tokens": 1 << 20, "norm_eps": 1e-6, **fields})


def _estimated(
    run: dict[str, Any], model: Architecture, sources: dict[str, list[str]]
) -> PublishedRun:
    gpu, length = find_gpu(run["gpu"]), run["length"]
    hyper = Hyperparameters(
        steps=1,
        batch_size=run["batch"],
        max_tokens_per_microbatch=run["microbatch"] * length,
        dtype="bfloat16",
        fp8="tensorwise" if run.get("fp8") else None,
        lora=Lora(rank=run["lora"]) if "lora" in run else None,
    )
    recompute = run.get("recompute", "none")
    flops = flops_per_token(model, length, hyper.lora)
    gigabytes = run.get("gigabytes")
    if run["layout"] is None:  # not published: plan's own choice
        cluster = Cluster(gpu, run["gpus"], NODE)
        made = make_plan(model, Workload(run["tokens"], length), cluster, hyper)
        assert made.choice is not None
        layout, slower, recompute = made.choice.layout, made.slowdown, made.choice.recompute
    else:
        fields = {"sequence_parallel": run["layout"].get("tensor", 1) > 1, **run["layout"]}
        layout = Layout(**fields)
        slower = step_time.slowdown(
            model, layout, hyper, length, NODE, recompute=recompute, gpu=gpu
        )
    memory = estimate_memory(model, layout, hyper, sequence_length=length, recompute=recompute)
    if gigabytes:  # as that run keeps weights and gradients
        trained = memory.gradients / 4
        weights, gradients = (trained * each for each in run["bytes_of_weight_and_gradient"])
        memory = replace(memory, weights=weights, gradients=gradients)
    peak = gpu.teraflops * 1e12
    return PublishedRun(
        run["name"],
        (sources[run["source"]][0], sources[run["source"]][1]),
        f"{layout.world:,} {gpu.name}: {describe_layout(layout)}"
        + (" (plan's)" if run["layout"] is None else "")
        + (f", recompute {recompute}" if recompute != "none" else ""),
        run["held_out"],
        run.get("note", ""),
        _rate(run, layout.world, flops, peak),
        peak * gpu.reached / flops / slower,
        gigabytes,
        memory.total / 1e9 if gigabytes else None,
        run["checked"],
    )


def _rate(run: dict[str, Any], gpus: int, flops: float, peak: float) -> float:
    """Return the published speed as tokens per second and GPU."""
    value: float = run["value"]
    return {
        "tokens_per_gpu_second": lambda: value,
        "teraflops": lambda: value * 1e12 / flops,
        "mfu": lambda: value * peak / flops,
        "step_seconds": lambda: run["batch"] * run["length"] / value / gpus,
        "gpu_hours": lambda: run["tokens"] / value / 3600,
    }[run["measure"]]()


# ---- the table
def table(runs: list[PublishedRun]) -> str:
    """Return the table of runs, with their sources, as Markdown."""
    sources = list(dict.fromkeys(run.source for run in runs))
    lines = [
        "| run | on | tokens/s a GPU | estimate | time | memory | source | figure |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        memory = ""
        if run.memory_off is not None:
            memory = f"{run.gigabytes:.1f} GB: {_percent(run.memory_off, MEMORY_OFF)}"
        held = " (held out)" if run.held_out else ""
        lines.append(
            f"| {run.name}{held} | {run.where} | {run.published:,.0f} | {run.estimated:,.0f} |"
            f" {_percent(run.time_off, TIME_OFF)} | {memory} | {sources.index(run.source) + 1} |"
            f" {CHECKED[run.checked]} |"
        )
    lines += ["", *(f"{n}. [{name}]({url})" for n, (name, url) in enumerate(sources, 1)), ""]
    for note in dict.fromkeys(run.note for run in runs if run.note):
        names = "; ".join(run.name for run in runs if run.note == note)
        lines.append(f"- {names}: {note}.")
    return "\n".join(lines)


def summary(runs: list[PublishedRun]) -> str:
    """Return how far the estimates are off, as a list in Markdown."""
    lines = []
    for held_out, how in ((False, "that the constants were fitted to"), (True, "held out")):
        off = [abs(run.time_off) for run in runs if run.held_out is held_out]
        lines.append(
            f"- Of the {len(off)} runs {how}, {sum(each <= TIME_OFF for each in off)} are within"
            f" {TIME_OFF:.0%} of the time; on average they are off by {mean(off):.0%}."
        )
    memory = [abs(run.memory_off) for run in runs if run.memory_off is not None]
    lines.append(
        f"- Memory is published of {len(memory)} runs; on average it is off by {mean(memory):.0%}."
    )
    return "\n".join(lines)


def _percent(off: float, most: float) -> str:
    text = f"{off:+.0%}"
    return text if abs(off) <= most else f"**{text}**"


def with_summary(page: str, runs: list[PublishedRun]) -> str:
    """Return the page's text with the summary between its marks written anew."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{summary(runs)}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    print(table(read_runs()))
    PAGE.write_text(with_summary(PAGE.read_text(), read_runs()))
