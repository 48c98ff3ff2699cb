"""10: a Hugging Face model on a GPU cluster: what to write down, what to type, and a dry run here.

    python cookbook/10_cluster.py [FOLDER]    FOLDER: where it all goes; default: ./cluster-demo

It runs without a GPU, in seconds: it shows the estimates, and the very batch script that Slurm
would get for a LoRA job on 2 nodes of 8 H100. NOT RUN by us: the rest, on GPUs. What follows is
what the code is written for.

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

    cray-agents loop cookbook/07_code_writer.py --generations 20
    cray-agents status
    cray-agents jobs list
    cray-agents models lineage coder

6. A promotion that you regret is taken back within seconds; what runs is ended by `down`, on the
platform's node:

    cray-agents models rollback coder --reason "too terse"
    cray-agents down

LoRA trains adapters beside weights in bfloat16, and each job's are merged into the next version.
All weights, without `lora`, take some 16 bytes a parameter and a tenth of the learning rate: `plan`
without --lora-rank says over how many GPUs. Replicas of one `up` all see the GPUs of its node: one
replica, as large as `engine_args` makes it, is what was thought through.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from cray_agents.cli.agent.agents import load
from cray_agents.config import load_config
from cray_agents.ports import Command, CommandStatus
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets import build_dataset
from cray_agents.runtime.scheduler.batch_script import batch_script
from cray_agents.runtime.store import Store
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.planning.cluster_resources import resources_of
from cray_agents.training_jobs import Hyperparameters, JobSpec, Lora

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

HYPERPARAMETERS = Hyperparameters(
    steps=200,
    batch_size=64,
    learning_rate=1e-4,  # LoRA: about ten times that of full weights
    warmup_steps=10,
    schedule="cosine",
    dtype="bfloat16",
    max_tokens_per_microbatch=16384,
    lora=Lora(rank=32, alpha=64),
)


class Shown:
    """A scheduler that prints the batch script and queues nothing."""

    name = "shown"

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger

    def submit(self, command: Command) -> str:
        """Print what sbatch would read."""
        print(batch_script(command, self.ledger))
        return "none"

    def status(self, name: str) -> CommandStatus:
        """As if it waited."""
        return CommandStatus(state="queued", id="none")

    def cancel(self, name: str) -> None:
        """Nothing runs."""


def cray_agents(*words: object) -> None:
    """Show a command, and run it."""
    argv = [str(word) for word in words]
    print(f"\n$ cray-agents {shlex.join(argv)}", flush=True)
    subprocess.run([sys.executable, "-m", "cray_agents", *argv], check=True)


def hollow_weights(model: Path) -> None:
    """The weights that a config implies, their header real and their numbers a hole in the file.

    A job is refused where its parent has none; 16 GB of nothing take no room on the disk.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        place = [end, end := end + 2 * tensor.numel()]
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": place}
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def some_dataset(folder: Path) -> str:
    """A few conversations as a training set; its id. Yours are made by a loop, or as in 04."""
    chats = [[{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{n}"}]
             for n in range(64)]  # fmt: skip
    tokenizer = folder / "tokenizer"
    make_seed_model(tokenizer, seed=0, corpus=[str(chats)])
    recipe = DatasetRecipe(demonstrations=chats, tokenizer=str(tokenizer))
    home = load_config().root
    return str(build_dataset(Store(home), home, recipe)["id"])


def main(folder: Path) -> None:
    """Write the configuration, estimate, and show what would be submitted."""
    folder = folder.absolute()
    model = folder / "Qwen3-8B"
    model.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # the configuration is read where one works
    text = CONFIG.format(home=folder / "root")
    Path("cray-agents.toml").write_text(text)
    print(f"cray-agents.toml\n{text}")
    config = load(Path(__file__).with_name("05_fine_tuning.py")).EIGHT_BILLION
    (model / "config.json").write_text(json.dumps(config))

    work = ("--model", model, "--tokens", 2e7, "--microbatch-tokens", 16384)
    cray_agents("plan", *work, "--nodes", 2, "--limit", 3, "--lora-rank", 32)
    cray_agents("plan", *work, "--nodes", 2, "--limit", 3)  # of all weights

    hollow_weights(model)
    settings = load_config()
    trainer = MegatronTrainer(
        settings.root, Shown(settings.root.slurm), resources := resources_of(settings)
    )
    print(f"\nA job would take {resources}. Slurm would get:\n", flush=True)
    job = trainer.submit(
        JobSpec(
            dataset=some_dataset(folder),
            parent=str(model),
            parent_sha256="",
            hyperparameters=HYPERPARAMETERS,
        )
    )
    print((settings.root.jobs / job.id / "log.txt").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "cluster-demo"))
