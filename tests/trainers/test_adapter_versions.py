"""Versions of LoRA jobs are adapters over a base: published, gone on with, merged, verified."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cray_agents.runtime import fsck
from cray_agents.runtime.registry import adapters, checkpoints

pytestmark = pytest.mark.megatron

LORA = {"rank": 4, "alpha": 8.0}
STILL = {"learning_rate": 0, "min_learning_rate": 0, "steps": 1}  # publishes what it read


def tensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(path))


def equal(one: Path, other: Path) -> bool:
    import torch

    ours, theirs = tensors(one), tensors(other)
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_a_kill_before_an_adapter_is_published_leaves_no_half_version(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank dies when the adapter is written, and only the manifest and the rename are left."""
    lab.dataset()
    name, _ = checkpoints.take_in(lab.home, lab.models("qwen3"))
    spec = lab.spec(lab.home.checkpoint(name), hyper={"steps": 2, "lora": LORA})
    version = lab.home.checkpoint(spec.id)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoints, "hash_files", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        job = lab.start(spec)
        assert job.wait() != 0, job.log
    (draft,) = version.parent.glob(f".{spec.id}.*")
    assert (draft / checkpoints.ADAPTER / adapters.WEIGHTS).stat().st_size
    assert not version.exists() and name in {path.name for path in version.parent.iterdir()}
    lab.run(spec)
    assert checkpoints.verify(version).base == name
    assert list(fsck.check(lab.home)) == []


@pytest.mark.parametrize("backend", ["megatron", "transformers"])
def test_a_version_is_its_adapter_and_jobs_go_on_with_it_or_merge_it(
    lab: Any, backend: str
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lab.dataset()
    layout = {"tensor": 2} if backend == "megatron" else {}
    name, _ = checkpoints.take_in(lab.home, lab.models("qwen3"))
    base = lab.home.checkpoint(name)

    def trained(parent: Path, **hyper: Any) -> Path:
        spec = lab.spec(parent, hyper={"backend": backend, **hyper}, layout=layout)
        lab.run(spec)
        made: Path = lab.home.checkpoint(spec.id)
        return made

    learning = {"learning_rate": 1e-2, "lora": LORA}
    version = trained(base, steps=3, **learning)
    manifest = checkpoints.verify(version)
    assert (manifest.base, manifest.base_sha256) == (name, manifest.parent_sha256)
    assert not list(version.glob("*.safetensors"))
    ids = torch.tensor([manifest.probe[0].token_ids])

    def logprobs(model: Any) -> Any:
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0].float().log_softmax(-1)
        return logits.gather(1, ids[0, 1:, None])[:, 0]

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    by_peft = logprobs(PeftModel.from_pretrained(load(base), version / checkpoints.ADAPTER))
    told = torch.tensor(manifest.probe[0].logprobs)
    torch.testing.assert_close(by_peft, told, atol=1e-4, rtol=0)
    assert (by_peft - logprobs(load(base))).abs().max() > 1e-2, "it has learnt nothing"
    (version / ".merged.draft_killed").mkdir()
    merged = adapters.merge(version)
    assert not list(version.glob(".*"))
    torch.testing.assert_close(logprobs(load(merged)), by_peft, atol=1e-4, rtol=0)
    checkpoints.verify(merged)

    further = trained(version, **STILL, lora=LORA)
    place = f"{checkpoints.ADAPTER}/{adapters.WEIGHTS}"
    assert equal(further / place, version / place)
    assert checkpoints.read_manifest(further).base == name, "one adapter over one base"
    for lora in (None, {"rank": 2}):  # nothing of either can be beside the base
        whole = trained(version, **STILL, lora=lora)
        assert equal(whole / "model.safetensors", merged / "model.safetensors")
        assert checkpoints.read_manifest(whole).base is None
        assert not (whole / checkpoints.ADAPTER).exists()
    assert list(fsck.check(lab.home)) == []
