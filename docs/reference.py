"""Reference: pages that `make docs` makes of the code, so that none of their lines is kept by hand.

mkdocs calls `on_files` (`hooks` in mkdocs.yml). Each function of PAGES returns a page: Python names
by their docstrings, commands by their options, HTTP routes by the OpenAPI document, settings by
their descriptions, screens by the pictures in docs/screens, the notebook by its cells.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from cray_agents.cli import app
from cray_agents.config.job_section import JobContainer, JobSettings
from cray_agents.config.settings import Config, PriceSettings, WatchSettings
from cray_agents.runtime.gateway.app import routes
from cray_agents.runtime.gateway.http.routing import IN_RUN, TAGS, document

PACKAGES = ("cray_agents", *(f"cray_agents.{name}" for name in ("agent", "loop", "training")),
            "cray_agents.notebook", "cray_agents.testing")  # fmt: skip
SECTION = re.compile(r"^    (\*{0,2}[\w, *]+): (.*(?:\n {8}.*)*)", re.MULTILINE)
NO_DEFAULT = inspect.Parameter.empty


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those that lie in docs/."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(make())))
    return files


# ---- Python
def python() -> Iterator[str]:
    """The names of the facade and of its packages, each once."""
    yield "# Python\n\nThe public names, by the package that they are imported from."
    home: dict[str, str] = {}
    for package in PACKAGES:
        module = import_module(package)
        text, others = inspect.getdoc(module) or "", []
        yield f"\n## {package}\n\n{prose(text.split('.')[0])}."
        for name in sorted(module.__all__, key=str.lower):
            if name in home:
                others.append(f"[`{name}`](#{name.lower()})")
            else:
                home[name] = package
                yield from described(name, getattr(module, name))
        if others:
            yield f"\nAlso here: {', '.join(others)}."


def described(name: str, thing: Any) -> Iterator[str]:
    """A class with its arguments and methods, a function, or the values of a type."""
    yield f"\n### {name}\n"
    if not isinstance(thing, type) and not inspect.isfunction(thing):
        yield f"`{type_name(thing)}`"
        return
    yield from documented(thing, name)
    members = vars(thing) if isinstance(thing, type) else {}
    for method, member in members.items():
        call = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if method.startswith("_") or method == "model_config":
            continue
        if isinstance(member, property) and member.__doc__:
            yield f"\n**`{name}.{method}`**: {prose(inspect.getdoc(member) or '')}"
        elif inspect.isfunction(call) and call.__doc__:
            prefix = "await " if inspect.iscoroutinefunction(call) else ""
            arguments = ", ".join(parameter_names(call))
            yield f"\n**`{prefix}{name}.{method}({arguments})`**\n"
            yield from documented(call)
    if hasattr(thing, "__members__"):
        yield f"\nValues: {', '.join(f'`{value}`' for value in thing.__members__)}."


def documented(thing: Any, name: str = "") -> Iterator[str]:
    """The docstring, with a table of the arguments, which has those of a named thing always."""
    text, meanings, after = sections(inspect.getdoc(thing) or "")
    yield prose(text)
    for base in bases(thing):
        described, inherited, _ = sections(inspect.getdoc(base) or "")
        meanings = inherited | meanings
        yield f"\n`{base.__name__}`: {prose(described)}"
    given = arguments_of(thing) if name or meanings else {}
    if given:
        yield "\n| argument | type | default | meaning |\n|---|---|---|---|"
        for argument, (kind, default) in given.items():
            yield row(code(argument), code(kind), code(default), prose(meanings.get(argument, "")))
    if after:
        yield "\n" + prose(after)


def sections(text: str) -> tuple[str, dict[str, str], str]:
    """A docstring's text, the meanings of its arguments by name, and the text behind them."""
    before, _, rest = text.partition("\nArgs:\n")
    listed, _, after = re.sub(r"\n(?=\S)", "\0", rest, count=1).partition("\0")
    meanings = {
        one: " ".join(meaning.split())
        for names, meaning in SECTION.findall(listed)
        for one in names.split(", ")
    }
    return before.strip(), meanings, after.strip()


def bases(thing: Any) -> list[type]:
    """The classes that a record has fields of."""
    if not (isinstance(thing, type) and issubclass(thing, BaseModel)):
        return []
    return [
        base for base in thing.__mro__[1:]
        if base.__module__.startswith("cray_agents") and getattr(base, "model_fields", None)
    ]  # fmt: skip


def arguments_of(thing: Any) -> dict[str, tuple[str, str]]:
    """Type and default of each argument that a caller may give."""
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        return {
            name: (type_name(field.annotation), "" if field.is_required() else default_of(field))
            for name, field in thing.model_fields.items()
        }
    if isinstance(thing, type) and hasattr(thing, "__members__"):
        return {}
    try:  # a class may have a `__new__` that takes whatever comes
        call = thing.__init__ if isinstance(thing, type) else thing
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # of a class that has no constructor of its own
        return {}
    return {
        one.name: (type_name(one.annotation), value_of(one.default))
        for one in parameters
        if one.name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """The names of a method's arguments."""
    parameters = list(inspect.signature(function).parameters.values())
    given = [one for one in parameters if one.name not in ("self", "cls")]
    return [one.name if one.default is NO_DEFAULT else f"{one.name}=…" for one in given]


def type_name(kind: Any) -> str:
    """A type as one writes it, without the modules that its names are from."""
    if kind is NO_DEFAULT:
        return ""
    if kind is types.NoneType:
        return "None"
    if typing.get_origin(kind) is typing.Annotated:
        return type_name(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(type_name(one) for one in typing.get_args(kind))
    written = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"ForwardRef\('(.+?)'\)", r"\1", re.sub(r"\b[a-z_]\w*\.(?=\w)", "", written))


def default_of(field: Any) -> str:
    """The default of a record's field."""
    return value_of(field.default if field.default_factory is None else field.default_factory)


def value_of(default: Any) -> str:
    """A default, if it is short and says something."""
    if default is NO_DEFAULT:
        return ""
    if isinstance(default, type):
        return {list: "[]", dict: "{}", str: "str"}.get(default, f"{default.__name__}()")
    written = repr(default)
    if "<factory>" in written or written.startswith("functools"):
        return "…"
    return written if len(written) <= 40 and not written.startswith("<") else "…"


# ---- HTTP
def http() -> Iterator[str]:
    """The routes by their heading in the OpenAPI document, with the least role that may ask."""
    described = document(routes())["paths"]
    yield "# HTTP\n"
    yield (
        "The routes of the gateway. `GET /openapi.json` of a running gateway has the schemas of "
        "bodies and answers. The role is the least one that may call a route; `open` needs no key. "
        "Model calls are also served below `/runs/RUN_ID`, which names their run."
    )
    for tag, about in TAGS.items():
        yield f"\n## {tag}\n\n{about}\n"
        yield "| method | path | role | does |\n|---|---|---|---|"
        for route in routes():
            operation = described[route.path_format][route.method.lower()]
            if tag in operation["tags"] and not route.path_format.startswith(IN_RUN):
                role = getattr(route.role, "name", route.role)
                names = [f"`{one['name']}`" for one in operation.get("parameters", ())
                         if one["in"] == "query"]  # fmt: skip
                query = f" Query: {', '.join(names)}." if names else ""
                summary = f"{prose(operation['summary'])}.{query}"
                yield row(route.method, code(route.path_format), role, summary)


# ---- the command line
def commands() -> Iterator[str]:
    """Each command with its arguments and options."""
    command = typer.main.get_command(app)
    yield "# Commands\n"
    yield "These options may stand before or behind every command:\n"
    yield from options(command)
    yield from leaves("cray-agents", command)


def leaves(path: str, command: Any) -> Iterator[str]:
    """A command, or those of a group."""
    inner = getattr(command, "commands", {})
    for name, one in inner.items():
        yield from leaves(f"{path} {name}", one)
    if inner:
        return
    needed = [usage(one) for one in command.params if one.param_type_name == "argument"]
    text, _, listed = command.help.partition("\b\n")
    yield f"\n## {path.removeprefix('cray-agents ')}\n\n```\n{' '.join([path, *needed])}\n```\n"
    yield prose(plain(text))
    if listed:
        yield f"\n```\n{plain(listed).strip()}\n```"
    yield ""
    yield from options(command)


def usage(argument: Any) -> str:
    """An argument as the line of usage shows it."""
    if argument.metavar:
        return str(argument.metavar)
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def options(command: Any) -> Iterator[str]:
    """A table of a command's arguments and options."""
    shown = [one for one in command.params if not one.hidden and one.name != "help"]
    if shown:
        yield "| argument or option | default | meaning |\n|---|---|---|"
    for one in shown:
        is_option = one.param_type_name == "option"
        names = ", ".join([*one.opts, *one.secondary_opts]) if is_option else usage(one)
        value = "" if not is_option or one.is_flag else f" {(one.metavar or one.name).upper()}"
        default = "" if one.default in (None, False, (), []) else str(one.default)
        yield row(code(names + value), code(default), prose(plain(one.help or "")))


def plain(text: str) -> str:
    """Help without the marks of rich."""
    return text.replace("\\[", "[").replace("\b", "")


# ---- settings
def settings() -> Iterator[str]:
    """The keys of cray-agents.toml."""
    yield "# Settings\n"
    yield (
        "The keys of `cray-agents.toml`. The variable `CRAY_AGENTS_` and the key in capitals "
        "overrides the file. [Operations](../operations.md#configure) says how to use them."
    )
    sections = {"Keys": Config, "[job]": JobSettings, "[job.container]": JobContainer}
    sections |= {"[prices]": PriceSettings, "[watch]": WatchSettings}
    for title, section in sections.items():
        yield f"\n## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|"
        hints = typing.get_type_hints(section)
        for name, field in section.model_fields.items():
            default = "" if field.is_required() else default_of(field)
            default = str(field.default) if name == "home" else default
            kind = "section" if name in ("job", "prices", "watch", "container") else hints[name]
            shown = (kind if isinstance(kind, str) else type_name(kind), default)
            yield row(code(name), *map(code, shown), prose(field.description or ""))


# ---- the notebook
def notebook() -> Iterator[str]:
    """The cookbook's notebook, with what its cells showed when docs/notebook.py ran it."""
    book = json.loads((Path(__file__).parents[1] / "cookbook" / "10_notebook.ipynb").read_text())
    for cell in book["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            yield f"<div>{output['data']['text/html']}</div>"
        yield ""


# ---- pictures
def screens() -> Iterator[str]:
    """Each screen's picture beside that of before the dashboard was made anew, if there is one."""
    folder = Path(__file__).parent / "screens"
    yield "# Screens, before and after\n"
    yield (
        "Pictures of [the dashboard](../dashboard.md) by `docs/screenshots.py`. Those on the left "
        "are of 28 November 2026, before its screens were made to answer questions; `-`: there is "
        "none. A click on one shows it whole."
    )
    for name in sorted({file.stem for file in folder.rglob("*.webp")}):
        title = name.replace("_", ", ").capitalize()
        places = (Path("before", f"{name}.webp"), Path(f"{name}.webp"))
        shown = [f"[![{title}]({link})]({link})" if (folder / place).exists() else "-"
                 for place in places for link in [f"../screens/{place}"]]  # fmt: skip
        yield f"\n## {title}\n\n| before | after |\n|---|---|\n{row(*shown)}"


# ---- Markdown
def prose(text: str) -> str:
    """Text outside of code, in which no character is taken for HTML or emphasis."""
    parts = re.split(r"(``[^`]*``|`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*_\[\]|])", r"\\\1", part.replace("<", "&lt;")) for part in parts[::2]]
    return "".join(parts)


def code(text: str) -> str:
    """Text as code."""
    return f"`{text}`" if text else ""


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "python": python,
    "commands": commands,
    "http": http,
    "settings": settings,
    "screens": screens,
    "notebook": notebook,
}
