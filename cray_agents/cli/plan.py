"""`plan`: estimate what a training run, or a load to serve, needs.

`train` reads only a model's config: no GPU, platform or weights are needed. `serve` goes by what
calls of this root's pool took, `start` by the bytes of weights. Read next: trainers/planning/,
runtime/accounting/serve_plan.py.
"""

import re
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.platform import start_rows
from cray_agents.cli.screen import (
    console,
    open_store,
    print_json,
    root,
    say,
    settings,
    show,
)
from cray_agents.cli.where import duration
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.datasets.reader import mean_length, read_dataset
from cray_agents.runtime.registry.registry import Registry
from cray_agents.server.platform_process import fetch, running
from cray_agents.training_jobs import (
    Backend,
    Fp8,
    Hyperparameters,
    Lora,
    MethodName,
    check_recompute,
)

if TYPE_CHECKING:
    from cray_agents.trainers.models.architecture import Architecture
    from cray_agents.trainers.planning.plan import Cluster, NodeBytes, Plan

COLUMNS = [
    "data",
    "tensor",
    "pipeline",
    "interleave",
    "context",
    "expert",
    "sharding",
    "recompute",
    "gib",
    "fits",
    "hours",
]
SIZE = re.compile(r"(\d+(?:\.\d+)?)([MBT])", re.IGNORECASE)
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
LENGTH = 4096  # default tokens of a sequence


commands = Commands("plan", help="Estimate a training run, the replicas of a load, their start.")


def _under(heading: str, text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=heading, **limits)


_AMOUNT, _CLUSTER, _HOW = "How much (one of)", "Where", "How"


@commands.command("train")
def train(
    model: Annotated[
        str,
        typer.Option(help="A directory with a config.json, name@N, or only a size such as 7B."),
    ],
    dataset: Annotated[str | None, _under(_AMOUNT, "The dataset to train on.")] = None,
    tokens: Annotated[float | None, _under(_AMOUNT, "The number of tokens.", min=1)] = None,
    samples: Annotated[int | None, _under(_AMOUNT, "The number of sequences.", min=1)] = None,
    size: Annotated[float | None, _under(_AMOUNT, "The bytes of text.", "--bytes", min=1)] = None,
    bytes_per_token: Annotated[
        float, _under(_AMOUNT, "With --bytes: the bytes of a token.", min=0.1)
    ] = 4.0,
    gpu: Annotated[str, _under(_CLUSTER, "The kind of GPU: H100, H200, A100, ...")] = "H100",
    gpus: Annotated[int | None, _under(_CLUSTER, "The number of GPUs in all.", min=1)] = None,
    nodes: Annotated[int | None, _under(_CLUSTER, "The number of nodes.", min=1)] = None,
    gpus_per_node: Annotated[int, _under(_CLUSTER, "The GPUs of a node.", min=1)] = 8,
    spare_nodes: Annotated[
        int, _under(_CLUSTER, "Nodes held to take the place of a lost one.", min=0)
    ] = 0,
    mfu: Annotated[
        float | None,
        _under(
            _CLUSTER,
            "The share of peak that a GPU that never waits reaches; default as published runs.",
        ),
    ] = None,
    price: Annotated[float | None, _under(_CLUSTER, "Dollars per GPU and hour.", min=0)] = None,
    sequence_length: Annotated[int | None, _under(_HOW, "The tokens of a sequence.", min=1)] = None,
    epochs: Annotated[float, _under(_HOW, "How often each sequence is trained on.")] = 1.0,
    method: Annotated[
        str, _under(_HOW, "The training method: sft, dpo, kto, grpo, distill.")
    ] = "sft",
    teacher: Annotated[
        str | None, _under(_HOW, "With distill: the teacher, as --model, but no size.")
    ] = None,
    lora_rank: Annotated[
        int | None, _under(_HOW, "The rank of LoRA adapters to train.", min=1)
    ] = None,
    backend: Annotated[
        str | None,
        _under(_HOW, "The backend: megatron or transformers; default by the model's kind."),
    ] = None,
    dtype: Annotated[str, _under(_HOW, "The precision: bfloat16 or float32.")] = "bfloat16",
    batch_size: Annotated[int, _under(_HOW, "The sequences of a step.", min=1)] = 128,
    microbatch_tokens: Annotated[
        int | None, _under(_HOW, "The tokens of a micro-batch; default as many as fit.", min=1)
    ] = None,
    fp8: Annotated[
        str | None, _under(_HOW, "The FP8 recipe: tensorwise, delayed, blockwise, mxfp8.")
    ] = None,
    recompute: Annotated[
        str,
        _under(
            _HOW,
            "The activations to recompute: auto, none, full, or modules: layernorm, mlp, moe_act,"
            " moe, core_attn.",
        ),
    ] = "auto",
    limit: Annotated[int, typer.Option(min=0, help="The number of layouts to list.")] = 12,
) -> None:
    """Estimate memory, time and cost of a training run, and choose its layout."""
    from cray_agents.trainers.planning.plan import Cluster, Workload, make_plan, plan_by_size
    from cray_agents.trainers.planning.step_time import find_gpu

    root = settings().root
    if sum(value is not None for value in (dataset, tokens, samples, size)) != 1:
        raise BadInput(
            "say how much is to be trained on, once: --dataset, --tokens, --samples or --bytes",
            param="tokens",
        )
    _check("method", method, get_args(MethodName))
    policy = None if recompute == "auto" else _recompute(recompute)
    if fp8 is not None:
        _check("fp8", fp8, get_args(Fp8))
    _check("dtype", dtype, ("bfloat16", "float32"))
    _check_models(model, backend, teacher, method)
    known = _size(model) or _architecture(root, model, backend)
    teaching = None if teacher is None else _architecture(root, teacher)
    length = sequence_length or _usual_length(root, dataset, known)
    if dataset is not None:
        tokens = float(_manifest(root, dataset)["splits"]["train"]["tokens"])
    elif samples is not None:
        tokens = float(samples * length)
    per_epoch = (size or 0) / bytes_per_token if tokens is None else tokens
    workload = Workload(
        _positive("tokens", per_epoch),
        length,
        _positive("epochs", epochs),
        cast(MethodName, method),
        size,
    )
    cluster = Cluster(
        find_gpu(gpu),
        _all_gpus(gpus, nodes, gpus_per_node),
        gpus_per_node,
        None if mfu is None else _positive("mfu", mfu, 1.0),
        price,
        spare_nodes,
    )
    if isinstance(known, float):
        estimate = plan_by_size(known, workload, cluster, lora=lora_rank is not None)
    else:
        hyper = Hyperparameters(
            steps=1,
            batch_size=batch_size,
            dtype=dtype,
            fp8=cast("Fp8 | None", fp8),
            lora=Lora(rank=lora_rank) if lora_rank else None,
        )
        at_once = microbatch_tokens or _microbatch(known, hyper, cluster, length, policy, teaching)
        _check_length(length, known, at_once)
        hyper = hyper.model_copy(update={"max_tokens_per_microbatch": at_once})
        estimate = make_plan(known, workload, cluster, hyper, policy, teaching)
    if given().json:
        print_json(estimate.data())
    else:
        _print_plan(estimate, limit)


@commands.command("serve")
def serve(
    model: Annotated[
        str, typer.Option(help="The name of a model that a pool of this root served.")
    ],
    rate: Annotated[float, typer.Option(help="The requests a second.")],
    tokens_in: Annotated[int, typer.Option(help="The prompt's tokens that no cache has.", min=1)],
    tokens_out: Annotated[int, typer.Option(help="The tokens of an answer.", min=1)],
    latency: Annotated[
        float | None, typer.Option(help="The seconds that a request may take on average.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="What a GPU, else a core, costs an hour; default: `prices`.", min=0),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Measure by the calls of the last 30m, 12h or 7d alone.")
    ] = None,
) -> None:
    """Say how many replicas and GPUs a load needs, and what a request costs.

    By the newest calls of the model that are on record: put a load like yours on the pool first.
    """
    from cray_agents.runtime.accounting.holdings import read_holdings
    from cray_agents.runtime.accounting.serve_plan import ServedLoad, calibrate, plan_load

    load = ServedLoad(_positive("rate", rate), tokens_in, tokens_out)
    wanted = None if latency is None else _positive("latency", latency)
    begin = 0.0 if since is None else time.time() - duration(since, "since")
    with open_store() as store:
        by = calibrate(store, read_holdings(root()), model.partition("@")[0], begin)
    done = plan_load(by, load, wanted, settings().prices, price)
    if given().json:
        print_json(done)
        return
    devices = f"{done.gpus} GPUs" if done.gpus else f"{done.cores} cores"
    cost = f"{done.cost or 0:.3g} {done.currency} a request"
    say(f"replicas {done.replicas}, with {devices}: {done.limit}")
    say(f"time     {done.seconds:.3g} s a request, {done.under_way:.3g} at a time on a replica")
    say(f"cost     {cost if done.cost is not None else 'no price is known: give --price'}")
    say(f"by       {by.calls} calls, {by.error:.0%} off on average, {by.busiest:.3g} at a time")


@commands.command("start")
def start(
    model: Annotated[
        str, typer.Option(help="A directory, name@N, a model's name, or only a size such as 7B.")
    ],
    storage: Annotated[
        float, typer.Option(help="The GB/s at which a replica's host reads weights.")
    ],
) -> None:
    """Say how long a replica reads a model's weights: when it starts, swaps, or wakes.

    A sleeping replica reads them too, unless its host's memory kept them (`asleep` 1). Beside it
    stand the seconds by phase of the replicas that a platform on this root has now.
    """
    from cray_agents.runtime.registry.deltas import rebuilt_bytes

    home, size = settings().root, _size(model)
    weights = 2 * int(size) if size else rebuilt_bytes(Registry(home).named(model))
    seconds = weights / 1e9 / _positive("storage", storage)
    info = running(home)
    replicas = [] if info is None else fetch(info, "/v1/pool")["data"]
    name = model.partition("@")[0]
    measured = start_rows([r for r in replicas if str(r["version"]).partition("@")[0] == name])
    if given().json:
        print_json({"weights": weights, "read_seconds": seconds, "measured": measured})
        return
    say(f"weights  {weights / 1e9:.3g} GB" + " in bfloat16" * bool(size))
    say(f"read     {seconds:.3g} s at {storage:g} GB/s; the engine's copying follows")
    if measured:
        say("measured seconds of the last start")
        show(measured, list(dict.fromkeys(column for row in measured for column in row)))


# ---- reading the options
def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadInput(f"--{name} {value!r}: choose one of {', '.join(allowed)}", param=name)


def _check_models(model: str, backend: str | None, teacher: str | None, method: str) -> None:
    """Raise BadInput for a backend or a teacher that cannot be planned, or has no effect."""
    if backend == "megatron-bridge":
        raise BadInput(
            "--backend megatron-bridge: its layouts are not planned; plan megatron or transformers",
            param="backend",
        )
    if backend is not None:
        _check("backend", backend, get_args(Backend))
    if teacher is not None and method != "distill":
        raise BadInput(f"--teacher has no effect with --method {method}", param="teacher")
    if _size(model) is not None and (backend or teacher):
        name = "backend" if backend else "teacher"
        raise BadInput(
            f"--{name} has no effect where only a size is known: give --model DIR", param=name
        )


def _recompute(text: str) -> str:
    try:
        return check_recompute(text)
    except ValueError as error:
        raise BadInput(f"--{error}", param="recompute") from error


def _positive(name: str, value: float, most: float = sys.float_info.max) -> float:
    if not 0 < value <= most:
        limit = "" if most > 1 else f" and at most {most:g}"
        raise BadInput(f"--{name} {value:g} must be above 0{limit}", param=name)
    return value


def _size(model: str) -> float | None:
    """Return the parameters of a size such as "7B", or None for a model's name."""
    match = SIZE.fullmatch(model)
    return float(match[1]) * UNITS[match[2].upper()] if match else None


def _architecture(root: Home, model: str, backend: str | None = None) -> "Architecture":
    from cray_agents.trainers.models.architecture import read_architecture

    return read_architecture(Registry(root).named(model), cast("Backend | None", backend))


def _usual_length(root: Home, dataset: str | None, known: "Architecture | float") -> int:
    """Return the dataset's mean length, else the model's limit up to 4,096 tokens."""
    if dataset is not None:
        return max(1, round(mean_length(_manifest(root, dataset))))
    return LENGTH if isinstance(known, float) else min(LENGTH, known.max_tokens)


def _manifest(root: Home, dataset: str) -> dict[str, Any]:
    """Return the manifest of a dataset with samples. Raises NotFound, Corrupt, BadInput."""
    manifest = read_dataset(root, dataset)
    if not mean_length(manifest):
        raise BadInput(f"dataset {dataset} has no samples to train on", param="dataset")
    return manifest


def _all_gpus(gpus: int | None, nodes: int | None, each: int) -> int:
    """Return the number of GPUs. Raises BadInput."""
    count = gpus or (nodes or 1) * each
    if nodes is not None and count != nodes * each:
        raise BadInput(
            f"--gpus {gpus} are not --nodes {nodes} of --gpus-per-node {each}: leave one"
            " of them out",
            param="gpus",
        )
    return count


def _microbatch(
    model: "Architecture",
    hyper: Hyperparameters,
    cluster: "Cluster",
    length: int,
    recompute: Any,
    teacher: "Architecture | None",
) -> int:
    """Return the tokens that a trainer on this cluster would choose, or those of a sequence."""
    from cray_agents.trainers.planning.job_layout import choose_microbatch
    from cray_agents.trainers.planning.layouts import LayoutQuestion

    gpus, gib, each = cluster.gpus, cluster.gpu.gib, cluster.gpus_per_node
    question = LayoutQuestion(model, hyper, gpus, gib, each, length, recompute, teacher=teacher)
    return max(choose_microbatch(question), length)


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
        console.print(f"[bold]{name:<8}[/] {text}", soft_wrap=True)
    if estimate.choice is None:
        return
    for reason in estimate.choice.reasons:
        say(f"{'':<8} {reason}")
    if limit:
        console.print()
        show(estimate.rows(estimate.choice.ranking[:limit]), COLUMNS)


def _lines(estimate: "Plan") -> list[tuple[str, str]]:
    work, cluster = estimate.workload, estimate.cluster
    cost = cluster.dollars(estimate.seconds)
    slow = estimate.slowdown
    spare = f" and {cluster.held - cluster.gpus} spare ones" if cluster.spare_nodes else ""
    slower = "" if slow is None else f", {slow:.2f} times that for the layout"
    lines = [
        (
            "model",
            f"{estimate.parameters:,.0f} parameters,"
            f" {estimate.weights_per_token:,.0f} used by a token",
        ),
        (
            "work",
            f"{work.method} on {work.tokens:,.0f} tokens in sequences of {work.sequence_length:,};"
            f" epochs {work.epochs:g}; {estimate.flops:.3g} operations",
        ),
        (
            "time",
            f"{_duration(estimate.seconds)} on {cluster.gpus} x {cluster.gpu.name}{spare}, at"
            f" {cluster.share(slow):.0%} of {cluster.gpu.teraflops:g} TFLOP/s{slower}:"
            f" {estimate.seconds * cluster.held / 3600:,.2f} GPU-hours",
        ),
        ("cost", "no price is known: give --price" if cost is None else f"${cost:,.2f}"),
        *_fitting(estimate),
    ]
    if work.size is not None:
        lines.insert(1, ("data", f"{work.size:,.0f} bytes, {work.sending:.3g} s at 1 Gb/s"))
    return lines


def _fitting(estimate: "Plan") -> list[tuple[str, str]]:
    """Return the rows of memory and layout, as far as they are known."""
    from cray_agents.trainers.planning.arithmetic import GIB
    from cray_agents.trainers.planning.layouts import describe_layout
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
        *([("files", _files(estimate.files))] if estimate.files else []),
        *([("kernels", _kernels(*estimate.plain))] if estimate.plain else []),
    ]


def _kernels(plain: float, attention: float) -> str:
    return (
        f"without Transformer Engine {plain - 1:.0%} longer, and {attention - 1:.0%} with"
        " FlashAttention 3: by bytes and operations, not measured"
    )


def _files(files: "NodeBytes") -> str:
    load, save, publish, swap = (
        f"{size / 1e9:,.3g} GB" for size in (files.load, files.save, files.publish, files.swap)
    )
    return (
        f"a node reads {load} to start, and writes {save} of a resume point and {publish} of the"
        f" checkpoint; a serving node reads {swap} at a swap"
    )


def _duration(seconds: float) -> str:
    """Format a duration in seconds, minutes, hours or days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
