"""docs/cluster.md, "From nothing to a loop", followed command by command on a Slurm of two nodes.

vLLM serves in one job, Megatron-core trains in another, of what an environment of its own has.
Only as `make soak ARGS=slurm`.
"""

import os
from pathlib import Path

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from tests.test_packages import OWN, PageReader, packaged

PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
TEXT = PAGE.read_text().partition("\n## Train on a cluster")[0]
FOLLOWED = os.environ.get("CRAY_TEST_PAGE") == "1"


@pytest.mark.slurm
@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FOLLOWED, reason="takes a quarter of an hour: make soak ARGS=slurm")
def test_the_page_leads_to_a_decision(tmp_path: Path) -> None:
    shared = tmp_path / "me"
    shared.mkdir()
    (tmp_path / "packages").mkdir()
    cluster = PrivateCluster(tmp_path / "slurm", nodes=2, cpus=2, gpus=[])
    slurm = {"SLURM_CONF": str(cluster.configuration)}
    reader = PageReader(shared, packaged(tmp_path / "packages"), OWN, "pip", **slurm)
    cluster.start()
    try:
        said = reader.follow(TEXT.replace("/shared/me", str(shared)))
    finally:
        cluster.close()
    [_, decided] = Registry(Home(shared / "cray-agents")).history("default")[-2:]
    assert decided.kind in ("promoted", "rejected") and decided.version == 2
    assert "succeeded" in said["jobs"] and "serving" in said["status"]
    assert "default@2" in said["models"]
