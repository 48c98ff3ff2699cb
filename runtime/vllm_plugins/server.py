"""Replica process: run vLLM's API server so that all of its processes end with their parent.

    python -m cray_agents.runtime.vllm_plugins.server PARENT_PID [vLLM's own flags...]

runtime/pool/vllm_process.py starts it. Plain vLLM leaves its engine core running forever
when the API server is killed. Here every process asks the kernel to end it with its parent.

With `VLLM_WORKER_MULTIPROC_METHOD=fork` in the environment the engine core is forked from the API
server. That has imported everything by then, so a start takes 9 s instead of 16. vLLM's CPU
platform overwrites the variable, so vLLM's own cache of its environment pins it first. Forking is
safe on CPU because the API server computes nothing: no OpenMP thread exists at that time.

At a port it listens by a socket that its parent has bound and keeps, over this process's death too:
so no other user's process gets the port. vLLM's sockets and files are for its own user alone.

template_time.py interrupts a chat template that loops, so that only its own request fails.
"""

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import parent_process
from types import ModuleType
from typing import Any

from cray_agents.processes import die_with_parent, exit_at_once, hide, importing_much
from cray_agents.runtime.vllm_plugins.template_time import limit_all_templates
from cray_agents.runtime.vllm_plugins.wire import MARKS, SOCKET

#: Packages that vLLM imports, by the flags without which it does not use them on CPUs.
_UNUSED = {"--otlp": "opentelemetry", "--trust-remote-code": "accelerate"}


def main() -> None:
    """Serve until a signal ends it. `argv[1]` is the parent's pid; vLLM gets the rest."""
    began = time.monotonic()
    die_with_parent(int(sys.argv.pop(1)))
    os.umask(0o077)
    pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: die_with_parent(pid))

    with importing_much():
        from uvicorn.config import HTTP_PROTOCOLS

        if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork":
            _postpone_inductor()
            hide(*(name for flag, name in _UNUSED.items() if flag not in " ".join(sys.argv)))
            from vllm import envs

            envs.enable_envs_cache()
            from vllm.model_executor.models import registry

            # else it starts another process for each kind of model, which imports all anew
            registry._run_in_subprocess = lambda work: work()
        limit_all_templates()
        _limit_tokenizing()
        # with vLLM's own choice, its bounds of heads have no effect
        HTTP_PROTOCOLS["auto"] = "cray_agents.runtime.vllm_plugins.heads:BoundedHeads"
        from vllm.entrypoints.launchers.api_server.entry import main as serve

    os.environ[MARKS] = json.dumps({"begun": began, "imported": time.monotonic()})
    if handle := os.environ.get(SOCKET):  # a bound one; --port alone would be refused: it is taken
        from vllm.entrypoints.launchers import launcher

        launcher.create_server_socket = lambda *_, **__: socket.socket(fileno=int(handle))
    if "--headless" in sys.argv:
        _serve_headless()
    else:
        serve()


def _postpone_inductor() -> None:
    """Let vLLM's patches of Inductor be imported when they are asked for: a sixth of its import.

    Our `TORCHDYNAMO_DISABLE` lets nothing be compiled on CPUs.
    """

    class Postponed(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # what looks through all modules does not ask for it
                raise AttributeError(name)
            sys.modules.pop(self.__name__)
            return getattr(importlib.import_module(self.__name__), name)

    sys.modules.setdefault("vllm.env_override", Postponed("vllm.env_override"))


def _limit_tokenizing() -> None:
    """Refuse to turn more into tokens, or back, than the model reads: as vLLM's other routes do."""
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    for kind in (TokenizeCompletionRequest, TokenizeChatRequest, DetokenizeRequest):
        original = kind.build_tok_params

        def build(request: Any, model: Any, original: Callable[..., Any] = original) -> Any:
            return replace(original(request, model), max_total_tokens=model.max_model_len)

        kind.build_tok_params = build


def _serve_headless() -> None:
    """Run this node's share of a server whose first node is another one. It was never run."""
    from vllm.entrypoints.cli.serve import make_arg_parser, run_headless
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
    exit_at_once(0)
elif __name__ == "__mp_main__":  # a spawned child of vLLM: multiprocessing imports this anew
    _parent = parent_process()
    if _parent is not None and _parent.pid is not None:
        die_with_parent(_parent.pid)
