"""Adapters in vLLM: unload one from the worker too, which vLLM's server leaves out.

vLLM's server only forgets an unloaded adapter's name. The adapter stays in the worker until the
worker has no room. Then the least used adapter goes, which may be one that is served. vLLM would
read it from its file again, without a proof. capture.py calls this in the API server's process.
"""

import functools
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels


def unload_completely() -> None:
    """Make the worker drop an adapter when the server does."""
    original = OpenAIServingModels.unload_lora_adapter

    @functools.wraps(original)
    async def unload_lora_adapter(models: Any, request: Any) -> Any:
        loaded = models.lora_requests.get(request.lora_name)
        answer = await original(models, request)
        if loaded is not None and request.lora_name not in models.lora_requests:
            await models.engine_client.remove_lora(loaded.lora_int_id)
        return answer

    OpenAIServingModels.unload_lora_adapter = unload_lora_adapter
