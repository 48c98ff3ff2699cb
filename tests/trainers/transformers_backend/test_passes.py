"""Packing, family by family: each sequence must equal itself alone, whatever the choice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cray_agents.trainers.models.transformers_backend import packed_attention
from cray_agents.trainers.models.transformers_backend.causal_model import (
    TransformersModel,
    _recomputed_modules,
    _test,
)
from cray_agents.trainers.models.transformers_backend.packed_attention import PACKED, PackedMask
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from cray_agents.trainers.models.transformers_backend.passes import (
    Packing,
    Passes,
    _difference,
    _sequences,
    choose_packing,
    cut_layers,
    untrained,
)
from tests.support.trainers.tiny_families import FAMILIES, FURTHER

VOCAB = 500
WHOLE = {"opt"}  # whose head calls a part of its body
OWN = "packed: attention within each sequence"
SPLIT = f"{OWN}, mixers once per sequence"
#: what each family needs: nothing, its masks by layer, sinks, softcaps, chunks, mixers apart
CHOICES = {
    "llama": OWN,
    "qwen3": OWN,
    "qwen3_moe": OWN,
    "gemma2": OWN,
    "gemma3_text": OWN,
    "gpt_oss": OWN,
    "llama4_text": OWN,
    "afmoe": OWN,
    "deepseek_v3": OWN,
    "qwen3_next": SPLIT,
    "lfm2": SPLIT,
    "falcon_h1": SPLIT,
    "zaya": SPLIT,
    "deepseek_v4": "rows padded on the right",
}
PACKING = [family for family, choice in CHOICES.items() if choice.startswith(OWN)]


def network(family: str, config: Any = None) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = config or (FAMILIES | FURTHER)[family]()
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("family", CHOICES)
def test_the_fastest_way_that_is_right_is_chosen(family: str) -> None:
    packing = choose_packing(network(family), VOCAB)
    assert packing.text == CHOICES[family], packing
    assert packing.difference < 1e-4
    assert bool(packing.rejected) == (packing.shape == "rows")


@pytest.mark.parametrize(
    ("family", "kept"), [("llama", 2), ("gpt_oss", 2), ("gemma3_text", 6), ("deepseek_v3", 2)]
)
def test_first_layers_of_every_kind_tell_of_all(family: str, kept: int) -> None:
    """Windows, dense feed-forward layers before experts: a kind is more than a class."""
    config = FAMILIES[family]()
    config.num_hidden_layers, config.layer_types = 12, None
    deep = network(family, type(config)(**config.to_dict()))
    reached = choose_packing(deep, VOCAB)
    cut_layers(deep)
    assert len(deep.model.layers) == kept
    assert choose_packing(deep, VOCAB).text == reached.text == CHOICES[family]


def test_mixers_of_layers_that_were_cut_off_run_once_per_sequence(tmp_path: Path) -> None:
    config = FAMILIES["qwen3_next"]()
    config.num_hidden_layers = 8
    config.layer_types = config.layer_types * 4
    network("qwen3_next", config).save_pretrained(tmp_path)
    source = ParentFiles(tmp_path)
    packings = [_test(source, VOCAB, cut=cut) for cut in (True, False)]
    assert packings[0][1:] == packings[1][1:]
    assert packings[0][0]["split"] == packings[1][0]["split"]
    assert len(packings[0][0]["split"]) == config.layer_types.count("linear_attention") > 1


def test_a_network_is_used_as_it_was_tested() -> None:
    """The mixers of a first Passes are not split once more by another."""
    made = network("zaya")  # whose mixers are given masks
    packing = choose_packing(made, VOCAB)
    passes, lengths = Passes(made), [5, 11, 3]  # the test packs others
    tokens = torch.arange(sum(lengths)) * 7 % VOCAB
    passes.use(packing)
    together = passes.logits(tokens, lengths)
    passes.use(Packing("alone", "eager"))
    alone = passes.logits(tokens, lengths)
    assert (together - alone).abs().max() < 1e-4 * alone.abs().max()


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_mixers_that_run_over_all_sequences_are_noticed(family: str) -> None:
    """A first sequence's state reaches the second: what the test is there to find."""
    made = network(family)
    passes = Passes(made)
    passes.use(Packing("alone", "eager"))
    tokens, others, lengths = _sequences(made.config, VOCAB)
    truth = passes.logits(tokens, lengths)
    passes.use(Packing("packed", PACKED))
    leak = _difference(passes, tokens, others, lengths, truth) / float(truth.abs().max())
    assert leak > 1e-3


def test_gradients_are_those_of_the_sequences_alone() -> None:
    made = network("gpt_oss")
    tokens, _, lengths = _sequences(made.config, VOCAB)
    passes, found = Passes(made), []
    rows = torch.arange(0, len(tokens), 3)
    for packing in (Packing("alone", "eager"), Packing("packed", PACKED), Packing("rows", "eager")):
        passes.use(packing)
        made.zero_grad()
        logits = passes.logits(tokens, lengths, rows)
        torch.nn.functional.cross_entropy(logits, tokens[rows]).backward()
        found.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]))
    for other in found[1:]:
        assert (other - found[0]).abs().max() < 1e-4 * found[0].abs().max()


class CpuKernel:
    """torch's flash attention for CPUs in the place of that for GPUs: one sequence at a time."""

    def __init__(self, mask: PackedMask, groups: int) -> None:
        self.mask, self.groups = mask, groups

    def each(self, *tensors: torch.Tensor) -> Any:
        """Each sequence's tensors [1, heads, tokens, size], with keys for each query's head."""
        for number, mine in enumerate(
            zip(*(t.split(self.mask.lengths) for t in tensors), strict=True)
        ):
            length = self.mask.lengths[number]
            seen = self.mask.of_length(length, torch.device("cpu"))
            bias = None if seen is None else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            query, *both = (t.transpose(0, 1)[None] for t in mine)
            both = [t.repeat_interleave(self.groups, 1) for t in both[:2]] + both[2:]
            yield [query, *both], {"is_causal": seen is None, "attn_mask": bias, "scale": 0.3}

    def attend(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = [kernel(*given, **options) for given, options in self.each(*tensors)]
        outs, sums = zip(*found, strict=True)
        return torch.cat(outs, 2)[0].transpose(0, 1), torch.cat(sums, 2)[0]

    def gradients(self, gradient: torch.Tensor, *saved: torch.Tensor) -> Any:
        *tensors, sums = saved
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = []
        rows = zip(self.each(*tensors, gradient), sums.split(self.mask.lengths, 1), strict=True)
        for ((*given, above), options), mine in rows:
            causal = options.pop("is_causal")
            found.append(kernel(above, *given, mine[None], 0.0, causal, **options))
        dq, *both = (torch.cat(each, 2)[0].transpose(0, 1) for each in zip(*found, strict=True))
        return dq, *(t.unflatten(1, (-1, self.groups)).sum(2) for t in both)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_by_a_kernels_log_sum_exp_are_those_of_explicit_scores(window: int | None) -> None:
    lengths, found = (7, 1, 12), []
    torch.manual_seed(3)
    shapes = [(20, 4, 16), (20, 2, 16), (20, 2, 16), (4,)]
    drawn = [torch.randn(shape) for shape in shapes]
    mask = PackedMask(lengths, window)
    for by_kernel in (True, False):
        given = [t.clone().requires_grad_() for t in drawn]
        if by_kernel:
            sinks = packed_attention.AttentionWithSinks
            out: Any = sinks.apply(*given, CpuKernel(mask, 2))  # type: ignore[no-untyped-call]
        else:
            q, k, v = (t.transpose(0, 1)[None] for t in given[:3])
            network = torch.nn.Module()
            out = packed_attention.attend(network, q, k, v, mask, scaling=0.3, s_aux=given[3])[0][0]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found.append([out.detach(), *(t.grad for t in given)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.megatron
@pytest.mark.parametrize("family", [*PACKING, *WHOLE, "granite", "cohere", "gpt2", "mamba2"])
def test_losses_in_chunks_are_those_of_all_logits(family: str) -> None:
    """Scaled and bounded logits too, by the family's own code; only packed rows have chunks."""
    config = (FAMILIES | FURTHER)[family]()
    made, lengths, device = network(family, config), [9, 5, 12], torch.device("cpu")
    packed = Packing("packed", PACKED)
    model = TransformersModel(
        made, None, packed, 0.7, device, always_reached=True, recompute=False, vocab=VOCAB
    )
    tokens = torch.arange(26)[None] * 7 % VOCAB
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    model.head.rows, model.head.want_entropy = torch.arange(1, 26, 2), True
    labels = tokens[:, model.head.rows] + 1
    given = SimpleNamespace(lengths=torch.tensor(lengths))
    found = []
    for model.head.most_logits in (10**9, 5 * VOCAB):
        made.zero_grad()
        losses = model(tokens, places, labels=labels, packed_seq_params=given)
        found.append([losses.detach(), model.head.entropy])
        (losses * torch.linspace(-1, 1, losses.numel())).sum().backward()
        found[-1] += [p.grad.clone() for p in made.parameters() if p.grad is not None]
    states = model._passes.states(tokens[0], lengths, model.head.rows, places[0])
    assert (states is None) == (family in WHOLE)
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2e-5 * max(1.0, float(theirs.abs().max()))


def test_layers_that_are_computed_again_drop_nothing() -> None:
    made = network("opt")
    made.config.dropout = 0.5
    for layer in made.model.decoder.layers:
        layer.dropout = 0.5
    tokens = torch.arange(20)[None]

    def gradients() -> torch.Tensor:
        made.zero_grad()
        torch.nn.functional.cross_entropy(made(tokens).logits[0], tokens[0]).backward()
        return torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None])

    truth = gradients()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    for module in _recomputed_modules(made):
        module.training = True
    calls: list[int] = []
    made.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(gradients(), truth)
    assert len(calls) == 2 and made.model.decoder.layers[0].training


def test_weights_that_no_batch_reaches_are_named_and_idle_experts_are_not() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
            self.indexer = torch.nn.Linear(2, 2)

    made = Two()
    never, sometimes = untrained(
        made,
        lambda: made.experts[1](torch.ones(1, 2)).sum(),
        [name for name, _ in made.named_parameters()],
    )
    assert never == ["indexer.weight", "indexer.bias"]
    assert sometimes == [f"experts.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias")]
