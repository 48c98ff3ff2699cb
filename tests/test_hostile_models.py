"""Models that can never be one, at every route: refused with a reason, and not a byte copied."""

import json
import os
import shutil
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.datasets.demonstrations import Renderer
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.testing import ScriptedEngine
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from tests.support.command_line import cli
from tests.support.hostile_models import CASES, SECRET, Case, whole_model, with_manifest
from tests.support.scripted_gateway import Gateway, served
from tests.support.scripted_platform import platform

DATASET = {"id": "ds-1", "method": "sft", "splits": {"train": {"samples": 8, "tokens": 80}}}


class Site(NamedTuple):
    """A platform that trains with Megatron, and the root that it runs on."""

    url: str
    home: Home

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    @property
    def kept(self) -> tuple[list[str], list[Path]]:
        """The checkpoints and the jobs that there are, hidden ones too."""
        there = sorted(path.name for path in self.home.checkpoint("x").parent.iterdir())
        return there, sorted(self.home.jobs.glob("*"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = Home(tmp_path_factory.mktemp("root"))
    write_dataset(home)
    trainer = MegatronTrainer(home, LocalProcesses(home.logs))
    with platform(home.root, ScriptedEngine("hi"), trainer=trainer) as running:
        yield Site(running.url, home)


def write_dataset(home: Home) -> None:
    home.dataset("ds-1").mkdir(parents=True)
    (home.dataset("ds-1") / "manifest.json").write_text(json.dumps(DATASET))


def command(folder: Path, *words: object) -> tuple[int, str]:
    """A command in this process: its exit code, and what it said."""
    done = cli(*words, cwd=folder)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_door_takes_it(site: Site, tmp_path: Path, name: str) -> None:
    case: Case = CASES[name]
    folder = whole_model(tmp_path / "model")
    case.change(folder)
    home, before = Home(tmp_path / "home"), site.kept
    write_dataset(home)

    if not case.only_training:
        code, said = command(tmp_path, "up", "--model", folder, "--home", home.root, "--port", 0)
        assert case.said in said and "Traceback" not in said
        assert code == (1 if name == "manifest of other weights" else 2), said
        status, refused = site.post("/v1/models/m/versions", checkpoint=str(folder))
        assert status == (422 if name == "manifest of other weights" else 400), refused
        assert case.said in refused["message"] and refused["param"] in ("checkpoint", None)

    words = ["jobs", "submit", "--home", home.root, "--dataset", "ds-1", "--parent", folder]
    code, said = command(tmp_path, *words)
    assert code in (1, 2) and "Traceback" not in said
    assert case.said in said
    assert not home.checkpoint("x").parent.exists() and not home.jobs.exists()

    if not (folder / "manifest.json").exists() and not (folder / "manifest.json").is_symlink():
        with_manifest(folder)
    body = {"dataset": "ds-1", "parent": str(folder), "hyperparameters": {"steps": 1}}
    status, refused = site.post("/v1/jobs", **body)
    assert status in (400, 422), refused
    assert case.said in refused["message"] and refused["param"] in ("parent", "checkpoint", None)
    assert site.kept == before
    assert b"$6$secret" in SECRET and "$6$secret" not in json.dumps(refused) + said


# ---- what is taken in
def test_links_within_the_directory_and_a_cache_are_followed(site: Site, tmp_path: Path) -> None:
    whole = whole_model(tmp_path / "whole")
    beside = Path(shutil.copytree(whole, tmp_path / "beside"))
    (beside / "tokenizer.json").rename(beside / "tokenizer-v2.json")
    (beside / "tokenizer.json").symlink_to("tokenizer-v2.json")
    repository = tmp_path / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for path in whole.iterdir():
        (repository / "blobs").mkdir(exist_ok=True)
        shutil.copy(path, repository / "blobs" / f"hash-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-of-{path.name}")
    for folder in (whole, beside, snapshot):
        status, version = site.post("/v1/models/taken/versions", checkpoint=str(folder))
        assert status == 200, version
        kept = site.home.checkpoint(version["checkpoint"])
        assert (kept / "config.json").read_bytes() == (whole / "config.json").read_bytes()
        assert not any(path.is_symlink() for path in kept.iterdir())


@pytest.mark.parametrize(
    ("root", "folder", "file"), [(0o755, 0o700, 0o600), (0o770, 0o770, 0o660)], ids=["", "group"]
)
def test_a_copy_is_its_owners_alone_or_the_groups_that_shares_the_root(
    tmp_path: Path, root: int, folder: int, file: int
) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.root.chmod(root)
    before = os.umask(0)
    try:
        taken, _ = Registry(home).import_checkpoint(whole_model(tmp_path / "model"))
    finally:
        os.umask(before)
    kept = home.checkpoint(taken)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (kept, *kept.iterdir())}
    assert modes.pop(kept.name) == folder
    assert set(modes.values()) == {file} and len(modes) == 4


# ---- who may name what
@pytest.fixture
async def keyed(tmp_path: Path) -> Any:
    roots = (tmp_path / "models",)
    whole_model(tmp_path / "models" / "inside")
    whole_model(tmp_path / "elsewhere" / "outside")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "elsewhere" / "outside")
    async with served(tmp_path, model_roots=roots) as gateway:
        home = gateway.services.home
        write_dataset(home)
        secrets = {role.name: Keys(home).create(role.name, role)[1] for role in Role}
        yield gateway, secrets


BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "versions": ("/v1/models/other/versions", {}, "checkpoint"),
    "parent": ("/v1/jobs", {"dataset": "ds-1", "hyperparameters": {"steps": 1}}, "parent"),
    "parent, from scratch": (
        "/v1/jobs",
        {"dataset": "ds-1", "hyperparameters": {"steps": 1, "init": "random"}},
        "parent",
    ),
    "reference": (
        "/v1/jobs",
        {"dataset": "ds-1", "parent": "calc", "method": "dpo", "hyperparameters": {"steps": 1}},
        "reference",
    ),
    "teacher": (
        "/v1/jobs",
        {"dataset": "ds-1", "parent": "calc", "method": "distill", "hyperparameters": {"steps": 1}},
        "teacher",
    ),
    "tokenizer": ("/v1/datasets", {"loop": "l"}, "tokenizer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", BODIES)
async def test_train_keys_name_only_what_lies_under_the_configured_roots(
    keyed: tuple[Gateway, dict[str, str]], tmp_path: Path, key: str
) -> None:
    gateway, secrets = keyed
    path, body, name = BODIES[key]

    async def ask(role: str, place: Path | str) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {secrets[role]}"}
        return await gateway.call("POST", path, json={**body, name: str(place)}, headers=headers)

    told = set()
    for place in (
        tmp_path / "elsewhere" / "outside",
        tmp_path / "models" / "link",
        tmp_path / "models" / ".." / "elsewhere" / "outside",
        tmp_path / "models-of-others",
        tmp_path / "elsewhere" / "nowhere",
        Path("/etc"),
        Path("/"),
        gateway.services.home.root / "keys",
    ):
        status, refused = await ask("train", place)
        assert (status, refused["error"]["code"]) == (403, "path_not_allowed")
        told.add(refused["error"]["message"].replace(str(place), "PLACE"))
    assert len(told) == 1  # whether it exists or not
    allowed: tuple[tuple[str, Path | str], ...] = (
        ("train", tmp_path / "models" / "inside"),
        ("train", "calc"),
        ("admin", tmp_path / "elsewhere" / "outside"),
    )
    for role, named in allowed:
        status, answer = await ask(role, named)
        assert status != 403, answer


async def test_a_tokenizer_whose_files_lead_elsewhere_is_not_read(
    keyed: tuple[Gateway, dict[str, str]], tmp_path: Path
) -> None:
    gateway, secrets = keyed
    model = tmp_path / "models" / "inside"
    (tmp_path / "secret").write_bytes(SECRET)
    (model / "chat_templates").mkdir()
    (model / "chat_templates" / "tools.jinja").symlink_to(tmp_path / "secret")
    headers = {"authorization": f"Bearer {secrets['train']}"}
    body = {"loop": "l", "tokenizer": str(model)}
    status, refused = await gateway.call("POST", "/v1/datasets", json=body, headers=headers)
    assert (status, refused["error"]["param"]) == (400, "tokenizer")
    assert "tools.jinja is a link that leads out" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"null"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"tokenizer_class": 3}'),
        ("tokenizer_config.json", b'{"auto_map": {"AutoTokenizer": ["code.Mine", null]}}'),
    ],
)
def test_a_damaged_tokenizer_is_told(tmp_path: Path, file: str, content: bytes) -> None:
    model = whole_model(tmp_path / "model")
    (model / file).write_bytes(content)
    with pytest.raises(BadInput) as refusal:
        Renderer(model)
    assert refusal.value.param == "tokenizer" and str(model) in str(refusal.value)
