"""`make gpu`, or `python -m tests.gpu`: run the GPU stages, each as far as it gets.

exit 0   no stage failed; some may have had no time, which the report says
exit 1   a stage failed: the report says which, and why
exit 2   this machine has no GPU that torch can use; nothing was run
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cray_agents.errors import CrayError, JobError
from cray_agents.training_jobs import Lora
from tests.gpu import export, golden, logprobs, session, several, sharding, speed
from tests.gpu.bench import FULL, ONE_CORE, Bench, Failed, kernel_paths
from tests.gpu.report import Report

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
}

# in the order of their worth: the time may not suffice for all
STAGES: dict[str, Callable[[Bench], None]] = {
    "golden": golden.main,
    "train-1B": partial(speed.main, stage="train-1B", name="1B"),
    "session": partial(session.main, stage="session", name="1B"),
    "session-small-rate": partial(
        session.main, stage="session-small-rate", name="1B", rate=1e-6, growing=True
    ),
    "session-lora": partial(session.main, stage="session-lora", name="1B", lora=Lora()),
    "train-4B": partial(speed.main, stage="train-4B", name="4B"),
    "lora-8B": partial(speed.main, stage="lora-8B", name="8B", lora=Lora()),
    "transformers": partial(speed.against_transformers, stage="transformers", name="1B"),
    "logprobs": partial(logprobs.main, stage="logprobs", name="4B"),
    "export": partial(export.main, stage="export", name="4B"),
    "train-3B": partial(speed.main, stage="train-3B", name="3B"),
    "parallel": partial(several.parallel, stage="parallel"),
    "hang": partial(several.hang, stage="hang"),
    "sharding": partial(sharding.main, stage="sharding", name="1B"),
}


class TimeUp(Exception):
    """The minutes are over."""


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
        failed = run(bench, options.only or list(STAGES))
    print(f"\nwritten to {options.out}/gpu.json and gpu.md; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    add = parser.add_argument
    add("--only", action="append", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    add("--minutes", type=float, default=25.0, help="stop when they are over (25)")
    add("--peak", type=float, metavar="TFLOPS", help="of dense bfloat16, for MFU")
    add("--out", type=Path, default=Path("build/gpu"), help="the report's folder (build/gpu)")
    add("--scratch", type=Path, help="where 60 GB of models may lie for a while")
    add("--cpu-tiny", action="store_true", help="all stages in tiny sizes on the CPU, as a test")
    return parser.parse_args(argv)


def run(bench: Bench, names: list[str]) -> list[str]:
    """Run the stages by name, after the imports; return those that failed."""
    failed = []
    before = signal.signal(signal.SIGALRM, _time_up)
    for name, stage in {"imports": imports, **{name: STAGES[name] for name in names}}.items():
        begun = time.monotonic()
        left = bench.deadline - begun
        if left <= 0 and name != "imports":
            bench.report.end(name, "skipped", 0.0, "no time left")
            continue
        signal.setitimer(signal.ITIMER_REAL, left + MARGIN)
        problem = None
        try:
            stage(bench)
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
    raise TimeUp("stopped: the minutes are over")


# ---- the first stage
def imports(bench: Bench) -> None:
    """Import what a job's launcher imports, which must leave CUDA alone, and look around."""
    import torch

    versions = {name: _version(name, module) for name, module in PACKAGES.items()}
    bench.report.begin({"python": platform.python_version(), **versions})
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
        known |= {"CUDA": torch.version.cuda}
    peak = speed.peak_of(bench)
    bench.report.know(**known, **{"peak TFLOP/s": peak and peak / 1e12})


if __name__ == "__main__":
    sys.exit(main())
