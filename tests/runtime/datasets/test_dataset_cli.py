"""`cray-agents dataset`: build, dry run, list, show, runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cray_agents.cli import app
from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from tests.support.datasets.dataset_runs import run_events, several, stored, task


def cli(*words: object, cwd: Path) -> Result:
    argv = ["dataset", *map(str, words), "--home", str(cwd / "home")]
    return CliRunner().invoke(app, argv)


@pytest.fixture
async def home(tmp_path: Path) -> Home:
    events = several(
        *(
            run_events(f"r{n}", [n], task=task(f"t{n}"), reward=n / 4, iteration=n % 2)
            for n in range(5)
        )
    )
    return await stored(tmp_path / "home", events)


def test_a_recipe_is_a_file_and_options(home: Home, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('loop = "l"\nmin_reward = 0.9\nvalidation = 0.0\n[where]\nagent = "calc"\n')
    words = ("build", "--recipe", recipe, "--set", "min_reward=0.25", "--where", "iteration=1")
    planned = cli(*words, "--dry-run", cwd=tmp_path)
    assert planned.exit_code == 0, planned.stderr
    assert "2 of 2 runs are in" in planned.stdout and "nothing was written" in planned.stdout
    assert not home.datasets.exists()
    made = json.loads(cli(*words, "--json", cwd=tmp_path).stdout)
    assert (made["accepted_runs"], made["considered_runs"]) == (2, 2)
    assert made["recipe"]["where"]["agent"] == "calc" and made["id"] in planned.stdout
    assert str(home.dataset(made["id"])) in cli(*words, cwd=tmp_path).stdout


def test_what_is_there_and_why(home: Home, tmp_path: Path) -> None:
    made = json.loads(cli("build", "--where", "loop=l", "--json", cwd=tmp_path).stdout)
    listed = json.loads(cli("list", "--json", cwd=tmp_path).stdout)
    assert [row["id"] for row in listed] == [made["id"]]
    shown = cli("show", made["id"], cwd=tmp_path)
    assert "low_reward" in shown.stdout and "README.md" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("build", "--where", "loop=nobody"),
            "no run can be trained on: 0 considered (none match)",
        ),
        (("build", "--method", "ppo"), "should be 'sft', 'grpo', 'dpo', 'kto' or 'distill'"),
        (("build", "--set", "min_margin=0.5"), "min_margin has no effect with method 'sft'"),
        (("build", "--recipe", "broken.json"), "broken.json is no recipe"),
        (("show", "ds-none"), "no dataset 'ds-none'"),
    ],
    ids=["empty", "method", "effect", "file", "unknown"],
)
def test_mistakes_are_told(home: Home, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "broken.json").write_text("{")
    found = [tmp_path / word if word == "broken.json" else word for word in words]
    error = cli(*found, cwd=tmp_path).exception
    assert isinstance(error, BadInput | NotFound) and said in str(error)
