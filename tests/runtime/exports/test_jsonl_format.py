"""Whole runs: `jsonl` is read back as written, and OpenEnv's own model takes the traces."""

import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cray_agents.errors import BadInput
from cray_agents.records import Reward, Run
from cray_agents.runtime.exports.export_format import line_of
from tests.support.environments.pythons import venv
from tests.support.exports.example_runs import LINE_FORMATS, called, chat, made, of_calls

JSONL = LINE_FORMATS["jsonl"].write_run


def again(run: Run) -> Run:
    written = JSONL(run)
    assert written.losses == ()
    (record,) = written.records
    return Run.model_validate_json(line_of(run, record))


def test_every_run_comes_back_equal(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        if name not in ("surrogate", "infinite"):
            assert again(run) == run, name


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@given(output=VALUES, numbers=st.lists(st.floats(-1e308, 0.0)), text=st.text())
def test_any_values_come_back_or_are_refused(
    output: object, numbers: list[float], text: str
) -> None:
    question = {"role": "user", "content": text}
    answer = {"role": "assistant", "content": "y"}
    run = of_calls(called([question], answer, logprobs=numbers), output=output)
    try:
        assert again(run) == run
    except BadInput as error:
        fits = text.encode(errors="replace") == text.encode(errors="surrogatepass")
        assert not fits
        assert error.code == "unsupported_export"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_json_has_no_number_for_is_refused(value: float) -> None:
    run = made(messages=chat("x", "y"), rewards=[Reward(name="r", value=value)])
    with pytest.raises(BadInput, match="run-made cannot be exported: rewards") as caught:
        JSONL(run)
    assert caught.value.code == "unsupported_export"
    calls = of_calls(called(chat("x"), {"role": "assistant", "content": "y"}, logprobs=[value]))
    with pytest.raises(BadInput, match="logprobs hold an infinity or NaN"):
        JSONL(calls)


def test_a_lone_surrogate_is_refused_with_the_run_named(runs: dict[str, Run]) -> None:
    run = runs["surrogate"]
    with pytest.raises(BadInput, match="run-made") as caught:
        line_of(run, JSONL(run).records[0])
    assert caught.value.code == "unsupported_export"


OPENENV = LINE_FORMATS["openenv"].write_run
READ = """
import sys
from openenv.core.harness.training import TrainingTrace
for line in open(sys.argv[1]):
    trace = TrainingTrace.model_validate_json(line)
    print(sum(map(sum, (turn.loss_mask for turn in trace.turns))), trace.turns[0].node_id)
"""


@pytest.mark.slow
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
