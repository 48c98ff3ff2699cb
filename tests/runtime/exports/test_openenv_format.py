"""`openenv`: traces that OpenEnv's own strict model takes, with the tokens of every call."""

import subprocess
from pathlib import Path

import pytest

from cray_agents.errors import BadInput
from cray_agents.records import Run
from cray_agents.runtime.exports.export_format import line_of
from cray_agents.runtime.exports.formats.catalog import LINE_FORMATS
from tests.support.environments.pythons import venv

OPENENV = LINE_FORMATS["openenv"].write_run
READ = """
import sys
from openenv.core.harness.training import TrainingTrace
for line in open(sys.argv[1]):
    trace = TrainingTrace.model_validate_json(line)
    print(sum(map(sum, (turn.loss_mask for turn in trace.turns))), trace.turns[0].node_id)
"""


@pytest.mark.timeout(2400)  # the venv may have to be made, once
def test_openenv_reads_every_run_that_has_tokens(runs: dict[str, Run], tmp_path: Path) -> None:
    lines, expected = [], []
    for name, run in runs.items():
        whole = run.calls and all(c.prompt_token_ids and c.token_ids for c in run.calls)
        if name in ("surrogate", "infinite"):
            continue
        if not whole:
            with pytest.raises(BadInput, match="missing"):
                OPENENV(run)
            continue
        (record,) = OPENENV(run).records
        lines.append(line_of(run, record))
        expected.append(f"{sum(len(call.token_ids) for call in run.calls)} {run.calls[0].id}")
    assert len(lines) > 3
    file = tmp_path / "traces.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    python = venv("openenv") / "bin" / "python"
    done = subprocess.run([python, "-c", READ, file], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == expected
