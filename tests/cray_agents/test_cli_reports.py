"""`reports` and `view`, against a gateway in a process of its own."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import cli
from tests.support.gateway_process import gateway


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(tmp_path_factory.mktemp("reports") / "home") as (url, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "these words"}]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-run-id": "cited"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        yield url


def test_a_report_is_written_shown_listed_and_deleted(url: str, tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    file.write_text('# The week\n\nIt was asked [this](#/run/cited?t=0 "these words").\x1b[31m\n')
    made = cli("reports", "write", "week", file, "--url", url, cwd=tmp_path)
    assert (made.returncode, made.stderr.strip()) == (0, "1 of 1 citations hold"), made.stderr
    shown = cli("reports", "show", "week", "--url", url, cwd=tmp_path)
    assert shown.returncode == 0 and "The week" in shown.stdout and "\x1b[31m" not in shown.stdout
    file.write_text('[that](#/run/cited?t=0 "those words") [it](#/run/cited)')
    made = cli("reports", "write", "day", file, "--json", "--url", url, cwd=tmp_path)
    assert made.returncode == 1 and json.loads(made.stdout)["broken"] == 1
    shown = cli("reports", "show", "day", "--url", url, cwd=tmp_path)
    assert shown.returncode == 1 and "1 of 2 citations hold" in shown.stderr
    assert "that (#/run/cited?t=0): no text of turn 0 has these words" in shown.stderr
    listed = cli("reports", "list", "--json", "--url", url, cwd=tmp_path)
    assert [row["id"] for row in json.loads(listed.stdout)] == ["day", "week"]
    assert cli("reports", "delete", "day", "--url", url, cwd=tmp_path).returncode == 0
    table = cli("reports", "list", "--url", url, cwd=tmp_path).stdout
    assert "The week" in table and "day" not in table


def test_a_view_without_pages_or_words_says_so(url: str, tmp_path: Path) -> None:
    words = ("view", "cited", "--turn", "1", "--quote", "those", "--url", url)
    done = cli(*words, cwd=tmp_path)
    assert done.returncode == 1 and "0 pages show #/run/cited?t=0" in done.stdout
    assert "cray-agents dashboard" in done.stderr and "Turn 1 has no such words" in done.stderr
    told = json.loads(cli(*words, "--json", cwd=tmp_path).stdout)
    assert told == {"pages": 0, "highlight": [{"turn": 0, "ok": False}]}


def test_mistakes_are_told(url: str, tmp_path: Path) -> None:
    (tmp_path / "bytes.md").write_bytes(b"\xff")
    for words, said in (
        (("reports", "write", "r", "absent.md"), "cannot read absent.md"),
        (("reports", "write", "r", "bytes.md"), "is not UTF-8"),
        (("reports", "show", "absent"), "no report 'absent'"),
        (("reports", "delete", "absent"), "no report 'absent'"),
        (("view", "cited", "--quote", "x"), "give --turn"),
        (("view", "#/run/cited", "--turn", "1"), "--turn is for a run's id"),
        (("view", "absent", "--turn", "1", "--quote", "x"), "absent"),
    ):
        done = cli(*words, "--url", url, cwd=tmp_path)
        assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stderr
        assert "Traceback" not in done.stderr
