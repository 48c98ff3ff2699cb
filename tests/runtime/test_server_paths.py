"""No error over HTTP tells where on the platform's machine a file lies."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from cray_agents.runtime.gateway.http.error_envelope import without_paths
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobSpec
from tests.support.scripted_gateway import CHAT, Gateway, block, says


@pytest.mark.parametrize(
    ("message", "shortened"),
    [
        ("cannot use /srv/root/files/a.json: full", "cannot use .../a.json: full"),
        ("'/srv/root/x' is damaged", "'.../x' is damaged"),
        ('File "/usr/lib/python3/a.py", line 3', 'File ".../a.py", line 3'),
        ("it lies in /srv/root/x.", "it lies in .../x."),
        ("path=/srv/root (/srv/more/)", "path=.../root (.../more)"),
        ("POST /v1/files; see /health/ready", "POST /v1/files; see /health/ready"),
        ("at http://127.0.0.1:8000/v1/models", "at http://127.0.0.1:8000/v1/models"),
        ("text/plain and/or 1/2 #/$defs/a", "text/plain and/or 1/2 #/$defs/a"),
    ],
)
def test_a_path_becomes_its_name(message: str, shortened: str) -> None:
    assert without_paths(message) == shortened


def test_what_the_client_sent_it_is_told_again() -> None:
    sent = b'{"parent": "/models/qwen"}'
    message = "no checkpoint '/models/qwen', nor '/srv/models/qwen'"
    assert without_paths(message, sent) == "no checkpoint '/models/qwen', nor '.../qwen'"


async def _refused(gateway: Gateway, method: str, path: str, **options: Any) -> str:
    async with gateway.http.request(method, gateway.url + path, **options) as response:
        text = await response.text()
        assert response.status >= 400, text
        return text


async def test_no_route_tells_where_its_files_are(gateway: Gateway, tmp_path: Path) -> None:
    """Each folder of the root is replaced by a file, so that whatever needs it fails."""
    run_id = (await gateway.ask("hello")).run_id
    home = gateway.services.home
    block(home)
    for name in ("files", "uploads", "batches", "loops", "datasets", "jobs", "blobs", "drafts"):
        folder = home.root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("where the directory would be")
    body = {"model": "calc", "messages": says("x")}
    upload = {"bytes": 1, "filename": "f", "mime_type": "text/plain", "purpose": "user_data"}
    routes: list[tuple[str, str, Any]] = [
        ("POST", CHAT, {"json": body}),
        ("POST", f"/v1/trajectories/{run_id}/rewards", {"json": {"value": 1}}),
        ("POST", "/v1/loops/l/journal/e", {"json": {}}),
        ("POST", "/v1/loops/l/iterations/1", {"json": {}}),
        ("POST", "/v1/uploads", {"json": upload}),
        ("POST", "/v1/models/m/versions", {"json": {"checkpoint": "ckpt-none"}}),
        ("GET", "/v1/models/none/lineage", {}),
        ("GET", "/v1/datasets/none", {}),
        ("GET", "/v1/jobs/none", {}),
    ]
    for method, path, options in routes:
        text = await _refused(gateway, method, path, **options)
        assert str(tmp_path) not in text, (path, text)
        assert "/tmp" not in text, (path, text)


async def test_a_stream_that_breaks_off_tells_no_path(gateway: Gateway, tmp_path: Path) -> None:
    block(gateway.services.home)
    text = (await gateway.ask("x", stream=True)).body.decode()
    assert "error" in text and str(tmp_path) not in text


async def test_events_of_jobs_tell_no_paths(gateway: Gateway) -> None:
    journal = JobJournal(gateway.services.home, "job-0123456789abcdef")
    journal.folder.mkdir(parents=True)
    journal.write_spec(
        JobSpec(dataset="d", parent="p", parent_sha256="0", hyperparameters={"steps": 1})
    )
    journal.event("failed", message="cannot read /srv/root/x.json")
    journal.close()
    status, answer = await gateway.call("GET", f"/v1/jobs/{journal.job_id}/events")
    assert status == 200 and answer["data"][0]["message"] == "cannot read .../x.json"
