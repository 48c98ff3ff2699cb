"""Outside models: those of other servers with OpenAI's API, evaluated beside versions of the pool.

Called by evaluation.py and rollouts.py.
"""

import os
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field, NonNegativeFloat

from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.errors import EngineError
from cray_agents.ports import ChatEngine
from cray_agents.records import StrictRecord


class OutsideModel(StrictRecord):
    """A model of another server, with its price: what a million tokens cost, read and sampled.

    The price is in the currency of `[prices]`; 0 is free. `api_key`: the environment variable that
    holds the key.
    """

    model: str = Field(pattern="^[^@]+$")
    base_url: str = Field(pattern="^https?://")
    prompt_price: NonNegativeFloat
    sampled_price: NonNegativeFloat
    api_key: str = "OPENAI_API_KEY"

    @property
    def id(self) -> str:
        """The name under which its runs are recorded."""
        return self.model

    def engine(self) -> ChatEngine:
        """Return the engine that asks its server."""
        key = os.environ.get(self.api_key)
        return OpenAIEngine(self.base_url, api_key=key, exact_tokens=False)


class PricedEngine:
    """A ports.ChatEngine for one run: it adds up what the calls cost."""

    def __init__(self, engine: ChatEngine, model: OutsideModel) -> None:
        self._engine, self._model = engine, model
        self.cost = 0.0

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer as the engine does. Raises EngineError, also where no tokens are counted."""
        completion = await self._engine.chat(request)
        usage = completion.get("usage") or {}
        try:
            prompt, sampled = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._model.base_url} does not count its tokens (`usage`): no cost is known"
            ) from error
        spent = prompt * self._model.prompt_price + sampled * self._model.sampled_price
        self.cost += spent / 1e6
        return completion

    def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer in chunks, which are not counted."""
        return self._engine.stream(request)
