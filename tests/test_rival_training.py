"""The calculator task beside TRL and SkyRL: sides read the same tokens, and one measure is for all.

SkyRL itself is not needed here: only how its adapters are measured.
"""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bench.rivals import held_out, skyrl_side
from bench.rivals.training_sides import exact, trl_trainer
from bench.rivals.trl_settings import load
from cray_agents.cli import calculator_loop


@pytest.mark.slow
def test_trl_reads_what_our_agent_reads(tmp_path: Path) -> None:
    """A demonstrated run, put together of TRL's pieces, has the tokens of its own rendering."""
    calculator_loop.make_model(tmp_path / "model", 0)
    network, tokenizer = load(tmp_path / "model")
    trainer = trl_trainer(network, tokenizer, 0, tmp_path / "trl")
    messages, _ = calculator_loop.make_loop(0, method="grpo").data.demonstrations[0]
    whole = rendered(tokenizer, messages)
    prompts, _, _ = trainer._tokenize_prompts([messages[:2]])
    call = whole[len(prompts[0]) : len(rendered(tokenizer, messages[:3])) - 1]  # not its newline
    suffix = trainer._get_tool_suffix_ids([{**messages[3], "name": "calculator"}])
    answer = tokenizer(messages[4]["content"] + tokenizer.eos_token)["input_ids"]
    assert prompts[0] + call + suffix + answer == whole[:-1]
    assert held_out.call_in(tokenizer.decode(call, skip_special_tokens=True)) == (
        {"role": "assistant", "content": "", "tool_calls": messages[2]["tool_calls"]},
        messages[3]["content"],
    )
    short, long = [messages[:2], messages[:4]]
    together = held_out.complete(network, tokenizer, [short, long])
    alone = [held_out.complete(network, tokenizer, [talk])[0] for talk in (short, long)]
    assert together == alone  # padding changes nothing
    assert exact([messages[2:]], [messages[4]["content"]]) == [1.0]
    assert exact([messages[2:4]], [messages[4]["content"]]) == [0.0]


def rendered(tokenizer: Any, messages: Any) -> list[int]:
    tools = calculator_loop.agent.tool_schemas
    ids: list[int] = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    return ids


def test_an_adapter_is_merged_as_it_would_be_applied(tmp_path: Path) -> None:
    """Logits of merged weights are those of the adapter's arithmetic beside each linear layer."""
    import torch

    calculator_loop.make_model(tmp_path / "model", 0)
    network, tokenizer = load(tmp_path / "model")
    given = tokenizer("What is 47 + 385?", return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    tensors, hooks = {}, []
    for name, layer in network.named_modules():
        if not name.endswith(("q_proj", "down_proj")):
            continue
        down, up = torch.randn(4, layer.in_features), torch.randn(layer.out_features, 4)
        tensors |= {
            f"base_model.model.{name}.lora_A.weight": down,
            f"base_model.model.{name}.lora_B.weight": up,
        }
        hooks.append(
            layer.register_forward_hook(
                lambda layer, x, y, down=down, up=up: y + 2.0 * (x[0] @ down.T) @ up.T
            )
        )
    with torch.no_grad():
        expected = network(given).logits
        for hook in hooks:
            hook.remove()
        before = network(given).logits
        skyrl_side.merge(network, adapter(tmp_path, tensors, {"r": 4, "lora_alpha": 8.0}))
        merged = network(given).logits
    assert len(hooks) == 4
    assert not torch.allclose(before, expected, atol=0.1)
    torch.testing.assert_close(merged, expected, atol=1e-3, rtol=1e-3)
    unknown = {name.replace("q_proj", "z_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(KeyError):
        skyrl_side.merge(network, adapter(tmp_path, unknown, {"r": 4, "lora_alpha": 8.0}))


def adapter(folder: Path, tensors: dict[str, Any], config: dict[str, float]) -> Path:
    """An archive as SkyRL writes it: PEFT's two files, by their whole paths."""
    from safetensors.torch import save

    files = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": save(tensors),
    }
    with tarfile.open(folder / "000001.tar.gz", "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"/tmp/made/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return folder / "000001.tar.gz"
