"""A pool around a real vLLM, and the logprobs that transformers computes from the same weights."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from cray_agents.ports import EngineCall, PromptScore, SampledSequence
from cray_agents.records import Manifest, ProbePrompt, ProbeReport, new_id
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_http import UNIX
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.adapters import CONFIG, WEIGHTS
from cray_agents.runtime.registry.checkpoints import hash_files
from cray_agents.runtime.vllm_plugins.wire import VARIABLE
from cray_agents.trainers.checkpointing.peft_adapter import peft_config
from cray_agents.training_jobs import Lora
from tests.support.unix_servers import socket_of

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [300, 20, 21, 22, 4]]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is 47 + 385?"},
]


@dataclass
class Serving:
    """A pool of one replica, and the checkpoints it can be given."""

    pool: Pool
    models: dict[str, Path]

    async def swap(self, name: str) -> None:
        await self.pool.swap(self.models[name], name, golden_probe(self.models[name]))

    async def stage(self, name: str) -> ProbeReport:
        """One whose manifest has a probe."""
        model = self.models[name]
        return await self.pool.stage(model, name, checkpoints.read_manifest(model).probe)

    async def chat(
        self, version: str, request: dict[str, Any]
    ) -> tuple[dict[str, Any], SampledSequence]:
        """The answer, with vLLM's own word on what was sampled, and what was captured."""
        told = {"return_token_ids": True, "logprobs": True}
        exchange = EngineCall("/v1/chat/completions", request | told, new_id("x")[2:])
        (body,) = [piece async for piece in self.pool.answer(version, exchange)]
        answer, (sample,) = json.loads(body), exchange.samples
        assert answer["model"] == exchange.version == version
        assert answer["id"] == f"chatcmpl-{exchange.id}"
        assert answer["prompt_token_ids"] == sample.prompt_token_ids
        choice = answer["choices"][0]
        assert choice["token_ids"] == sample.token_ids
        assert [at["logprob"] for at in choice["logprobs"]["content"]] == sample.logprobs
        return answer, sample

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[VllmEngine]:
        """The replica, behind the pool's back."""
        engine = VllmEngine(UNIX + socket_of(self.pid), "m", secret_of(self.pid))
        try:
            yield engine
        finally:
            await engine.close()

    async def score(self) -> list[list[float]]:
        async with self.engine() as engine:
            return logprobs_of(await engine.score(PROMPTS))

    @property
    def pid(self) -> int:
        return int(self.pool.status()[0]["pid"])


def logprobs_of(scores: list[PromptScore]) -> list[list[float]]:
    return [score.logprobs for score in scores]


def at_replica(pid: int, **options: Any) -> aiohttp.ClientSession:
    """A client of a replica's server, whatever host its URLs name."""
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket_of(pid)), **options)


def secret_of(pid: int) -> str:
    """What a replica asks for: only its user can look it up so."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    name = f"{VARIABLE}=".encode()
    (secret,) = [each.removeprefix(name) for each in variables if each.startswith(name)]
    return secret.decode()


def truth(checkpoint: Path) -> list[list[float]]:
    """The logprobs that transformers gives for PROMPTS."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    scores = []
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        scores.append([float(logits[i, token]) for i, token in enumerate(prompt[1:])])
    return scores


def golden_probe(checkpoint: Path) -> list[ProbePrompt]:
    scores = truth(checkpoint)
    return [ProbePrompt(token_ids=p, logprobs=s) for p, s in zip(PROMPTS, scores, strict=True)]


def manifest_of(checkpoint: Path, parent: Path | None = None) -> Manifest:
    """Writes it, as a job would that began with `parent`."""
    files = hash_files(checkpoint)
    began = None if parent is None else checkpoints.read_manifest(parent).weights_sha256
    manifest = Manifest(
        files=files,
        weights_sha256=checkpoints.weights_sha256(files),
        parent_sha256=began,
        job=None if parent is None else "job-1",
        probe=golden_probe(checkpoint),
    )
    (checkpoint / checkpoints.MANIFEST).write_text(manifest.model_dump_json())
    return manifest


def adapted(checkpoint: Path, parent: Path, seed: int, rank: int = 4) -> Path:
    """What a LoRA job leaves: an adapter of random numbers in PEFT's layout, and both merged."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(parent, checkpoint)
    weights, tensors = load_file(checkpoint / "model.safetensors"), {}
    torch.manual_seed(seed)
    lora = Lora(rank=rank, alpha=2.0 * rank)
    modules = [n for n in weights if n.endswith("_proj.weight")]
    for name in modules:
        out, inner = weights[name].shape
        a, b = 0.1 * torch.randn(rank, inner), 0.1 * torch.randn(out, rank)
        weights[name] += lora.alpha / rank * b @ a
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    folder = checkpoint / checkpoints.ADAPTER
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = peft_config(lora, str(parent), {name.split(".")[-2] for name in modules})
    (folder / CONFIG).write_text(json.dumps(config))
    manifest_of(checkpoint, parent)
    return checkpoint


def alone(checkpoint: Path, base: Path) -> Path:
    """What `adapted` makes, as the adapter alone: the weights below are the base's."""
    manifest, below = checkpoints.read_manifest(checkpoint), checkpoints.read_manifest(base)
    (checkpoint / "model.safetensors").unlink()
    files = {n: h for n, h in manifest.files.items() if n != "model.safetensors"}
    sha256 = checkpoints.weights_sha256(files, below.weights_sha256)
    over = {"base": base.name, "base_sha256": below.weights_sha256}
    made = manifest.model_copy(update={"files": files, "weights_sha256": sha256, **over})
    (checkpoint / checkpoints.MANIFEST).write_text(made.model_dump_json())
    return checkpoint


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    return max(
        abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def best_two(answer: dict[str, Any]) -> list[float]:
    """The two highest logprobs; vLLM puts the sampled token first, whatever its rank."""
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return sorted((entry["logprob"] for entry in top), reverse=True)[:2]


def greedy(checkpoint: Path, prompt: list[int], count: int) -> SampledSequence:
    """What transformers says greedily after a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    said = SampledSequence(prompt, [], [])
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + said.token_ids])).logits[0, -1].log_softmax(-1)
        said.token_ids.append(int(logits.argmax()))
        said.logprobs.append(float(logits.max()))
    return said


def true_logprob(checkpoint: Path, before: list[int], token: int) -> float:
    """What transformers gives for a token after others."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return float(model(torch.tensor([before])).logits[0, -1].log_softmax(-1)[token])


def true_next_logprob(checkpoint: Path, sample: SampledSequence) -> float:
    """What transformers gives for the first sampled token after the same prompt."""
    return true_logprob(checkpoint, sample.prompt_token_ids, sample.token_ids[0])
