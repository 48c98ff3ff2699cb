"""`plan`: estimate memory, time and cost of a training run before it is submitted.

Only a model's config is read: no GPU, platform or weights are needed. Read next:
trainers/planning/.
"""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from cray_agents.cli.screen import HomeOption, JsonOption, console, show
from cray_agents.config import load_config
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.training_jobs import Hyperparameters, Lora, MethodName

if TYPE_CHECKING:
    from cray_agents.trainers.models.architecture import Architecture
    from cray_agents.trainers.planning.plan import Cluster, Plan

COLUMNS = [
    "data",
    "tensor",
    "pipeline",
    "interleave",
    "context",
    "expert",
    "recompute",
    "gib",
    "fits",
    "hours",
    "dollars",
]
SIZE = re.compile(r"(\d+(?:\.\d+)?)([MBT])", re.IGNORECASE)
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
LENGTH = 4096  # default tokens of a sequence
RECOMPUTE = ("auto", "none", "selective", "full")

# panels of `plan --help`
AMOUNT = "How much (one of)"
CLUSTER = "Where"
METHOD = "How"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plan)


def plan(
    model: Annotated[
        str,
        typer.Option(help="A directory with a config.json, name@N, or only a size such as 7B."),
    ],
    dataset: Annotated[str | None, typer.Option(rich_help_panel=AMOUNT)] = None,
    tokens: Annotated[float | None, typer.Option(min=1, rich_help_panel=AMOUNT)] = None,
    samples: Annotated[int | None, typer.Option(min=1, rich_help_panel=AMOUNT)] = None,
    size: Annotated[
        float | None, typer.Option("--bytes", min=1, help="Of text.", rich_help_panel=AMOUNT)
    ] = None,
    bytes_per_token: Annotated[float, typer.Option(min=0.1, rich_help_panel=AMOUNT)] = 4.0,
    gpu: Annotated[
        str, typer.Option(help="H100, H200, A100, ...", rich_help_panel=CLUSTER)
    ] = "H100",
    gpus: Annotated[int | None, typer.Option(min=1, rich_help_panel=CLUSTER)] = None,
    nodes: Annotated[int | None, typer.Option(min=1, rich_help_panel=CLUSTER)] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, rich_help_panel=CLUSTER)] = 8,
    mfu: Annotated[
        float, typer.Option(help="Of peak, of a GPU that never waits.", rich_help_panel=CLUSTER)
    ] = 0.4,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Dollars per GPU and hour.", rich_help_panel=CLUSTER),
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, rich_help_panel=METHOD)] = None,
    epochs: Annotated[float, typer.Option(rich_help_panel=METHOD)] = 1.0,
    method: Annotated[
        str, typer.Option(help="sft, dpo, kto, grpo.", rich_help_panel=METHOD)
    ] = "sft",
    lora_rank: Annotated[int | None, typer.Option(min=1, rich_help_panel=METHOD)] = None,
    dtype: Annotated[str, typer.Option(rich_help_panel=METHOD)] = "bfloat16",
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences of a step.", rich_help_panel=METHOD)
    ] = 128,
    microbatch_tokens: Annotated[int | None, typer.Option(min=1, rich_help_panel=METHOD)] = None,
    recompute: Annotated[
        str, typer.Option(help="auto, none, selective, full.", rich_help_panel=METHOD)
    ] = "auto",
    limit: Annotated[int, typer.Option(min=0, help="Layouts to list.")] = 12,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate memory, time and cost of a training run, and choose its layout."""
    from cray_agents.trainers.planning.plan import Workload, make_plan, plan_by_size

    root = load_config({"home": home}).root
    _check("method", method, get_args(MethodName))
    _check("recompute", recompute, RECOMPUTE)
    _check("dtype", dtype, ("bfloat16", "float32"))
    known = _size(model) or _architecture(root, model)
    length = sequence_length or _usual_length(root, dataset, known)
    amount = _tokens(root, length, bytes_per_token, dataset, tokens, samples, size)
    workload = Workload(
        _positive("tokens", amount),
        length,
        _positive("epochs", epochs),
        cast(MethodName, method),
        size,
    )
    cluster = _cluster(gpu, gpus, nodes, gpus_per_node, mfu, price)
    if isinstance(known, float):
        estimate = plan_by_size(known, workload, cluster, lora=lora_rank is not None)
    else:
        at_once = microbatch_tokens or max(length, LENGTH)
        _check_length(length, known, at_once)
        hyper = Hyperparameters(
            steps=1,
            batch_size=batch_size,
            max_tokens_per_microbatch=at_once,
            dtype=dtype,
            lora=Lora(rank=lora_rank) if lora_rank else None,
        )
        policy: Any = None if recompute == "auto" else recompute
        estimate = make_plan(known, workload, cluster, hyper, policy)
    if as_json:
        print(json.dumps(estimate.data(), indent=2))
    else:
        _print_plan(estimate, limit)


# ---- reading the options
def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadInput(f"--{name} {value!r}: choose one of {', '.join(allowed)}", param=name)


def _positive(name: str, value: float, most: float = sys.float_info.max) -> float:
    if not 0 < value <= most:
        limit = "" if most > 1 else f" and at most {most:g}"
        raise BadInput(f"--{name} {value:g} must be above 0{limit}", param=name)
    return value


def _size(model: str) -> float | None:
    """Return the parameters of a size such as "7B", or None for a model's name."""
    match = SIZE.fullmatch(model)
    return float(match[1]) * UNITS[match[2].upper()] if match else None


def _architecture(root: Home, model: str) -> "Architecture":
    from cray_agents.runtime.registry.registry import Registry
    from cray_agents.trainers.models.architecture import read_architecture

    folder = Path(model).expanduser()
    return read_architecture(folder if folder.is_dir() else Registry(root).directory(model))


def _usual_length(root: Home, dataset: str | None, known: "Architecture | float") -> int:
    """Return the dataset's mean length, else the model's limit up to 4,096 tokens."""
    if dataset is not None:
        counts = _counts(root, dataset)
        return max(1, round(counts["tokens"] / counts["samples"]))
    return LENGTH if isinstance(known, float) else min(LENGTH, known.max_tokens)


def _counts(root: Home, dataset: str) -> dict[str, int]:
    """Return samples and tokens of a dataset's train split. Raises NotFound, Corrupt, BadInput."""
    from cray_agents.runtime.datasets.reader import read_dataset

    counts: dict[str, int] = read_dataset(root, dataset).get("splits", {}).get("train", {})
    if not counts.get("samples"):
        raise BadInput(f"dataset {dataset} has no samples to train on", param="dataset")
    return counts


def _tokens(
    root: Home,
    length: int,
    bytes_per_token: float,
    dataset: str | None,
    tokens: float | None,
    samples: int | None,
    size: float | None,
) -> float:
    """Return the tokens of an epoch, from the one measure given. Raises BadInput."""
    given = [value for value in (dataset, tokens, samples, size) if value is not None]
    if len(given) != 1:
        raise BadInput(
            "say how much is to be trained on, once: --dataset, --tokens, --samples or --bytes",
            param="tokens",
        )
    if dataset is not None:
        return float(_counts(root, dataset)["tokens"])
    if samples is not None:
        return float(samples * length)
    return tokens if tokens is not None else (size or 0) / bytes_per_token


def _cluster(
    gpu: str,
    gpus: int | None,
    nodes: int | None,
    gpus_per_node: int,
    mfu: float,
    price: float | None,
) -> "Cluster":
    from cray_agents.trainers.planning.hardware import find_gpu
    from cray_agents.trainers.planning.plan import Cluster

    all_gpus = gpus or (nodes or 1) * gpus_per_node
    if nodes is not None and all_gpus != nodes * gpus_per_node:
        raise BadInput(
            f"--gpus {gpus} are not --nodes {nodes} of --gpus-per-node {gpus_per_node}: leave one"
            " of them out",
            param="gpus",
        )
    return Cluster(find_gpu(gpu), all_gpus, gpus_per_node, _positive("mfu", mfu, 1.0), price)


def _check_length(length: int, model: "Architecture", at_once: int) -> None:
    if length > model.max_tokens:
        raise BadInput(
            f"sequences of {length:,} tokens, but the model attends to {model.max_tokens:,}: give"
            " a smaller --sequence-length",
            param="sequence_length",
        )
    if length > at_once:
        raise BadInput(
            f"sequences of {length:,} tokens do not fit into --microbatch-tokens {at_once:,}",
            param="microbatch_tokens",
        )


# ---- printing
def _print_plan(estimate: "Plan", limit: int) -> None:
    """Print the plan for people."""
    for name, text in _lines(estimate):
        console.print(f"[bold]{name:<8}[/] {text}", highlight=False, soft_wrap=True)
    if estimate.choice is None:
        return
    for reason in estimate.choice.reasons:
        console.print(f"{'':<8} {reason}", highlight=False, soft_wrap=True)
    if limit:
        console.print()
        show(estimate.rows(estimate.choice.ranking[:limit]), COLUMNS, as_json=False)


def _lines(estimate: "Plan") -> list[tuple[str, str]]:
    work, cluster = estimate.workload, estimate.cluster
    cost = cluster.dollars(estimate.seconds)
    slower = f", {estimate.slowdown:.2f} times that for the layout" if estimate.slowdown > 1 else ""
    lines = [
        (
            "model",
            f"{estimate.parameters:,.0f} parameters,"
            f" {estimate.weights_per_token:,.0f} used by a token",
        ),
        (
            "work",
            f"{work.method} on {work.tokens:,.0f} tokens in sequences of {work.sequence_length:,},"
            f" {work.epochs:g} times: {estimate.flops:.3g} operations",
        ),
        (
            "time",
            f"{_duration(estimate.seconds)} on {cluster.gpus} x {cluster.gpu.name}, at"
            f" {cluster.mfu:.0%} of {cluster.gpu.teraflops:g} TFLOP/s{slower}:"
            f" {estimate.seconds * cluster.gpus / 3600:,.2f} GPU-hours",
        ),
        ("cost", "no price is known: give --price" if cost is None else f"${cost:,.2f}"),
        *_fitting(estimate),
    ]
    if work.size is not None:
        lines.insert(1, ("data", f"{work.size:,.0f} bytes, {work.sending:.3g} s at 1 Gb/s"))
    return lines


def _fitting(estimate: "Plan") -> list[tuple[str, str]]:
    """Return the rows of memory and layout, as far as they are known."""
    from cray_agents.trainers.planning.layouts import describe_layout
    from cray_agents.trainers.planning.memory import GIB
    from cray_agents.trainers.planning.plan import gib

    choice, has = estimate.choice, f"of a GPU's {estimate.cluster.gpu.gib:g} GiB"
    if choice is None:
        least = f"{estimate.floor / GIB:,.1f} {has} at the least, before activations"
        return [("memory", least), ("layout", "give a directory with a config.json to get one")]
    breakdown = ", ".join(f"{name} {size:.1f}" for name, size in gib(choice.memory).items())
    fits = "" if choice.fits else " [bold red]does not fit[/]"
    recompute = f", recompute {choice.recompute}" if choice.recompute != "none" else ""
    return [
        ("memory", f"{choice.memory.gib:,.1f} {has}: {breakdown}{fits}"),
        ("layout", describe_layout(choice.layout) + recompute),
    ]


def _duration(seconds: float) -> str:
    """Format a duration in seconds, minutes, hours or days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
