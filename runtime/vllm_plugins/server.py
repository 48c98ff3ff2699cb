"""The process of a replica: vLLM's API server, started so that nothing of it can be left behind.

    python -m cray_agents.runtime.vllm_plugins.server PARENT_PID [vLLM's own flags...]

replica.py starts it. vLLM alone leaves its engine core running for ever when the API server is
killed; here every process of it asks the kernel to die with its parent.

With `VLLM_WORKER_MULTIPROC_METHOD=fork` in the environment the engine core is forked from the API
server, which has imported everything by then: 9 s to start instead of 16. vLLM's CPU platform
overwrites that variable, so it is pinned first, by vLLM's own cache of its environment. It is safe
on CPU because the API server computes nothing: no OpenMP thread exists when it forks.

A chat template that loops is interrupted (template_time.py), so that it fails its own request only.
"""

import os
import sys
from multiprocessing import parent_process

from cray_agents.processes import die_with_parent
from cray_agents.runtime.vllm_plugins.template_time import limit_all_templates


def main() -> None:
    """Serve until told to stop. `argv[1]` is the parent's pid, the rest is for vLLM."""
    die_with_parent(int(sys.argv.pop(1)))
    pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: die_with_parent(pid))

    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork":
        from vllm import envs

        envs.enable_envs_cache()
    limit_all_templates()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned child of vLLM: multiprocessing imports this anew
    _parent = parent_process()
    if _parent is not None and _parent.pid is not None:
        die_with_parent(_parent.pid)
