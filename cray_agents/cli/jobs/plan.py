"""`plan`: what a training run would take, before it is asked for. Nothing is read but a config.

No GPU, platform or weights are needed. Read next: trainers/planning/.
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
LENGTH = 4096  # tokens of a sequence, where nothing says otherwise
RECOMPUTE = ("auto", "none", "selective", "full")

HOW_MUCH = "How much (one of)"
WHERE = "Where"
HOW = "How"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plan)


def plan(
    model: Annotated[
        str,
        typer.Option(help="A directory with a config.json, name@N, or only a size such as 7B."),
    ],
    dataset: Annotated[str | None, typer.Option(rich_help_panel=HOW_MUCH)] = None,
    tokens: Annotated[float | None, typer.Option(min=1, rich_help_panel=HOW_MUCH)] = None,
    samples: Annotated[int | None, typer.Option(min=1, rich_help_panel=HOW_MUCH)] = None,
    size: Annotated[
        float | None, typer.Option("--bytes", min=1, help="Of text.", rich_help_panel=HOW_MUCH)
    ] = None,
    bytes_per_token: Annotated[float, typer.Option(min=0.1, rich_help_panel=HOW_MUCH)] = 4.0,
    gpu: Annotated[str, typer.Option(help="H100, H200, A100, ...", rich_help_panel=WHERE)] = "H100",
    gpus: Annotated[int | None, typer.Option(min=1, rich_help_panel=WHERE)] = None,
    nodes: Annotated[int | None, typer.Option(min=1, rich_help_panel=WHERE)] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, rich_help_panel=WHERE)] = 8,
    mfu: Annotated[
        float, typer.Option(help="Of peak, of a GPU that never waits.", rich_help_panel=WHERE)
    ] = 0.4,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Dollars per GPU and hour.", rich_help_panel=WHERE),
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, rich_help_panel=HOW)] = None,
    epochs: Annotated[float, typer.Option(rich_help_panel=HOW)] = 1.0,
    method: Annotated[str, typer.Option(help="sft, dpo, kto, grpo.", rich_help_panel=HOW)] = "sft",
    lora_rank: Annotated[int | None, typer.Option(min=1, rich_help_panel=HOW)] = None,
    dtype: Annotated[str, typer.Option(rich_help_panel=HOW)] = "bfloat16",
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences of a step.", rich_help_panel=HOW)
    ] = 128,
    microbatch_tokens: Annotated[int | None, typer.Option(min=1, rich_help_panel=HOW)] = None,
    recompute: Annotated[
        str, typer.Option(help="auto, none, selective, full.", rich_help_panel=HOW)
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
        made = plan_by_size(known, workload, cluster, lora=lora_rank is not None)
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
        way: Any = None if recompute == "auto" else recompute
        made = make_plan(known, workload, cluster, hyper, way)
    if as_json:
        print(json.dumps(made.data(), indent=2))
    else:
        _tell(made, limit)


# ---- what was given
def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadInput(f"--{name} {value!r}: choose one of {', '.join(allowed)}", param=name)


def _positive(name: str, value: float, most: float = sys.float_info.max) -> float:
    if not 0 < value <= most:
        limit = "" if most > 1 else f" and at most {most:g}"
        raise BadInput(f"--{name} {value:g} must be above 0{limit}", param=name)
    return value


def _size(model: str) -> float | None:
    """The parameters of "7B"; None: it names something."""
    found = SIZE.fullmatch(model)
    return float(found[1]) * UNITS[found[2].upper()] if found else None


def _architecture(root: Home, model: str) -> "Architecture":
    from cray_agents.runtime.registry.registry import Registry
    from cray_agents.trainers.models.architecture import read_architecture

    folder = Path(model).expanduser()
    return read_architecture(folder if folder.is_dir() else Registry(root).directory(model))


def _usual_length(root: Home, dataset: str | None, known: "Architecture | float") -> int:
    """The dataset's mean, else what the model allows up to 4,096."""
    if dataset is not None:
        found = _counts(root, dataset)
        return max(1, round(found["tokens"] / found["samples"]))
    return LENGTH if isinstance(known, float) else min(LENGTH, known.max_tokens)


def _counts(root: Home, dataset: str) -> dict[str, int]:
    """Samples and tokens of a dataset's train split. Raises NotFound, Corrupt, BadInput."""
    from cray_agents.runtime.datasets.reader import read_dataset

    found: dict[str, int] = read_dataset(root, dataset).get("splits", {}).get("train", {})
    if not found.get("samples"):
        raise BadInput(f"dataset {dataset} has no samples to train on", param="dataset")
    return found


def _tokens(
    root: Home,
    length: int,
    bytes_per_token: float,
    dataset: str | None,
    tokens: float | None,
    samples: int | None,
    size: float | None,
) -> float:
    """Tokens of an epoch, by whichever measure was given. Raises BadInput."""
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


# ---- what is said
def _tell(made: "Plan", limit: int) -> None:
    """The plan for people."""
    for name, text in _lines(made):
        console.print(f"[bold]{name:<8}[/] {text}", highlight=False, soft_wrap=True)
    if made.choice is None:
        return
    for reason in made.choice.reasons:
        console.print(f"{'':<8} {reason}", highlight=False, soft_wrap=True)
    if limit:
        console.print()
        show(made.rows(made.choice.ranking[:limit]), COLUMNS, as_json=False)


def _lines(made: "Plan") -> list[tuple[str, str]]:
    work, cluster = made.workload, made.cluster
    cost = cluster.dollars(made.seconds)
    slower = f", {made.slowdown:.2f} times that for the layout" if made.slowdown > 1 else ""
    lines = [
        (
            "model",
            f"{made.parameters:,.0f} parameters, {made.weights_per_token:,.0f} used by a token",
        ),
        (
            "work",
            f"{work.method} on {work.tokens:,.0f} tokens in sequences of {work.sequence_length:,},"
            f" {work.epochs:g} times: {made.flops:.3g} operations",
        ),
        (
            "time",
            f"{_duration(made.seconds)} on {cluster.gpus} x {cluster.gpu.name}, at"
            f" {cluster.mfu:.0%} of {cluster.gpu.teraflops:g} TFLOP/s{slower}:"
            f" {made.seconds * cluster.gpus / 3600:,.2f} GPU-hours",
        ),
        ("cost", "no price is known: give --price" if cost is None else f"${cost:,.2f}"),
        *_fitting(made),
    ]
    if work.size is not None:
        lines.insert(1, ("data", f"{work.size:,.0f} bytes, {work.sending:.3g} s at 1 Gb/s"))
    return lines


def _fitting(made: "Plan") -> list[tuple[str, str]]:
    """Memory and layout, as far as they are known."""
    from cray_agents.trainers.planning.layouts import describe_layout
    from cray_agents.trainers.planning.memory import GIB
    from cray_agents.trainers.planning.plan import gib

    choice, has = made.choice, f"of a GPU's {made.cluster.gpu.gib:g} GiB"
    if choice is None:
        least = f"{made.floor / GIB:,.1f} {has} at the least, before activations"
        return [("memory", least), ("layout", "give a directory with a config.json to get one")]
    parts = ", ".join(f"{name} {size:.1f}" for name, size in gib(choice.memory).items())
    fits = "" if choice.fits else " [bold red]does not fit[/]"
    recompute = f", recompute {choice.recompute}" if choice.recompute != "none" else ""
    return [
        ("memory", f"{choice.memory.gib:,.1f} {has}: {parts}{fits}"),
        ("layout", describe_layout(choice.layout) + recompute),
    ]


def _duration(seconds: float) -> str:
    """Seconds, minutes, hours or days, whichever reads best."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
