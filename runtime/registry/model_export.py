"""Export of a version for other programs: a Hugging Face directory, a GGUF file, or its adapter.

Beside the weights lies README.md, a model card made of the records: data, decision, parents and
licence. A folder appears when it is whole, and after a GGUF file was read back. Called by
cli/models.py. Read next: gguf_export.py.
"""

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
_LICENCE = re.compile(r"\A---\n(?:.*\n)*?license: *[\"']?([\w.+-]+)")


class ExportedModel(Record):
    """What was written. `checked`: how far a GGUF file's logprobs are from the version's."""

    id: str
    to: Form
    output: str
    files: list[str]
    licence: str | None
    checked: LogprobDistance | None = None


def export_version(registry: Registry, reference: str, to: Form, output: Path) -> ExportedModel:
    """Write a version (`name@N` or `name`) into the new folder `output`.

    Raises NotFound for a version or weights that are gone; BadInput where the folder exists, the
    version has no adapter, or GGUF cannot hold it; Corrupt where files are damaged, or a GGUF file
    does not read back as the version.
    """
    home, version = registry.home, registry.resolve(reference)
    if output.exists():
        raise BadInput(f"{output} exists: give a new folder", param="output")
    directory = materialize(home, home.checkpoint(version.checkpoint))
    manifest = checkpoints.verify(directory)
    lines = ancestry(registry, version.id)
    licence, source = licence_of(home, lines)
    draft = durable.draft_directory(output)
    distance = None
    try:
        whole = directory
        if to != "adapter" and checkpoints.base_of(directory) is not None:
            whole = adapters.merge(directory)
        if to == "adapter":
            if not (directory / checkpoints.ADAPTER).is_dir():
                raise BadInput(
                    f"{version.id} has whole weights and no adapter: give --to hf", param="to"
                )
            shutil.copytree(directory / checkpoints.ADAPTER, draft, dirs_exist_ok=True)
        elif to == "hf":
            _copy(whole, draft)
        else:
            file = draft / f"{version.name}-{version.number}.gguf"
            gguf_export.write_gguf(whole, file, version.id, licence)
            ids = [prompt.token_ids for prompt in manifest.probe] or [list(range(64))]
            distance = gguf_export.compare(file, whole, ids)
        (draft / CARD).write_text(model_card(lines, licence, source, manifest.dataset))
        if not checkpoints.publish_folder(draft, output):
            raise BadInput(f"{output} exists: give a new folder", param="output")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    files = sorted(path.name for path in output.iterdir())
    return ExportedModel(
        id=version.id, to=to, output=str(output), files=files, licence=licence, checked=distance
    )


def _copy(whole: Path, target: Path) -> None:
    """Copy the files of a whole model, with its manifest but without a card: that is made anew."""
    manifest = checkpoints.read_manifest(whole)
    files = {name: sha for name, sha in manifest.files.items() if "/" not in name and name != CARD}
    for name in files:
        shutil.copyfile(whole / name, target / name)
    text = checksums.record_text(manifest.model_copy(update={"files": files, "delta": None}))
    durable.write_file(target / checkpoints.MANIFEST, text)


def ancestry(registry: Registry, version: str) -> list[dict[str, Any]]:
    """Return a version's lineage, itself first, then its parent, and so on."""
    kin = {one["id"]: one for one in lineage_of(registry, version)}
    lines, at = [], kin.get(version)
    while at is not None and at not in lines:
        lines.append(at)
        at = kin.get(at["parent"] or "")
    return lines


def licence_of(home: Home, lines: list[dict[str, Any]]) -> tuple[str | None, str]:
    """Return the licence that the card of a version or its nearest parent states, and whose."""
    for one in lines:
        path = home.checkpoint(one["checkpoint"]) / CARD
        if path.is_file() and (found := _LICENCE.match(path.read_text(errors="replace"))):
            return found[1], one["id"]
    return None, ""


def model_card(
    lines: list[dict[str, Any]], licence: str | None, source: str, dataset: str | None
) -> str:
    """Return the card of `lines[0]`, in the form of a hub's README.md."""
    one, parents = lines[0], lines[1:]
    about = one["about_dataset"]
    head = [f"license: {licence}"] if licence else []
    head += [f"base_model: {parents[-1]['id']}"] if parents else []
    decisions = [
        f"- {event['kind'].replace('_', ' ')}"
        f" {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(event['time']))}"
        f" by {event['who'] or 'nobody named'}: {event['reason'] or 'no reason is on record'}"
        f"{_numbers(event['numbers'])}"
        for event in one["events"]
    ]
    data = "These weights were not trained here, or nothing of their data is on record."
    if dataset:
        told = {key: value for key, value in about.items() if key != "versions"}
        data = f"Training set `{dataset}`{_numbers(told)}."
        data += f" Sampled by {', '.join(about['versions'])}." if about.get("versions") else ""
    trained = f"Job `{one['job']}`{_numbers(one['metrics'])}." if one["job"] else "None here."
    below = [f"- `{each['id']}`, weights {each['weights_sha256']}" for each in parents]
    terms = f"{licence}, as the card of `{source}` states."
    if licence is None:
        terms = "No licence is on record: ask where the weights come from before you pass them on."
    parts = {
        "Decision": "\n".join(decisions) or "None is on record.",
        "Data": data,
        "Training": trained,
        "Parents": "\n".join(below) or "None is on record.",
        "Licence": terms,
    }
    text = "\n".join(["---", *head, "tags: [cray-agents]", "---", f"# {one['id']}", ""])
    text += f"Weights {one['weights_sha256']}.\n"
    return text + "".join(f"\n## {title}\n\n{said}\n" for title, said in parts.items())


def _numbers(values: dict[str, Any]) -> str:
    """Return the plain values of a record in brackets; "" without any."""
    plain = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
        if isinstance(value, str | int | float)
    ]
    return f" ({', '.join(plain)})" if plain else ""
