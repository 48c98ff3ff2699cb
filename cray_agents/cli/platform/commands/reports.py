"""`reports` and `view` commands: write about a platform with verified quotes, and show its pages.

They ask the running platform, which compares every quote with what is recorded.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.text import Text

from cray_agents.cli.platform.platform_process import ask_once, platform_at
from cray_agents.cli.screen import (
    HomeOption,
    JsonOption,
    UrlOption,
    console,
    disarm,
    errors,
    one_line,
    root,
    show,
    when,
)
from cray_agents.errors import BadInput
from cray_agents.platform.client import Platform

ReportId = Annotated[str, typer.Argument(help="The report's id.")]

reports = typer.Typer(
    no_args_is_help=True, help="Reports with verified quotes: list, show, write, delete."
)


def add_to(app: typer.Typer) -> None:
    """Register the command group, and the command `view`."""
    app.add_typer(reports, name="reports")
    app.command()(view)


@reports.command("list")
def list_reports(
    home: HomeOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List the reports, the last written first."""

    async def read(platform: Platform) -> list[dict[str, Any]]:
        return [row async for row in platform.views.reports()]

    rows = [
        {**row, "when": when(row["updated"])}
        for row in ask_once(platform_at(root(home), url), read)
    ]
    show(rows, ["id", "title", "author", "when", "bytes", "damaged"], as_json=as_json)


@reports.command("show")
def show_report(
    report: ReportId, home: HomeOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show a report, and which of its quotes do not hold. Exit code 1: some do not."""
    answer = ask_once(platform_at(root(home), url), lambda platform: platform.views.report(report))
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        console.print(Markdown(disarm(answer["text"]), hyperlinks=False))
    _end(answer, as_json)


@reports.command("write")
def write(
    report: ReportId,
    file: Annotated[Path, typer.Argument(help="A Markdown file, or - for standard input.")],
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a report, or replace it. Exit code 1: it is stored, and some quotes do not hold.

    A quote is the title of a link: \\[gave up](#/run/run_01?t=4 "I cannot do this.").
    """
    text = _text_of(file)
    made = ask_once(
        platform_at(root(home), url), lambda platform: platform.views.write_report(report, text)
    )
    if as_json:
        print(json.dumps(made, indent=2))
    _end(made, as_json)


@reports.command("delete")
def delete(report: ReportId, home: HomeOption = None, url: UrlOption = None) -> None:
    """Delete a report for good."""
    ask_once(platform_at(root(home), url), lambda platform: platform.views.delete_report(report))
    console.print(f"deleted {report}", markup=False, highlight=False)


def view(
    target: Annotated[str, typer.Argument(help="A run, or a page's address from #/ on.")],
    turn: Annotated[
        int | None, typer.Option(min=1, help="Of a run, as `runs show` counts them.")
    ] = None,
    quote: Annotated[str, typer.Option(help="Words of that turn, to be marked.")] = "",
    reason: Annotated[str, typer.Option(help="Why they are marked.")] = "",
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show something on the pages of the dashboard that are open with this key.

    Exit code 1: no page is open, or the words are not there.
    """
    if quote and turn is None:
        raise BadInput("--quote marks words of a turn: give --turn", param="turn")
    if turn is not None and target.startswith(("#/", "/#/")):
        raise BadInput("--turn is for a run's id; in an address it is t=, from 0", param="turn")
    address = target if target.startswith(("#/", "/#/")) else f"#/run/{target}"
    address += "" if turn is None else f"?t={turn - 1}"
    marks = [{"turn": turn - 1, "quote": quote, "reason": reason}] if quote and turn else []
    answer = ask_once(
        platform_at(root(home), url), lambda platform: platform.views.show(address, marks)
    )
    if as_json:
        print(json.dumps(answer, indent=2))
    missing = [mark for mark in answer["highlight"] if not mark["ok"]]
    if not as_json:
        pages = answer["pages"]
        console.print(
            f"{pages} {'page shows' if pages == 1 else 'pages show'} {address}", markup=False
        )
    if not answer["pages"]:
        errors.print("No page is open with this key: `cray-agents dashboard` opens one.")
    if missing:
        errors.print(f"Turn {turn} has no such words.")
    if missing or not answer["pages"]:
        raise typer.Exit(1)


def _text_of(file: Path) -> str:
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}", param="file") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not UTF-8: {error}", param="file") from error


def _end(report: dict[str, Any], as_json: bool) -> None:
    """Say how many citations hold and which do not. Raises Exit where some do not."""
    count, broken = len(report["citations"]), report["broken"]
    if not as_json:
        errors.print(f"{count - broken} of {count} citations hold", highlight=False)
        for one in report["citations"]:
            if not one["ok"]:
                errors.print(
                    Text(f"  {one_line(one['label'])} ({one['href']}): {one_line(one['error'])}"),
                    soft_wrap=True,
                )
    if broken:
        raise typer.Exit(1)
