"""Requests on Tinker's wire that are JSON: the fields that are read here, and their limits."""

from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from cray_agents.records import Record

MOST_SAMPLES = 1024  # of one request
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Sequence = Annotated[int, Field(ge=1, lt=2**31)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Real = Annotated[float, Field(allow_inf_nan=False)]


class LoraConfig(Record):
    """Adapters of a script's model."""

    rank: int = Field(gt=0, lt=2**16)
    seed: Whole | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Record):
    """The kind of a script's optimizer."""

    type: str = "adamw"


class NewModel(Record):
    """A script's new model; its id is made of its session and its number there."""

    session_id: Text
    model_seq_id: Count
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None


class CreateModel(NewModel):
    """A new model over one that is served; without adapters all weights are trained."""

    base_model: Text
    lora_config: LoraConfig | None = None


class LoadWeights(NewModel):
    """A new model over saved weights."""

    path: Text
    optimizer: bool = False


class ModelRequest(Record):
    """A request about a model."""

    model_id: Text


class NumberedRequest(ModelRequest):
    """A request to a model, counted from 1."""

    seq_id: Sequence


class AdamParams(Record):
    """A step of Adam, with the client's defaults, but for a rate that it leaves out: the model's.

    A norm of 0 is no clipping.
    """

    learning_rate: Real | None = Field(None, ge=0)
    beta1: Real = Field(0.9, ge=0, lt=1)
    beta2: Real = Field(0.95, ge=0, lt=1)
    eps: Real = Field(1e-12, gt=0)
    weight_decay: Real = Field(0.0, ge=0)
    grad_clip_norm: Real = Field(0.0, ge=0)


class StepRequest(NumberedRequest):
    """A request for an optimizer step."""

    adam_params: AdamParams


class SaveRequest(NumberedRequest):
    """A request to save weights: under a name, or for one sampler."""

    path: Text | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot"] = "snapshot"
    user_metadata: dict[str, Any] | None = None


class NewSampler(Record):
    """A sampler of a model that is served, or of saved weights."""

    session_id: Text
    sampling_session_seq_id: Count
    base_model: Text | None = None
    model_path: Text | None = None


class InputChunk(Record):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[Count], FailFast()]


class ModelInput(Record):
    """A prompt, in parts."""

    chunks: list[InputChunk] = Field(min_length=1)

    @property
    def tokens(self) -> list[int]:
        """The tokens of all parts."""
        return [*chain.from_iterable(chunk.tokens for chunk in self.chunks)]


class SamplingParams(Record):
    """The way to sample; the engine checks the numbers."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: Real = 1.0
    top_k: int = -1
    top_p: Real = 1.0


class NotServed(Record):
    """The fields of a request to sample that are not served, and refused if they are set."""

    topk_prompt_logprobs: Any = None
    topk_sample_logprobs: Any = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: Any = None
    prompt_logprobs_last_n: Any = None
    record_stability_info: Any = None


class SampleRequest(NotServed):
    """A request to sample. `prompt_logprobs` asks for the log-probabilities of the prompt, too."""

    sampling_session_id: Text
    seq_id: Whole
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    prompt_logprobs: bool | None = None
