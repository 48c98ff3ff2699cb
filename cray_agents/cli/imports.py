"""`import` command: read conversations and runs from files into the store."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.progress import DownloadColumn

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import (
    make_store,
    note,
    open_root,
    print_json,
    progress_bar,
    say,
    settings,
)
from cray_agents.errors import BadInput
from cray_agents.records import Split

if TYPE_CHECKING:
    from cray_agents.runtime.imports import Imported, Importing

FORMATS = (
    "openai (chats, preferences), sharegpt, atif, openenv, jsonl (whole records, by `export`), or"
    " documents (texts: .txt, .jsonl, .parquet)"
)


commands = Commands()


@commands.command("import")
def import_runs(
    file: Annotated[
        Path,
        typer.Argument(help="A file of JSON lines, a JSON array or one object; also .zst, .gz."),
    ],
    form: Annotated[str, typer.Option("--format", "-f", help=f"The file's format: {FORMATS}.")],
    loop: Annotated[str | None, typer.Option(help="The loop that the runs belong to.")] = None,
    split: Annotated[str | None, typer.Option(help="The split: train, holdout or test.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag for all runs; repeatable.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent whose runs they are.")] = None,
    reward: Annotated[float | None, typer.Option(help="A reward for all runs.")] = None,
) -> None:
    """Import conversations as runs, or a file of documents; what is there is not doubled."""
    from cray_agents.runtime.imports import Importing

    if form == "documents":
        of_runs = {
            "loop": loop, "split": split, "tag": tag, "agent": agent, "reward": reward
        }  # fmt: skip
        _import_documents(file, [name for name, value in of_runs.items() if value is not None])
        return
    if split is not None and split not in get_args(Split):
        raise BadInput(
            f"--split must be one of {', '.join(get_args(Split))}; not {split!r}", param="split"
        )
    options = Importing(
        tags=tuple(tag or ()),
        loop=loop,
        split=split,  # type: ignore[arg-type]
        agent=agent,
        reward=reward,
    )
    done = asyncio.run(_import(file, form, options))
    if given().json:
        print_json(asdict(done))
        return
    duplicates = f"; {done.duplicates} were there, or twice in it" if done.duplicates else ""
    say(f"{done.runs} runs imported, {done.calls} model calls{duplicates}")
    if done.replaced:
        note(f'in {done.replaced} records half a character (a lone surrogate) became "?"')
    if done.forgotten:
        note(
            f"{done.forgotten} events are of runs that were forgotten here: import them again "
            "after `cray-agents maintain compact`"
        )


def _import_documents(file: Path, of_runs: list[str]) -> None:
    """Keep a file of documents under the root, for `dataset build --documents`."""
    from cray_agents.runtime.datasets.documents import store_documents
    from cray_agents.runtime.files.files import Files

    if of_runs:
        raise BadInput(f"--{of_runs[0]} has no effect: documents are no runs", param=of_runs[0])
    kept, count = store_documents(Files(open_root(settings(), new=True)), file)
    if given().json:
        print_json({"id": kept.id, "documents": count, "bytes": kept.bytes})
        return
    say(f"{count:,} documents imported as {kept.id}")
    say(f"next: cray-agents dataset build --documents {kept.id} --tokenizer DIR --set max_tokens=N")


async def _import(file: Path, form: str, options: "Importing") -> "Imported":
    from cray_agents.runtime.imports import import_file

    config = settings()
    options = replace(options, reward_limit=config.reward_limit)
    store = make_store(config, new=True)
    try:
        with progress_bar(DownloadColumn()) as bar:
            task = bar.add_task("importing", total=None)

            def show(done: "Imported", read: int, size: int) -> None:
                bar.update(task, description=f"{done.runs} runs", completed=read, total=size)

            return await import_file(store, file, form, options, show)
    finally:
        await store.close()
