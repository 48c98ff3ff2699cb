"""The command line without an engine: mistakes are told, with exit code 2, and nothing is lost."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from cray_agents.cli import COMMANDS, app, make_app
from cray_agents.tools.sandbox import Sandbox, backends
from cray_agents.trainers.models.layer_choice import choose_layers, has_transformer_engine
from tests.support.bare_models import bare_model
from tests.support.command_line import cli, refused


@pytest.mark.slow
def test_a_command_alone_is_what_it_is_among_all() -> None:
    """Only the modules of the command that is asked for are imported."""
    every: Any = typer.main.get_command(app)
    assert set(every.commands) == set(COMMANDS)
    groups = {
        name: each.commands for name, each in every.commands.items() if hasattr(each, "commands")
    }
    for name in COMMANDS:
        alone: Any = typer.main.get_command(make_app(name))
        assert name in alone.commands
    for name, commands in groups.items():  # in a new process: a module is imported once
        code = "import sys, typer\nfrom cray_agents.cli import make_app\nname = sys.argv[1]\n"
        code += "print(*typer.main.get_command(make_app(name)).commands[name].commands)"
        argv = [sys.executable, "-c", code, name]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert set(done.stdout.split()) == set(commands), done.stderr


def test_the_version_is_the_installed_one(tmp_path: Path) -> None:
    done = cli("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"cray-agents {metadata.version('cray-agents')}\n")


def test_port_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("up", "--model", tmp_path, "--port", port, cwd=tmp_path)
    refused(done, f"127.0.0.1:{port}", "--port")


def test_store_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli("up", "--model", tmp_path, "--home", tmp_path / "file" / "home", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "--home" in done.stderr


@pytest.mark.parametrize(
    ("model", "words"), [(None, ["--model"]), ("missing", ["missing"]), ("empty", ["config.json"])]
)
def test_nothing_to_serve(tmp_path: Path, model: str | None, words: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    flags = ["--model", tmp_path / model] if model else []
    refused(cli("up", *flags, "--port", 0, cwd=tmp_path), *words)


def test_a_corrupt_checkpoint_file_is_named(tmp_path: Path) -> None:
    model = bare_model(tmp_path / "model")
    files = dict.fromkeys(("config.json", "model.safetensors"), "0" * 64)
    files["config.json"] = hashlib.sha256(b"{}").hexdigest()
    (model / "manifest.json").write_text(json.dumps({"files": files, "weights_sha256": "0" * 64}))
    done = cli("up", "--model", model, "--port", 0, cwd=tmp_path)
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert "SHA-256" in done.stderr


def test_unknown_settings_and_choices(tmp_path: Path) -> None:
    refused(cli("status", cwd=tmp_path, CRAY_AGENTS_PROT="1"), "CRAY_AGENTS_PORT")
    refused(cli("demo", "--control", "noise", cwd=tmp_path), "shuffled-rewards")
    refused(cli("demo", "--model", "gpt", cwd=tmp_path), "'gpt' is not known; valid: smollm2")


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / ".cray-agents" / "segments").mkdir(parents=True)
    assert json.loads(cli("models", "list", "--json", cwd=tmp_path).stdout) == []
    assert json.loads(cli("jobs", "list", "--json", cwd=tmp_path).stdout) == []
    assert json.loads(cli("runs", "list", "--json", cwd=tmp_path).stdout) == []
    refused(cli("runs", "show", "run_x", cwd=tmp_path), "run_x")
    refused(cli("jobs", "logs", "job-x", cwd=tmp_path), "job-x")
    refused(cli("models", "show", "calc@1", cwd=tmp_path), "calc")
    down = cli("down", cwd=tmp_path)
    assert (down.returncode, "no platform" in down.stdout) == (0, True)
    status = cli("status", "--json", cwd=tmp_path)
    assert status.returncode == 1
    assert json.loads(status.stdout)["running"] is False


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli("doctor", "--json", cwd=tmp_path)
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert rows["vllm"]["state"] == rows["megatron"]["state"] == "pass"
    assert done.returncode == (2 if any(r["state"] == "fail" for r in rows.values()) else 0)
    for tried in (backends.best_layer, backends.layer_problem):  # once in a process
        monkeypatch.setattr(backends, tried.__name__, tried.__wrapped__)
    without = cli("doctor", "--json", cwd=tmp_path, PATH="/nowhere")
    slurm = next(row for row in json.loads(without.stdout) if row["check"] == "slurm")
    assert slurm["state"] == "warn"
    assert "apt-get install" in slurm["to mend it"]
    sandbox = next(row for row in json.loads(without.stdout) if row["check"] == "sandbox")
    assert sandbox["state"] == "warn" and "apt-get install bubblewrap" in sandbox["to mend it"]
    assert rows["sandbox"]["found"] == Sandbox().check()


def test_doctor_says_which_gpus_serve_and_train(tmp_path: Path) -> None:
    """vLLM's CPU build serves here, so all GPUs are left to training."""

    def rows(**environment: str) -> dict[str, dict[str, str]]:
        environment |= {"CRAY_AGENTS_SCHEDULER": "local", "CRAY_AGENTS_TRAIN_GPU": "H100"}
        said = cli("doctor", "--json", cwd=tmp_path, **environment).stdout
        return {row["check"]: row for row in json.loads(said)}

    named = rows(CUDA_VISIBLE_DEVICES="4,GPU-5f")
    assert named["GPUs"]["found"] == "training jobs have GPUs 4, GPU-5f"
    assert named["training"]["found"].startswith("2 ranks on a node of 2 x H100")
    twice = rows(CUDA_VISIBLE_DEVICES="4,4")
    assert (
        twice["GPUs"]["state"] == "fail" and "name each GPU once" in (twice["GPUs"]["to mend it"])
    )
    assert "GPUs" not in rows(CUDA_VISIBLE_DEVICES="")


def test_doctor_says_what_the_trainer_would_use(tmp_path: Path) -> None:
    def rows(**environment: str) -> dict[str, dict[str, str]]:
        said = cli("doctor", "--json", cwd=tmp_path, **environment).stdout
        return {row["check"]: row for row in json.loads(said)}

    gpus = {"CRAY_AGENTS_TRAIN_GPU": "H200", "CRAY_AGENTS_TRAIN_GPUS_PER_NODE": "4"}
    job = {"CRAY_AGENTS_JOB": '{"fabric": "efa"}', "NCCL_IB_HCA": "mlx5"}
    on_gpus = rows(**gpus, **job, CRAY_AGENTS_TRAIN_CPUS_PER_RANK="2")
    variables = on_gpus["job variables"]["found"].split()
    assert {"NCCL_DEBUG=WARN", "FI_PROVIDER=efa", "NCCL_IB_HCA=mlx5"} <= set(variables)
    found, layers = on_gpus["training"], on_gpus["layers"]
    assert found["state"] == "pass"
    assert found["found"] == "4 ranks on a node of 4 x H200 (140 GiB), 2 cores each"
    te = has_transformer_engine()
    assert layers["state"] == ("pass" if te else "warn")
    assert layers["found"] == choose_layers(gpu=True, transformer_engine=te, experts=True).text
    assert te or ">=2.9,<2.12" in layers["to mend it"]
    assert on_gpus["C compiler"]["state"] == ("pass" if shutil.which("gcc") else "warn")
    assert {"Python headers", "FlashAttention 3"} <= on_gpus.keys()
    assert "C compiler" not in rows()
    wrong = rows(**gpus, CRAY_AGENTS_TRAIN_RANKS="5")["training"]
    assert wrong["state"] == "fail" and "it has 4 GPUs" in wrong["to mend it"]


@pytest.mark.slow
def test_doctor_imports_what_packages_beside_torch_may_break(tmp_path: Path) -> None:
    """As torchvision does whose build is not for the torch that is installed."""
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('nms')\n")
    about = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text(about)
    argv = [sys.executable, "-m", "cray_agents", "doctor", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)  # fmt: skip
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 2 and rows["transformers"]["state"] == "pass"
    for name in ("import transformers", "import vllm"):
        assert rows[name]["state"] == "fail", rows
        assert rows[name]["to mend it"].startswith("pip uninstall torchvision:")


READERS = ["runs list", "runs stats", "maintain compact", "maintain fsck", "usage cost",
           "usage goodput", "models list", "jobs list", "dataset list", "keys list", "export",
           "why x", "dashboard"]  # fmt: skip


@pytest.mark.slow
def test_a_mistyped_root_is_said_and_not_made(tmp_path: Path) -> None:
    for command in READERS:
        done = cli(*command.split(), "--home", "typo", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), command
        assert f"nothing is stored on {tmp_path}/typo" in done.stderr.replace("\n", "")
    assert not any(tmp_path.iterdir())
    (tmp_path / ".cray-agents" / "demo-0" / "segments").mkdir(parents=True)
    done = cli("runs", "list", cwd=tmp_path)
    assert "--home .cray-agents/demo-0" in done.stderr.replace("\n", " ")
    assert cli("runs", "list", "--home", ".cray-agents/demo-0", cwd=tmp_path).returncode == 0


def test_no_path_leads_to_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "root" / "segments").mkdir(parents=True)
    for command in ("export -o /proc/x.jsonl", "export --format tokens -o /proc/x", "runs list"):
        done = cli(*command.split(), "--home", "root", cwd=tmp_path)
        assert done.returncode == (0 if command == "runs list" else 2)
        assert "draft" not in done.stderr and done.stderr.count("cannot be written") < 2
    (tmp_path / "cray-agents.toml").write_bytes(b"\xff\xfe")
    done = cli("runs", "list", "--home", "root", cwd=tmp_path)
    assert done.returncode == 2 and "cray-agents.toml: 'utf-8' codec" in done.stderr
    (tmp_path / "cray-agents.toml").unlink()
    (tmp_path / "cray-agents.toml").mkdir()
    done = cli("runs", "list", "--home", "root", cwd=tmp_path)
    assert done.returncode == 2 and "cray-agents.toml: Is a directory" in done.stderr


def test_ctrl_c_while_python_imports_is_no_traceback() -> None:
    codes = []
    while len(codes) < 30 and 130 not in codes:
        argv = [sys.executable, "-X", "importtime", "-m", "cray_agents", "--help"]
        # a small pipe: what it tells has to be read, so that it has not ended when it is signalled
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              pipesize=4096,
                              preexec_fn=lambda: signal.signal(2, signal.default_int_handler)
                              ) as process:  # fmt: skip
            for imported in process.stderr:
                if imported.endswith(" importlib.metadata\n"):
                    break
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
        assert "Traceback" not in rest
        codes.append(process.returncode)
    assert 130 in codes


def test_what_to_start_is_named_with_its_root(tmp_path: Path) -> None:
    (tmp_path / "root" / "segments").mkdir(parents=True)
    (tmp_path / "file").write_text('{"url": "/v1/chat/completions"}\n')
    for words in ("status --events", "batch status", "status --watch", "batch run file"):
        done = cli(*words.split(), "--home", "root", cwd=tmp_path)
        said = " ".join(done.stderr.split())
        assert (done.returncode, "`cray-agents up --home root" in said) == (2, True), said
