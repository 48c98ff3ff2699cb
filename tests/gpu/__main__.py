"""`make gpu`, or `python -m tests.gpu`: run the GPU stages, each as far as it gets.

A stage has a budget, a share of --minutes; what it has measured when that is over stays. `--only`
gives its stages all the time. With several GPUs `--several` runs what needs them, and nothing else.

exit 0   no stage failed; some may have had no time, which the report says
exit 1   a stage failed: the report says which, and why
exit 2   this machine has no GPU that torch can use; nothing was run
"""

import argparse
import importlib.metadata
import importlib.util
import math
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.errors import CrayError, JobError
from cray_agents.training_jobs import Lora
from tests.gpu import export, golden, logprobs, session, several, sharding, speed, swap
from tests.gpu.bench import FULL, ONE_CORE, Bench, Failed, kernel_paths
from tests.gpu.report import Report
from tests.soak import ROOT, commit

NO_GPU = 2
MARGIN = 20.0  # seconds that a measurement which has begun may take beyond --minutes
PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "transformers": "transformers",
    "triton": "triton",
    "transformer-engine": "transformer_engine",
    "flash-attn": "flash_attn",
    "apex": "apex",
    "liger-kernel": "liger_kernel",
    "numpy": "numpy",
    "vllm": "vllm",
}

MINUTES = 13.0  # what the budgets below are made for: a quarter of an hour with the host's start


class Stage(NamedTuple):
    """What a stage does, and the seconds it may take of MINUTES."""

    work: Callable[[Bench], None]
    seconds: float
    several: bool = False  # it needs two GPUs or more


# in the order of their worth: the time may not suffice for all
STAGES: dict[str, Stage] = {
    "golden": Stage(golden.main, 100),
    "train-1B": Stage(partial(speed.main, stage="train-1B", name="1B", aims=speed.AIMS), 100),
    "train-3B": Stage(partial(speed.main, stage="train-3B", name="3B"), 90),
    "session-small-rate": Stage(
        partial(session.main, stage="session-small-rate", name="1B", rate=1e-6, growing=True), 90
    ),
    "train-moe": Stage(partial(speed.main, stage="train-moe", name="moe"), 75),
    "session-lora": Stage(partial(session.main, stage="session-lora", name="1B", lora=Lora()), 75),
    "session": Stage(partial(session.main, stage="session", name="1B"), 75),
    "export": Stage(partial(export.main, stage="export", name="4B"), 60),
    "swap": Stage(partial(swap.main, stage="swap"), 120),
    "parallel": Stage(partial(several.parallel, stage="parallel"), 90, several=True),
    "resume": Stage(partial(several.resume, stage="resume"), 60, several=True),
    "train-all": Stage(partial(speed.on_all, stage="train-all", name="8B"), 90, several=True),
    "hang": Stage(partial(several.hang, stage="hang"), 60, several=True),
    "sharding": Stage(partial(sharding.main, stage="sharding", name="1B"), 90, several=True),
    "logprobs": Stage(partial(logprobs.main, stage="logprobs", name="4B"), 60),
    "transformers": Stage(partial(speed.against_transformers, stage="transformers", name="1B"), 60),
    "lora-8B": Stage(partial(speed.main, stage="lora-8B", name="8B", lora=Lora()), 75),
    "train-4B": Stage(partial(speed.main, stage="train-4B", name="4B"), 75),
}


class TimeUp(Exception):
    """A stage's time is over."""


def main(argv: list[str] | None = None) -> int:
    """Run the stages; return the exit code."""
    options = _options(argv)
    if options.cpu_tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if not options.cpu_tiny and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds none that it can use. Nothing was run;"
            " --cpu-tiny runs every stage on the CPU, in sizes whose figures mean nothing",
            file=sys.stderr,
        )
        return NO_GPU
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        bench = Bench(
            Report(options.out),
            Path(folder),
            ONE_CORE if options.cpu_tiny else FULL,
            options.cpu_tiny,
            deadline,
            options.peak,
        )
        chosen = options.only or [n for n, s in STAGES.items() if s.several or not options.several]
        failed = run(bench, chosen, share=None if options.only else options.minutes / MINUTES)
    print(f"\nwritten to {options.out}/gpu.json and gpu.md; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    add = parser.add_argument
    add("--only", action="append", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    add("--several", action="store_true", help="only the stages that need two GPUs or more")
    add("--minutes", type=float, default=MINUTES, help=f"stop when they are over ({MINUTES:.0f})")
    add("--peak", type=float, metavar="TFLOPS", help="of dense bfloat16, for MFU")
    add("--out", type=Path, default=Path("build/gpu"), help="the report's folder (build/gpu)")
    add("--scratch", type=Path, help="where 60 GB of models may lie for a while")
    add("--cpu-tiny", action="store_true", help="all stages in tiny sizes on the CPU, as a test")
    return parser.parse_args(argv)


def run(bench: Bench, names: list[str], share: float | None = None) -> list[str]:
    """Run the stages by name, after the imports; return those that failed.

    A stage may take `share` of its seconds, or all the time that is left if that is None.
    """
    failed = []
    before = signal.signal(signal.SIGALRM, _time_up)
    imported = Stage(imports, math.inf)
    for name, stage in {"imports": imported, **{name: STAGES[name] for name in names}}.items():
        begun = time.monotonic()
        budget = math.inf if share is None else share * stage.seconds
        deadline = min(bench.deadline, begun + budget)
        left = deadline - begun
        if left <= 0 and name != "imports":
            bench.report.end(name, "skipped", 0.0, "no time left")
            continue
        signal.setitimer(signal.ITIMER_REAL, left + MARGIN)
        problem = None
        try:
            stage.work(replace(bench, deadline=deadline))
        except JobError as death:
            problem = f"{death.log_tail}\n{death}"
        except (CrayError, Failed, TimeUp) as reason:
            problem = str(reason)
        except Exception:  # noqa: BLE001 (the other stages may still work, and the report tells)
            problem = traceback.format_exc()
        signal.setitimer(signal.ITIMER_REAL, 0)
        state = "failed" if problem else "done"
        bench.report.end(name, state, time.monotonic() - begun, problem)
        if problem:
            print(problem, file=sys.stderr, flush=True)
            failed.append(name)
    signal.signal(signal.SIGALRM, before)
    return failed


def _time_up(number: int, frame: object) -> None:
    raise TimeUp("stopped: its time is over")


# ---- the first stage
def imports(bench: Bench) -> None:
    """Import what a job's launcher imports, which must leave CUDA alone, and look around."""
    import torch

    versions = {name: _version(name, module) for name, module in PACKAGES.items()}
    of_source = commit() if (ROOT / ".git").exists() else "unknown"
    bench.report.begin({"commit": of_source, "python": platform.python_version(), **versions})
    if bench.on_cpu:
        bench.report.know(sizes="tiny, on the CPU: no figure below means anything")
    from cray_agents.trainers.job import rank  # noqa: F401
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.session import resident  # noqa: F401

    load_megatron()
    started = torch.cuda.is_initialized()
    bench.report.add(
        "imports", layers=kernel_paths(bench.on_cpu)[0], cuda_initialized_by_imports=started
    )
    bench.in_rank(look_at_device)
    if started:
        raise Failed("the launcher's imports have initialized CUDA, so no rank can be forked")


def _version(name: str, module: str) -> str:
    """Return a package's version, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "there" if importlib.util.find_spec(module) else "missing"


def look_at_device(bench: Bench) -> None:
    """In a rank: note the device, its memory and its peak."""
    import torch

    from cray_agents.trainers.planning.cluster_resources import this_host

    known: dict[str, Any] = {"device": "CPU", "device GiB": this_host().gib}
    if not bench.on_cpu:
        properties = torch.cuda.get_device_properties(0)
        known = {"device": properties.name, "device GiB": properties.total_memory / 2**30}
        known |= {"GPUs": torch.cuda.device_count(), "CUDA": torch.version.cuda}
        known |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        known |= {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    peak = speed.peak_of(bench)
    bench.report.know(**known, **{"peak TFLOP/s": peak and peak / 1e12})


if __name__ == "__main__":
    sys.exit(main())
