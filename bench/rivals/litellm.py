"""LiteLLM's proxy in front of an OpenAI-compatible server, for `make bench` to state beside ours.

It runs from an environment of its own (requirements/environment.sh litellm). Set as fast as it can
fairly be: one worker, as the gateway is one process; of its servers and its providers for such a
target the fastest that were tried (granian; `hosted_vllm`: a quarter less CPU than `openai` on
streams); no database, callbacks, logging of streams or debug output; no keys, which it
allows for local use only and so do we (it listens on the loopback, for as long as the benchmark
runs). The table of prices is read from the package, not fetched, and nothing of our environment is
passed on. Called by gateway.py and vllm_gateway.py.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.rivals.server_process import answers, foreign, free_port, program, wait_until

RETRIES = 2  # a kept connection that vLLM ended meanwhile would fail its request
START = 120.0  # seconds it may take to answer: its imports alone take several
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched when the program starts
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",  # no .env files
}


@contextmanager
def litellm_proxy(
    target_url: str, model: str, python: Path, headers: Mapping[str, str], workers: int = 1
) -> Iterator[str]:
    """A proxy on a free port of the loopback; gives its URL, such as http://127.0.0.1:4000.

    `target_url` is the server's root, without /v1, and `model` its name there and here; `python`
    the interpreter of LiteLLM's environment; `headers` are sent to the server with each request.
    Raises RuntimeError with the end of its log if it ends, or does not answer in START seconds.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(json.dumps(_config(target_url, model, headers)))  # JSON is YAML
        command = ["--config", config, "--host", "127.0.0.1", "--port", port, "--run_granian"]
        argv = [python.parent / "litellm", *command, "--num_workers", workers]
        with program(argv, folder, foreign(folder, **ENVIRONMENT)) as process:
            wait_until(lambda: answers(f"{url}/health/liveliness"), process, folder, START)
            yield url


def _config(target_url: str, model: str, headers: Mapping[str, str]) -> dict[str, object]:
    server = {
        "model": f"hosted_vllm/{model}",
        "api_base": f"{target_url.rstrip('/')}/v1",
        "api_key": "none",
        "extra_headers": dict(headers),
    }
    return {
        "model_list": [{"model_name": model, "litellm_params": server}],
        "litellm_settings": {
            "callbacks": [],
            "num_retries": 0,
            "request_timeout": 600,
            "set_verbose": False,
            "telemetry": False,
            "disable_streaming_logging": True,
        },
        "router_settings": {"num_retries": RETRIES, "disable_cooldowns": True},
        "general_settings": {
            "disable_spend_logs": True,
            "disable_error_logs": True,
            "dangerously_permit_weak_or_unset_master_key": True,  # see above
        },
    }
