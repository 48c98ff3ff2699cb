"""bench/bfcl: an arm's clock over kills, results that stay, the candidates, the table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.bfcl import arms, report
from bench.bfcl.clock import Clock
from bench.bfcl.prompts import CANDIDATES, ROOT, recipe

#: Rows of the README's table, and the arms that they are of.
ROWS = [("untrained", "base"), ("RFT, three seeds", "rft"),
        ("shuffled rewards, three seeds", "control"),
        ("GRPO, ours, and TRL's in float32", "grpo", "trl")]  # fmt: skip


def test_the_clock_of_a_killed_arm_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "rft-0.clock"
    first = Clock(file)
    first._before = 100.0  # it has learned for a while
    assert first.lap(0) >= 100 and first.lap(1) < 60
    # the next process sees the same iterations again, at once: their times stay
    again = Clock(file)
    assert again.seconds >= 100 and again.laps == first.laps
    assert again.lap(0) == first.laps["0"] and again.lap(1) < 60
    again.tick()
    assert json.loads(file.read_text())["seconds"] >= 100


def test_a_stage_with_a_result_is_not_run_again(tmp_path: Path, monkeypatch: Any) -> None:
    ran: list[str] = []
    monkeypatch.setattr(arms, "RESULTS", tmp_path)
    monkeypatch.setattr(arms, "STAGES", {"base": lambda: ran.append("base")})
    arms.main(["base"])
    arms._write("base", arm="base", right={})
    arms.main(["base"])
    assert ran == ["base"]
    assert json.loads((tmp_path / "base.json").read_text())["versions"]["torch"]
    with pytest.raises(SystemExit, match="no stage rft-9 of bfcl; there are base"):
        arms.main(["rft-9"])
    with pytest.raises(SystemExit, match="run the stage prompt first"):
        arms._needed("prompt")


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates_read_what_they_show(name: str) -> None:
    prompt = CANDIDATES[name]
    said = [each["content"] for each in prompt.shown if each["role"] == "assistant"]
    calls = [recipe.EXAMPLES[number][2] for number in prompt.examples]
    assert [prompt.read(each) for each in said] == [[call] if call else [] for call in calls]
    assert prompt.read("I do not know.") is None and prompt.read("[1]") is None


def test_the_table_and_the_picture(tmp_path: Path, capsys: Any) -> None:
    def arm(name: str, marks: str, **more: Any) -> None:
        text = json.dumps({"arm": name, "right": {"simple_python": marks}, **more})
        (tmp_path / f"{name}.json").write_text(text)

    arm("base", "1000000000")
    decided = [{"promoted": n != 1, "holdout_success": n / 10} for n in range(3)]
    arm("rft-0", "1111000000", seed=0, seconds=600, iterations=decided)
    arm("rft-1", "1111110000", seed=1, seconds=660)
    told = {"promoted": False, "runs": 512}
    arm("examples-0", "1000000000", seed=0, iterations=[{}, told | {"trials": 224}])
    arm("examples-rft-0", "1000000000", seed=0, iterations=[{}, told, told | {"runs": 1024}])
    arm("dspy-0", "1000000000", seed=0, calls=567)
    report.publish(tmp_path, tmp_path / "bfcl.svg")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| SmolLM2-135M-Instruct | 0.100 (0.02 to 0.40) | 0 |")
    assert lines[3].startswith("| cray-agents, rft, 2 seeds | 0.500 (0.24 to 0.76), +0.400 ± 0.28")
    assert lines[3].endswith("| 10, 11 | 1 of 2, - | -, - |")
    assert lines[4] == "| seed 0 | 0.400 | | | |"
    calls = [line.split(" | ")[-1] for line in lines[6:9]]
    assert calls == ["736 |", "at most 768 |", "567 |"]
    drawn = (tmp_path / "bfcl.svg").read_text()
    points = re.findall(r'cy="(\S+)" r="3.5" fill="(\S+)" s', drawn)
    assert points == [("276.0", "#0969da"), ("228.0", "white"), ("180.0", "#0969da")]
    kept, readme = report._arms(arms.RESULTS), (ROOT / "README.md").read_text()
    assert report.draw(kept) == (ROOT / "docs" / "bfcl.svg").read_text()
    for name, *kinds in ROWS:
        row = [name]
        for test in ("simple_python", "multiple", "irrelevance"):
            marks = [[run["right"][test] for run in kept[kind]] for kind in kinds]
            row.append(", ".join(dict.fromkeys(f"{report.interval(m)[0]:.0%}" for m in marks)))
        minutes = sorted(round(run.get("seconds", 0) / 60) for kind in kinds for run in kept[kind])
        assert "| " + " | ".join([*row, ", ".join(map(str, minutes))]).replace("%", " %") in readme
    (tmp_path / "base.json").unlink()
    with pytest.raises(SystemExit, match=r"has no base\.json yet"):
        report.publish(tmp_path, tmp_path / "bfcl.svg")
