"""Configuration: which source wins, and what a mistake is told."""

from pathlib import Path

import pytest

from cray_agents.config import HANDED, load_config
from cray_agents.errors import ConfigError


def test_flags_beat_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cray-agents.toml").write_text("port = 1\nmax_num_seqs = 3\nmax_lora_rank = 2\n")
    monkeypatch.setenv("CRAY_AGENTS_PORT", "2")
    monkeypatch.setenv("CRAY_AGENTS_MAX_NUM_SEQS", "4")
    config = load_config({"port": 5, "home": None}, tmp_path)
    assert (config.port, config.max_num_seqs, config.max_lora_rank) == (5, 4, 2)
    assert config.home == Path(".cray-agents")
    monkeypatch.setenv(HANDED, '{"port": 6, "job": {"modules": ["cuda/12"]}}')
    assert load_config({}, tmp_path).port == 6
    assert load_config({}, tmp_path).job.modules == ["cuda/12"]
    assert load_config({"port": 5}, tmp_path).port == 5
    for wrong in ("port", "[1]", '{"prot": 1}'):
        monkeypatch.setenv(HANDED, wrong)
        with pytest.raises(ConfigError, match=HANDED):
            load_config({}, tmp_path)


def test_an_unknown_key_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cray-agents.toml").write_text("max_model_length = 10\n")
    with pytest.raises(ConfigError, match=r"cray-agents\.toml.*did you mean max_model_len\?"):
        load_config({}, tmp_path)
    (tmp_path / "cray-agents.toml").unlink()
    monkeypatch.setenv("CRAY_AGENTS_PROT", "1")
    with pytest.raises(ConfigError, match="did you mean CRAY_AGENTS_PORT"):
        load_config({}, tmp_path)


@pytest.mark.parametrize("text", ["port = 'x'", "port = 70000", "port = ", "scheduler = 'pbs'"])
def test_a_bad_value_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "cray-agents.toml").write_text(text)
    with pytest.raises(ConfigError):
        load_config({}, tmp_path)


def test_slurms_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cray-agents.toml").write_text('slurm_options = ["--qos=low"]')
    assert load_config({}, tmp_path).slurm_options == ["--qos=low"]
    monkeypatch.setenv("CRAY_AGENTS_SLURM_OPTIONS", "--partition=gpu --account=me")
    assert load_config({}, tmp_path).slurm_options == ["--partition=gpu", "--account=me"]
    for wrong, said in (
        ("-p gpu", "no option: write it as --partition=gpu"),
        ("--partition gpu", "'gpu' is no option"),
        ("--nodes=3", "--nodes is the platform's own"),
        ("--job-n=x", "--job-name is the platform's own"),
        ("--time=60", "train_minutes"),
    ):
        monkeypatch.setenv("CRAY_AGENTS_SLURM_OPTIONS", wrong)
        with pytest.raises(ConfigError, match=said):
            load_config({}, tmp_path)


SECTION = """
[job]
modules = ["cuda/12.9"]
fabric = "efa"
[job.environment]
NCCL_DEBUG = "INFO"
[job.container]
image = "/images/train.sqsh"
mounts = ["/data"]
[job.slurm_options]
replica = ["--partition=serve"]
"""


def test_a_section_says_how_jobs_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cray-agents.toml").write_text(SECTION)
    job = load_config({}, tmp_path).job
    assert (job.modules, job.environment) == (["cuda/12.9"], {"NCCL_DEBUG": "INFO"})
    assert job.container is not None and job.container.runtime == "pyxis"
    assert job.slurm_options == {"replica": ["--partition=serve"]}
    monkeypatch.setenv("CRAY_AGENTS_JOB", '{"gpu_type": "h200"}')
    assert load_config({}, tmp_path).job.gpu_type == "h200"  # all of the section is replaced
    monkeypatch.setenv("CRAY_AGENTS_JOB", "h200")
    with pytest.raises(ConfigError, match="CRAY_AGENTS_JOB must be JSON"):
        load_config({}, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("module = ['a']", r"\[job\]: unknown key 'module'; did you mean modules"),
        ("container = {imag = 'a'}", r"\[job.container\]: unknown key 'imag'; did you mean image"),
        ("container = {}", "container.image"),
        ("container = {image = 'a', mounts = ['data:b']}", "write it as /a, /a:/b or /a:/b:ro"),
        ("container = {image = 'a', options = ['-x']}", "write it as --name or --name=value"),
        ("environment = {'A;B' = '1'}", "'A;B' cannot name environment variables"),
        ("environment = {CUDA_VISIBLE_DEVICES = '1'}", "set it themselves"),
        ("inherit = ['*']", "cannot name environment variables"),
        ("inherit = ['SLURM_*']", "set it themselves"),
        ("modules = ['a; b']", "no module's name"),
        ("prolog = ['#SBATCH --qos=a']", "no effect in a prolog: use slurm_options"),
        ("tasks = 'core'", "job.tasks = 'core'"),
        ("cpu_bind = 'a b'", "job.cpu_bind"),
        ("gpu_type = 'h 200'", "job.gpu_type"),
        ("slurm_options = {training = ['--nodes=2']}", "--nodes is the platform's own"),
        ("slurm_options = {train = []}", "'training', 'session'"),
    ],
)
def test_a_bad_value_of_the_section_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "cray-agents.toml").write_text(f"[job]\n{text}\n")
    with pytest.raises(ConfigError, match=said):
        load_config({}, tmp_path)


def test_prices_are_a_section_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cray-agents.toml"
    assert not load_config({}, tmp_path).prices.known
    file.write_text('[prices]\ncurrency = "EUR"\ncore_hour = 0.05\ngpu_hour = {h100 = 2.5}\n')
    prices = load_config({}, tmp_path).prices
    assert (prices.currency, prices.core_hour, prices.of_gpu("h100")) == ("EUR", 0.05, 2.5)
    monkeypatch.setenv("CRAY_AGENTS_PRICES", '{"kwh": 0.3}')
    assert load_config({}, tmp_path).prices.kwh == 0.3
    for text, named in (
        ("gpu_hours = {h100 = 1}", "did you mean gpu_hour"),
        ("core_hour = -1", "prices.core_hour"),
        ("kwh = inf", "prices.kwh"),
        ("gpu_hour = {h100 = 'much'}", "prices.gpu_hour.h100"),
        ("currency = 'dollars'", "prices.currency"),
    ):
        monkeypatch.delenv("CRAY_AGENTS_PRICES", raising=False)
        file.write_text(f"[prices]\n{text}\n")
        with pytest.raises(ConfigError, match=named):
            load_config({}, tmp_path)


def test_where_a_platform_is_belongs_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRAY_AGENTS_URL", "http://127.0.0.1:1")
    load_config({}, tmp_path)
