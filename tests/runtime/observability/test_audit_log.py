"""The audit log: every change with its caller, and no line that changes or goes unnoticed."""

import json
from pathlib import Path

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.telemetry.audit_log import AuditLog, heads, verify_audit
from tests.support.audit_lines import read_audit
from tests.support.command_line import cli
from tests.support.scripted_gateway import served


def write(folder: Path, *files: int) -> list[Path]:
    """Files of so many lines, one process after the other; their paths in this order."""
    paths: list[Path] = []
    for number, lines in enumerate(files):
        log = AuditLog(folder)
        for line in range(lines):
            log.note(who=f"w{number}", action=f"POST /{line}", status=200)
        log.close()
        paths += [path for path in folder.iterdir() if path not in paths]
    return paths


async def test_changes_are_noted_with_their_callers_and_looks_are_not(tmp_path: Path) -> None:
    async with served(tmp_path, api_keys="required") as gateway:
        keys = Keys(gateway.services.home)
        _, admin = keys.create("boss", Role.admin)
        record, use = keys.create("web", Role.use)
        promote = "/v1/models/calc/promote"
        for key, status in ((use, 403), (admin, 200)):
            headers = {"authorization": f"Bearer {key}", "x-reason": "it is better, na%C3%AFve one"}
            done = await gateway.call("POST", promote, json={"version": 1}, headers=headers)
            assert done[0] == status
            await gateway.call("GET", "/v1/models", headers=headers)
        assert (await gateway.call("POST", promote, json={"version": 1}))[0] == 401
        folder = gateway.services.home.audit
        lines = read_audit(folder)
        assert (await gateway.ask("hi", headers=headers)).status == 200
        assert len(read_audit(folder)) == len(lines)
    told = [(line.who, line.role, line.action, line.path, line.status) for line in lines]
    action = "POST /v1/models/{name}/promote"
    assert told == [
        ("", "", action, promote, 403),
        ("boss", "admin", action, promote, 200),
        ("", "", action, promote, 401),
    ]
    assert [line.reason for line in lines] == [*["it is better, naïve one"] * 2, ""]
    assert all(line.request for line in lines) and verify_audit(folder) == []
    assert use not in str(lines) and record.id not in str(lines)


def test_any_flipped_bit_is_told(tmp_path: Path) -> None:
    first, second = write(tmp_path, 3, 2)
    assert verify_audit(tmp_path) == [] and len(read_audit(tmp_path)) == 5
    for path in (first, second):
        text = path.read_bytes()
        for place in range(0, len(text), 7):
            path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
            assert verify_audit(tmp_path), (path, place)
        path.write_bytes(text)
    assert verify_audit(tmp_path) == []


@pytest.mark.parametrize("line", range(4))
def test_a_line_taken_out_is_told(tmp_path: Path, line: int) -> None:
    first, _ = write(tmp_path, 4, 1)
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    assert any("missing" in said or "cut off" in said for said in verify_audit(tmp_path))


def test_a_file_taken_away_and_a_forged_line(tmp_path: Path) -> None:
    first, _ = write(tmp_path, 2, 1)
    text = first.read_bytes()
    first.unlink()
    assert verify_audit(tmp_path) == [f"{first} is missing: " + _witness(tmp_path) + " followed it"]
    first.write_bytes(text)
    forged = tmp_path / "forged"
    made = write(forged, 2)[0].read_bytes()  # whole by itself, and of another chain
    first.write_bytes(made)
    assert any("cut off" in said for said in verify_audit(tmp_path))


def test_heads_prove_the_end_of_the_newest_file(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 3)
    noted = heads(tmp_path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert verify_audit(tmp_path) == []  # as the module says
    assert heads(tmp_path) != noted


def test_a_full_disk_refuses_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "audit"
    folder.write_text("where the directory would be")
    log = AuditLog(folder)
    log.note(who="w", action="POST /x")
    assert "lacks" in caplog.text
    folder.unlink()
    log.note(who="w", action="POST /y")
    log.close()
    assert [line.action for line in read_audit(folder)] == ["POST /y"]


def test_the_commands(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert cli("keys", "create", "web", "--home", home.root, cwd=tmp_path).returncode == 0
    assert cli("keys", "revoke", "web", "--home", home.root, cwd=tmp_path).returncode == 0
    rows = read_audit(home.audit)
    assert [row.action for row in rows] == ["keys create --role use", "keys revoke"]
    assert all("@" in row.who and row.path.endswith(" web") for row in rows)

    def audit() -> dict[str, str]:
        """What `doctor` says of the log."""
        done = cli("doctor", "--json", "--home", home.root, cwd=tmp_path)
        return {row["check"]: row for row in json.loads(done.stdout)}["audit log"]

    first, newest = sorted(home.audit.iterdir())  # a file's time may be that of the next one
    assert audit()["state"] == "pass" and newest.name in audit()["found"]
    first.write_bytes(first.read_bytes().replace(b"use", b"xyz"))
    assert audit()["state"] == "fail" and "damaged" in audit()["to mend it"]


def _witness(folder: Path) -> str:
    (path,) = folder.glob("*.jsonl")
    return path.name
