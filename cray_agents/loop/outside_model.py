"""Outside models: those of other servers with OpenAI's API, evaluated beside versions of the pool.

Called by evaluation.py and rollouts.py.
"""

import os
from typing import Any

from pydantic import Field, NonNegativeFloat

from cray_agents.engines.openai_engine import engine_at
from cray_agents.errors import EngineError
from cray_agents.records import StrictRecord


class OutsideModel(StrictRecord):
    """A model of another server, with its price: what a million tokens cost, read and sampled.

    The price is in the currency of `[prices]`; 0 is free. It counts for runs from then on: those on
    record keep what they cost. `api_key`: the environment variable that holds the server's key.
    """

    model: str = Field(pattern="^[^@]+$")
    base_url: str = Field(pattern="^https?://[^@#]+$")
    prompt_price: NonNegativeFloat
    sampled_price: NonNegativeFloat
    api_key: str = "OPENAI_API_KEY"

    @property
    def id(self) -> str:
        """The name under which its runs are recorded: the same model elsewhere is another one."""
        return f"{self.base_url.partition('://')[2].rstrip('/')}#{self.model}"


class PricedEngine:
    """A ports.ChatEngine for one run: it adds up what the calls cost."""

    def __init__(self, model: OutsideModel) -> None:
        key = os.environ.get(model.api_key) or "none"  # never the platform's own
        self._engine = engine_at(model.base_url, key)
        self._model, self.cost = model, 0.0
        self.stream = self._engine.stream  # of rollouts nothing is streamed

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer as the engine does. Raises EngineError, also where no tokens are counted."""
        completion = await self._engine.chat(request)
        model, usage = self._model, completion.get("usage") or {}
        prompt, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not (isinstance(prompt, int) and isinstance(sampled, int)):
            raise EngineError(f"{model.base_url} counts no tokens (`usage`): no cost is known")
        self.cost += (prompt * model.prompt_price + sampled * model.sampled_price) / 1e6
        return completion
