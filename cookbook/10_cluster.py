"""10: a Hugging Face model on a GPU cluster: what to write down, what to type, and a dry run here.

    python cookbook/10_cluster.py [FOLDER]    FOLDER: where it all goes; default: ./cluster-demo

It runs without a GPU, in seconds: it shows the estimates, and the very batch script that Slurm
would get for a LoRA job on 2 nodes of 8 H100, from stand-ins for Slurm's programs. NOT RUN by us:
the rest, on GPUs. What follows is what the code is written for.

1. A folder that all nodes see under one path, and an environment with the CUDA builds on it:

    pip install 'cray-agents[gpu]'
    hf download Qwen/Qwen3-8B --local-dir /shared/models/Qwen3-8B

2. Beside your agent, `cray-agents.toml`: see CONFIG below. An unknown key is an error. What your
Slurm asks for (partition, account) is `slurm_options`; sbatch's variables are not looked at.

3. Does it fit, how long, how much? Nothing is read but the model's config.json:

    cray-agents plan --model /shared/models/Qwen3-8B --tokens 2e7 --lora-rank 32 --nodes 2
    cray-agents doctor

4. On a node with GPUs for serving (`salloc --gpus=2`, or one of your own), the platform. It serves
there, with tensor parallelism over its GPUs (`engine_args`), and trains by jobs on other nodes.
Where other nodes can reach it, it asks for a key; your own commands find theirs on the shared root:

    cray-agents keys create me
    cray-agents up --model /shared/models/Qwen3-8B --name coder --scheduler slurm --detach

5. The loop, an agent's file; and what to look at meanwhile, from any node that reaches the
platform's by its name. If the loop or the platform dies, the same commands go on where they
stopped; after a platform whose node is gone, they say which file to remove first:

    cray-agents loop cookbook/07_code_writer.py --iterations 20
    cray-agents status
    cray-agents jobs list
    cray-agents models show coder

6. A promotion that you regret is taken back within seconds; what runs is ended by `down`, on the
platform's node:

    cray-agents models rollback coder --reason "too terse"
    cray-agents down

LoRA trains adapters beside weights in bfloat16, and each job's are merged into the next version.
All weights, without `lora`, take some 16 bytes a parameter and a tenth of the learning rate: `plan`
without --lora-rank says over how many GPUs. Each replica of an `up` has GPUs of its
node to itself, as many as `engine_args` makes it take.
"""

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from cray_agents.testing import make_tiny_model

CONFIG = """\
home = "{home}"  # the shared root: all nodes see it
host = "0.0.0.0"                  # other nodes reach the platform; default: its own alone
scheduler = "slurm"
slurm_options = ["--partition=gpu", "--account=me"]
train_nodes = 2                   # of a job that names no layout; `plan` says which one it gets
train_gpus = "on"
train_gpu = "H100"
train_gpus_per_node = 8
train_cpus_per_rank = 8
train_minutes = 240               # a job that is not done by then goes on in a new one
max_model_len = 8192
dtype = "bfloat16"
engine_args = ["--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.85"]
"""

JOB = {
    "steps": 200,
    "batch_size": 64,
    "learning_rate": 1e-4,  # LoRA: about ten times that of full weights
    "warmup_steps": 10,
    "schedule": "cosine",
    "dtype": "bfloat16",
    "max_tokens_per_microbatch": 16384,
    "lora.alpha": 64,
}

# Slurm's programs, as far as a submission asks them. They queue nothing, and keep the script.
STAND_INS = {
    "sinfo": "echo gpu",
    "scontrol": "echo ClusterName = dry-run",
    "sbatch": 'cat > "$0.script"; echo 1',
    "squeue": """[ ! -f "${0%/*}/sbatch.script" ] ||
        sed -n '/^#SBATCH --job-name=/{s//1\x1fPENDING\x1fResources\x1f/; s/$/\x1f/p}' \
            "${0%/*}/sbatch.script" """,
}


def cray_agents(*words: object, answers: bool = False) -> Any:
    """Show a command and run it; with `answers`, what it prints as JSON."""
    argv = [str(word) for word in words]
    print(f"\n$ cray-agents {shlex.join(argv)}", flush=True)
    command = [sys.executable, "-P", "-m", "cray_agents", *argv]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE if answers else None).stdout
    return json.loads(out) if answers else None


def pretend_slurm(folder: Path) -> Path:
    """Put the stand-ins before a Slurm that is here; where they keep the script."""
    folder.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    script = folder / "sbatch.script"
    script.unlink(missing_ok=True)
    return script


def some_dataset(folder: Path) -> str:
    """A few conversations as a training set; its id. Yours are made by a loop, or as in 04."""
    chats = [[{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{n}"}]
             for n in range(64)]  # fmt: skip
    tokenizer = make_tiny_model(folder / "tokenizer", [(chat, {}) for chat in chats])
    recipe = folder / "recipe.json"
    recipe.write_text(json.dumps({"demonstrations": chats, "tokenizer": str(tokenizer)}))
    made = cray_agents("dataset", "build", "--recipe", recipe, "--json", answers=True)
    return str(made["id"])


def main(folder: Path) -> None:
    """Write the configuration, estimate, and show what would be submitted."""
    folder = folder.absolute()
    model = folder / "Qwen3-8B"
    model.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # the configuration is read where one works
    text = CONFIG.format(home=folder / "root")
    Path("cray-agents.toml").write_text(text)
    print(f"cray-agents.toml\n{text}")
    config = import_module("05_fine_tuning").EIGHT_BILLION  # of the file beside this one
    (model / "config.json").write_text(json.dumps(config))

    work = ("--model", model, "--tokens", 2e7, "--microbatch-tokens", 16384)
    cray_agents("plan", *work, "--nodes", 2, "--limit", 3, "--lora-rank", 32)
    cray_agents("plan", *work, "--nodes", 2, "--limit", 3)  # of all weights

    dataset = some_dataset(folder)
    script = pretend_slurm(folder / "slurm")
    what = ("--parent", model, "--dataset", dataset, "--lora-rank", 32)
    what += tuple(word for key, value in JOB.items() for word in ("--set", f"{key}={value}"))
    what += ("--init", "random")  # only here, where there are no weights to begin with
    job = cray_agents("jobs", "submit", *what, "--detach", "--json", answers=True)
    print(f"\nSlurm would get:\n\n{script.read_text()}", flush=True)
    cray_agents("jobs", "logs", job["id"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "cluster-demo"))
