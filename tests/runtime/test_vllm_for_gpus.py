"""vLLM for GPUs, as far as its Python goes: our command lines, and the scheduler's base.

By default the installed CPU build is asked, of the same version. `VLLM_FOR_GPUS` names a folder
with the CUDA build's wheel unpacked, its Python files at least, and then that is.
test_vllm_contract.py reads the rest.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).parent.parent.parent
BUILD = os.environ.get("VLLM_FOR_GPUS", "")

PROGRAM = """
import sys, types
from pathlib import Path
import torch

folder = sys.argv[1]
if folder:
    sys.path.insert(0, folder)
    for name in ("_C", "_C_stable_libtorch", "_moe_C_stable_libtorch"):  # compiled
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    vllm.platforms._current_platform = NonNvmlCudaPlatform()
from vllm import platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

assert bool(folder) == platforms.current_platform.is_cuda()
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from cray_agents.runtime.vllm_plugins.scheduler import AsyncLeanScheduler, LeanScheduler
assert issubclass(AsyncLeanScheduler, (LeanScheduler, AsyncScheduler))

from cray_agents.runtime.pool import vllm_process
from cray_agents.runtime.pool.serving_plan import FAST
from cray_agents.runtime.pool.vllm_process import EngineSettings, NodeShare, command
from cray_agents.runtime.pool.weight_transfer import TransferSettings

vllm_process.has_gpu_build = lambda: True
settings = [
    EngineSettings(),
    EngineSettings(max_model_len=0, dtype="bfloat16", reasoning_parser="qwen3"),
    EngineSettings(max_lora_rank=24, sleeps=True),
    EngineSettings(max_lora_rank=24, kv_tier=Path("/kv")),
    EngineSettings(engine_args=("--tensor-parallel-size", "4", "--gpu-memory-utilization", "0.8")),
    *(EngineSettings(load_format=name) for name in FAST),
    *(EngineSettings(transfer=TransferSettings(way, Path("s"))) for way in ("nccl", "ipc")),
]
shares = [NodeShare(), *(NodeShare(2, rank, "10.0.0.1", 29500) for rank in (0, 1))]
listens = [("--uds", "/tmp/s"), ("--host", "::1", "--port", "1", "--ssl-certfile", "c",
                                 "--ssl-keyfile", "k")]
parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
for one, share, where in [*((one, shares[0], listens[0]) for one in settings),
                          *((settings[0], share, listens[1]) for share in shares)]:
    line = command(Path("/m"), ("name", "name@1"), one, where, share)
    given = parser.parse_args(line[line.index("--model"):])
    validate_parsed_serve_args(given)
    made = AsyncEngineArgs.from_cli_args(given)
    assert made.model == "/m" and made.nnodes == share.nodes, line
    print("accepted")
"""


def test_vllm_for_gpus_accepts_every_command_line_and_has_the_schedulers_base() -> None:
    program = [sys.executable, "-c", PROGRAM, BUILD]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("accepted") == 13
