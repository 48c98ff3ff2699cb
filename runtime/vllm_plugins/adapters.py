"""What vLLM's server lacks for adapters: to unload one for good.

vLLM forgets an unloaded adapter's name alone. The adapter stays in the worker until that has no
room left, and then the one that was used least goes, which may be one that is served: it would be
read from its file again, and nobody would have proven what was read. vllm_capture.py calls this in
the API server's process.
"""

import functools
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels


def unload_for_good() -> None:
    """Have the worker drop an adapter when the server does."""
    told = OpenAIServingModels.unload_lora_adapter

    @functools.wraps(told)
    async def unload_lora_adapter(models: Any, request: Any) -> Any:
        loaded = models.lora_requests.get(request.lora_name)
        answer = await told(models, request)
        if loaded is not None and request.lora_name not in models.lora_requests:
            await models.engine_client.remove_lora(loaded.lora_int_id)
        return answer

    OpenAIServingModels.unload_lora_adapter = unload_lora_adapter
