"""docs/cluster.md, "From nothing to a loop", followed command by command on a Slurm of two nodes.

vLLM serves in one job, Megatron-core trains in another, of what an environment of its own has.
Only as `make soak ARGS=slurm`.
"""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from tests.runtime.test_private_cluster import PLATFORM
from tests.test_packages import OWN, ROOT, PageReader, packaged

TEXT = (ROOT / "docs" / "cluster.md").read_text().partition("\n## Train on a cluster")[0]
FOLLOWED = os.environ.get("CRAY_TEST_PAGE") == "1"


@pytest.mark.slurm
@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FOLLOWED, reason="takes a quarter of an hour: make soak ARGS=slurm")
@pytest.mark.parametrize("user", ["", "nobody"])
def test_the_page_leads_to_a_decision(tmp_path: Path, user: str) -> None:
    """The Slurm is the user's, too: root has no part in it."""
    shared = Path(tempfile.mkdtemp(prefix="cray-page-"))  # pytest's are their owner's alone
    slurm = {"SLURM_CONF": f"{shared}/slurm/slurm.conf"}
    reader = PageReader(shared, packaged(tmp_path / "packages"), OWN, "pip", user, **slurm)
    code = {"PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"}
    with subprocess.Popen(
        [shared / "venv/bin/python", "-c", PLATFORM, shared / "slurm"], **reader.who, cwd=shared,
        env=reader.variables | code, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as cluster:  # fmt: skip
        assert cluster.stdout and cluster.stdout.readline() == b"up\n"
        said = reader.follow(TEXT.replace("/shared/me", str(shared)))
    [_, decided] = Registry(Home(shared / "cray-agents")).history("default")[-2:]
    shutil.rmtree(shared)
    assert decided.kind in ("promoted", "rejected") and decided.version == 2
    assert "succeeded" in said["jobs"] and "serving" in said["status"]
    assert "default@2" in said["models"]
