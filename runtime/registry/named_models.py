"""Models that are no Hugging Face directory yet: a GGUF file, or `owner/name` of a hub.

A GGUF file is dequantized once, into a checkpoint of this root that is named by the file's content;
the next start finds it there. A hub's model comes into the hub library's own cache, HF_HOME, and
with HF_HUB_OFFLINE it must be there already. Called by registry.py.
Read next: gguf_conversion.py, the process that converts.
"""

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput, CrayError, DiskFull, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.processes import python
from cray_agents.records import digest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.foreign_model import CONFIG

log = logging.getLogger(__name__)
FORM = 1  # of what a conversion writes
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def convert_gguf(home: Home, source: Path) -> Path:
    """Return the checkpoint of a GGUF file, made from it unless it is there.

    Raises BadInput for another file, or one that cannot be converted; SetupError, DiskFull.
    """
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            why = "is neither a Hugging Face directory nor a GGUF file"
            raise BadInput(f"{source} {why}", param="checkpoint")
    target = home.checkpoint(f"gguf-{digest([FORM, checksums.hash_of(source)])}")
    if (target / checkpoints.MANIFEST).is_file():
        return target
    checkpoints.refuse_pruned(target)
    _require("gguf", "accelerate", "transformers")
    draft = durable.draft_directory(target)
    log.warning("%s is converted to %s, this once: some seconds for each 100 MB", source, target)
    try:
        _run_conversion(source, draft)
        manifest, changed = checkpoints.inspect(draft)
        text = checksums.with_crc(orjson.dumps(manifest.model_dump(mode="json")))
        for name, content in {**changed, checkpoints.MANIFEST: text}.items():
            durable.write_file(draft / name, content)
        access = checkpoints.copy_mode(home)
        draft.chmod(stat.S_IMODE(draft.stat().st_mode) & (0o7000 | access))
        for path in draft.iterdir():
            path.chmod(access & 0o666)
        checkpoints.publish_folder(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _run_conversion(source: Path, draft: Path) -> None:
    words = ["cray_agents.runtime.registry.gguf_conversion", str(source), str(draft)]
    done = subprocess.run(
        python("-m", *words, str(os.getpid())),
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    lines = (done.stdout if done.returncode in (2, 3) else done.stderr).decode(errors="replace")
    why = " ".join(lines.strip().splitlines()[-1:])
    if done.returncode < 0:
        why = f"was not converted: signal {-done.returncode} ended it, so memory may be short"
    elif done.returncode not in (0, 2, 3):
        why = f"cannot be converted: {why[:500]}"
    if done.returncode:
        kind = DiskFull if done.returncode == 3 else BadInput
        raise kind(f"{source} {why}", param="checkpoint")


def fetch_from_hub(name: str) -> Path:
    """Return the directory of a hub's model in the hub's cache, and load down what it lacks.

    Raises NotFound, BadInput, DiskFull, SetupError.
    """
    _require("huggingface_hub")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError

    chosen: Any = {"allow_patterns": [f"*{end}" for end in checkpoints.SUFFIXES]}
    chosen["ignore_patterns"] = "*/*"
    try:
        with contextlib.suppress(DryRunError):  # without a net: what is in the cache
            files = snapshot_download(name, dry_run=True, **chosen)
            if not any(file.filename == CONFIG for file in files):
                raise BadInput(
                    f"{name} has no {CONFIG} on the hub: of a repository of GGUF files load one"
                    f" down (`hf download {name} FILE.gguf`), and give its path",
                    param="checkpoint",
                )
            need = sum(file.file_size or 0 for file in files if file.will_download)
            cache = next(p for p in Path(constants.HF_HUB_CACHE, name).parents if p.is_dir())
            if (free := shutil.disk_usage(cache).free) < need:
                raise DiskFull(f"{name} has {need:,} bytes, {cache} room for {free:,}: set HF_HOME")
        return Path(snapshot_download(name, **chosen))
    except CrayError:
        raise
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        message = f"no directory {name!r} here, and no such model from the hub: {why}"
        raise NotFound(message, param="checkpoint") from error


def _require(*packages: str) -> None:
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    if lacking:
        raise SetupError(f"this model needs packages: pip install {' '.join(lacking)}")
