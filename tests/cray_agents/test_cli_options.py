"""Root options, and the grammar of `--where`."""

import json
import time
from pathlib import Path

import pytest

from cray_agents.cli.options import split_root_options
from cray_agents.cli.where import FIELDS, parse_where
from cray_agents.errors import BadInput
from tests.support.command_line import cli


def test_root_options_stand_anywhere(tmp_path: Path) -> None:
    (tmp_path / "root" / "segments").mkdir(parents=True)
    for words in (
        ("--home", "root", "--json", "runs", "list"),
        ("runs", "--home=root", "list", "--json"),
        ("runs", "list", "--json", "--home", "root"),
    ):
        done = cli(*words, cwd=tmp_path)
        assert (done.returncode, json.loads(done.stdout)) == (0, []), done.stderr
    assert split_root_options(["a", "--", "--json"]) == ([], ["a", "--", "--json"])


def test_root_options_without_an_effect_are_refused(tmp_path: Path) -> None:
    for words, option in ((("down", "--json"), "--json"), (("runs", "list", "--url", "u"), "--url"),
                          (("status", "--url", "u"), "--url")):  # fmt: skip
        done = cli(*words, cwd=tmp_path)
        assert done.returncode == 2 and option in done.stderr
    assert "--home needs a value" in cli("status", "--home", cwd=tmp_path).stderr


def test_terms_choose_runs() -> None:
    chosen = parse_where('loop=support reward<1  tag!=judge tag=a tag=b text="two words" turns>2')
    assert chosen.model_dump(exclude_defaults=True) == {
        "loop": "support",
        "max_reward": 0.9999999999999999,
        "tags": ["a", "b"],
        "without_tags": ["judge"],
        "text": "two words",
        "min_turns": 3,
    }
    assert parse_where("iteration=2,3").iterations == [2, 3]
    assert parse_where("reward=1 tokens<=9").model_dump(exclude_defaults=True) == {
        "min_reward": 1.0, "max_reward": 1.0, "max_tokens": 9,
    }  # fmt: skip
    assert parse_where("since=2h").since == pytest.approx(time.time() - 7200, abs=60)
    assert parse_where(None) == parse_where(" ")


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("lop=x", "at character 1: no field 'lop' (did you mean loop?); there are iteration"),
        ("loop=a reward", "at character 8: no term at 'reward'"),
        ("loop=a  loop=b", "at character 9: loop is given twice"),
        ("loop!=a", "loop takes = alone, not !="),
        ("reward=high", "reward takes a number, not 'high'"),
        ("turns>1.5", "turns takes a whole number"),
        ("turns<0", "no turns can match <0"),
        ("reward>2 reward<1", "no reward can match"),
        ("split=dev", "split must be one of train, holdout, test"),
        ("iteration=x", "iteration takes numbers"),
        ("since=soon", "since must be a date"),
        ('text="open', "no term at"),
    ],
)
def test_mistakes_name_their_place(terms: str, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_where(terms)
    assert message in str(refused.value)
    assert set(FIELDS) >= {"tag", "text", "model", "since"}
