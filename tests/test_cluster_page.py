"""docs/cluster.md, "From nothing to a loop", followed command by command on a Slurm of two nodes.

vLLM serves in one job, Megatron-core trains in another. Only as `make soak ARGS=slurm`.
"""

import os
import shlex
import tomllib
from pathlib import Path

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from tests.support.command_line import cli
from tests.test_docs import blocks

PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
TEXT = PAGE.read_text().partition("\n## Train on a cluster")[0]
FOLLOWED = os.environ.get("CRAY_TEST_PAGE") == "1"


@pytest.mark.slurm
@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FOLLOWED, reason="takes a quarter of an hour: make soak ARGS=slurm")
def test_the_page_leads_to_a_decision(tmp_path: Path) -> None:
    page, shared = tmp_path / "page.md", tmp_path / "me"
    page.write_text(TEXT.replace("/shared/me", str(shared)))
    shared.mkdir()
    [settings] = blocks(page, "toml")
    (shared / "cray-agents.toml").write_text(settings)
    cluster = PrivateCluster(tmp_path / "slurm", nodes=2, cpus=2, gpus=[])
    cluster.start()
    variables = {"CRAY_AGENTS_PORT": "0", "SLURM_CONF": str(cluster.configuration)}
    said: dict[str, str] = {}
    try:
        for line in "".join(blocks(page, "")).splitlines():
            program, *words = shlex.split(line)
            if program == "pip":  # what is installed here is upgraded by test_packages.py
                continue
            done = cli(*words, cwd=shared, **variables)
            assert done.returncode == 0 or words[0] == "run", f"{line}\n{done.stdout}{done.stderr}"
            said[words[0]] = done.stdout
        home = Home(Path(tomllib.loads(settings)["home"]))
        [_, decided] = Registry(home).history("default")[-2:]
        assert decided.kind in ("promoted", "rejected") and decided.version == 2
        assert "succeeded" in said["jobs"] and "serving" in said["status"]
        assert "default@2" in said["models"]
    finally:
        cli("down", cwd=shared, **variables)
        cluster.close()
