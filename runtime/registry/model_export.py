"""Export of a version for other programs: a Hugging Face directory, a GGUF file, or its adapter.

Beside the weights lies README.md, a model card made of the records: data, decision, parents and
licence. A folder appears when it is whole, and after a GGUF file was read back. Called by
cli/models.py. Read next: gguf_export.py.
"""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.records import LogprobDistance, Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import adapters, checkpoints, gguf_export
from cray_agents.runtime.registry.deltas import materialize
from cray_agents.runtime.registry.lineage import lineage_of
from cray_agents.runtime.registry.registry import Registry

Form = Literal["hf", "gguf", "adapter"]
CARD = "README.md"
PROMPTS = "prompts.json"  # by agent: instructions, examples, tools' descriptions
_LICENCE = re.compile(r"^license: *[\"']?([\w.+-]+)", re.MULTILINE)


class ExportedModel(Record):
    """What was written. `checked`: how far a GGUF file's logprobs are from the version's."""

    id: str
    to: Form
    output: str
    files: list[str]
    licence: str | None
    checked: LogprobDistance | None


def export_version(registry: Registry, reference: str, to: Form, output: Path) -> ExportedModel:
    """Write a version (`name@N` or `name`) into the new folder `output`.

    Raises NotFound for a version or weights that are gone; BadInput where the folder exists, the
    version has no adapter, or GGUF cannot hold it; Corrupt where files are damaged, or a GGUF file
    does not read back as the version.
    """
    home, version, checked = registry.home, registry.resolve(reference), None
    if output.exists():
        raise BadInput(f"{output} exists: give a new folder", param="output")
    directory = materialize(home, home.checkpoint(version.checkpoint))
    manifest, adapter = checkpoints.verify(directory), directory / checkpoints.ADAPTER
    if to == "adapter" and not adapter.is_dir():
        raise BadInput(f"{version.id} has whole weights and no adapter: give --to hf", param="to")
    whole = directory
    if to != "adapter" and manifest.base is not None:
        whole = adapters.merge(directory)
    line = _ancestry(registry, version.id)
    licence, source = _licence(home, line)
    draft = durable.draft_directory(output)
    try:
        if to == "adapter":
            shutil.copytree(adapter, draft, dirs_exist_ok=True)
        elif to == "hf":
            _copy(whole, draft)
        else:
            file = draft / f"{version.name}-{version.number}.gguf"
            gguf_export.write_gguf(whole, file, version.id, licence)
            ids = [prompt.token_ids for prompt in manifest.probe] or [list(range(64))]
            checked = gguf_export.compare(file, whole, ids)
        if version.prompts:
            told = {agent: prompt.model_dump() for agent, prompt in version.prompts.items()}
            (draft / PROMPTS).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
        (draft / CARD).write_text(_card(line, licence, source, manifest.dataset))
        if not checkpoints.publish_folder(draft, output):
            raise BadInput(f"{output} exists: give a new folder", param="output")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    files, place = sorted(path.name for path in output.iterdir()), str(output)
    about = {"id": version.id, "to": to, "output": place, "files": files, "licence": licence}
    return ExportedModel(**about, checked=checked)


def _copy(whole: Path, target: Path) -> None:
    """Copy a whole model with its manifest, by which another root checks it, without its card."""
    manifest = checkpoints.read_manifest(whole)
    files = {name: sha for name, sha in manifest.files.items() if "/" not in name and name != CARD}
    for name in files:
        shutil.copyfile(whole / name, target / name)
    text = checksums.record_text(manifest.model_copy(update={"files": files, "delta": None}))
    durable.write_file(target / checkpoints.MANIFEST, text)


def _ancestry(registry: Registry, version: str) -> list[dict[str, Any]]:
    """Return a version's lineage, itself first, then its parent, and so on."""
    kin = {one["id"]: one for one in lineage_of(registry, version)}
    line, at = [], kin.get(version)
    while at is not None and at not in line:
        line.append(at)
        at = kin.get(at["parent"] or "")
    return line


def _licence(home: Home, line: list[dict[str, Any]]) -> tuple[str | None, str]:
    """Return the licence that the card of a version or its nearest parent states, and whose."""
    for one in line:
        path = home.checkpoint(one["checkpoint"]) / CARD
        text = path.read_text(errors="replace") if path.is_file() else ""
        head = text.split("\n---", 1)[0] if text.startswith("---\n") else ""
        if found := _LICENCE.search(head):
            return found[1], one["id"]
    return None, ""


def _card(line: list[dict[str, Any]], licence: str | None, source: str, dataset: str | None) -> str:
    """Return the card of the first of a line, in the form of a hub's README.md."""
    one, parents = line[0], line[1:]
    decisions = [
        f"- {event['kind'].replace('_', ' ')}"
        f" {time.strftime('%Y-%m-%d', time.gmtime(event['time']))}"
        f" by {event['who'] or 'nobody named'}: {event['reason']}{_numbers(event['numbers'])}"
        for event in one["events"]
    ]
    below = [f"- `{each['id']}`, weights {each['weights_sha256']}" for each in parents]
    terms = f"{licence}, as the card of `{source}` states."
    if licence is None:
        terms = "None is on record: ask where the weights come from before you pass them on."
    data = dataset and f"Training set `{dataset}`{_numbers(one['about_dataset'])}."
    trained = one["job"] and f"Job `{one['job']}`{_numbers(one['metrics'])}."
    learned = ", ".join(f"`{agent}` ({prompt})" for agent, prompt in one["prompts"].items())
    parts = {"Decision": "\n".join(decisions), "Data": data, "Training": trained,
             "Parents": "\n".join(below), "Licence": terms}  # fmt: skip
    if learned:
        parts["Prompts"] = (
            f"`{PROMPTS}` has what was learned to stand before inputs, for {learned}."
        )
    head = [f"license: {licence}"] if licence else []
    head += [f"base_model: {parents[-1]['id']}"] if parents else []
    text = "\n".join(["---", *head, "tags: [cray-agents]", "---", f"# {one['id']}\n\n"])
    text += f"Weights {one['weights_sha256']}.\n"
    told = (f"\n## {title}\n\n{said or 'None is on record.'}\n" for title, said in parts.items())
    return text + "".join(told)


def _numbers(values: dict[str, Any]) -> str:
    """Return a record in brackets, without what has parts of its own; "" where nothing is left."""
    plain = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
        if isinstance(value, str | int | float)
    ]
    return f" ({', '.join(plain)})" if plain else ""
