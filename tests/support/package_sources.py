"""Package sources: what the Python files of a package define, read without an import of it."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
_MEMBER = re.compile(r"\w*\([^)]*\)|\w+")


class Row(NamedTuple):
    """A member of a class, or of a module if `kind` is ""; `call` is how `user` calls it."""

    user: str
    module: str
    kind: str = ""
    member: str = ""
    call: str = ""

    def __str__(self) -> str:
        whole = ".".join(filter(None, (self.module, self.kind, self.member)))
        return f"{self.user}: {whole}{self.call}"


def rows(table: str) -> Iterator[Row]:
    """A table's rows. Indented by 0: the user; by 2: a module; by 4: `class: members`, or `-:`."""
    user = module = ""
    for line in table.strip("\n").splitlines():
        match len(line) - len(line.lstrip()):
            case 0:
                user = line
            case 2:
                module = line.strip()
            case _:
                kind, _, members = line.strip().partition(":")
                for member in _MEMBER.findall(members):
                    name, bracket, arguments = member.partition("(")
                    yield Row(user, module, kind.strip("-"), name, bracket + arguments)


@dataclass
class Module:
    """Its classes and functions, and all names that it defines, imports, assigns or quotes.

    A name that it imports from the package has the module that it is from; others have "".
    """

    made: dict[str, ast.ClassDef | Function] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


class Sources:
    """A package's files, by the dotted names of its modules; the package itself is ""."""

    def __init__(self, package: Path) -> None:
        self.package = package

    def file(self, module: str) -> Path:
        place = self.package.joinpath(*filter(None, module.split(".")))
        return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")

    @functools.cache  # noqa: B019 - for all rows of a run
    def module(self, name: str) -> Module:
        found, file = Module(), self.file(name)
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef | Function):
                found.made[node.name] = node
                found.names.setdefault(node.name, "")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.names.setdefault(node.id, "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.names.setdefault(node.value, "")
            elif isinstance(node, ast.ImportFrom):
                parts = str(node.module).split(".") if node.module else []
                if node.level:
                    here = name.split(".")
                    parts[:0] = here[: len(here) + (file.stem == "__init__") - node.level]
                elif parts[0] == self.package.name:
                    del parts[0]
                found.names |= {one.asname or one.name: ".".join(parts) for one in node.names}
        return found

    def made(self, module: str, name: str) -> tuple[str, ast.ClassDef | Function | None]:
        """A class or function and the module that defines it; None if it is neither."""
        known = self.module(module)
        if name not in known.made and (origin := known.names.get(name)):
            return self.made(origin, name) if self.file(origin).exists() else (origin, None)
        return module, known.made.get(name)

    @functools.cache  # noqa: B019
    def members(self, module: str, kind: str) -> dict[str, ast.AST]:
        """Methods, fields and attributes of a class and its bases; none if there is no class."""
        module, made = self.made(module, kind)
        found: dict[str, ast.AST] = {}
        if not isinstance(made, ast.ClassDef):
            return found
        for base in made.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(named, ast.Name):
                found |= self.members(module, named.id)
        for node in made.body:
            for part in ast.walk(node):
                match part:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        found.setdefault(name, part)
            if isinstance(node, Function):
                found[node.name] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node
            elif isinstance(node, ast.Assign):
                found |= {one.id: node for one in node.targets if isinstance(one, ast.Name)}
        return found

    def problem(self, row: Row) -> str:
        """What is not as a row says; "" if all is."""
        place = ".".join(filter(None, (self.package.name, row.module, row.kind)))
        if not self.file(row.module).exists():
            return f"there is no module {place.removesuffix(f'.{row.kind}')}"
        if not row.kind:
            known = self.module(row.module).names
            inner = self.file(f"{row.module}.{row.member}".strip("."))
            if row.member not in known and not inner.exists():
                return f"{place} has no {row.member}"
            return _call_problem(row, self.made(row.module, row.member)[1], method=False)
        if not isinstance(self.made(row.module, row.kind)[1], ast.ClassDef):
            return f"there is no class {place}"
        members = self.members(row.module, row.kind)
        if row.member and row.member not in members:
            return f"{place} has no {row.member}"
        if row.member or "__init__" in members:
            return _call_problem(row, members[row.member or "__init__"], method=True)
        fields = {name: one for name, one in members.items() if isinstance(one, ast.AnnAssign)}
        bare = [*takewhile(lambda name: fields[name].value is None, fields)]
        return _mismatch(row.call, Parameters([*fields], [*fields], bare))


class Parameters(NamedTuple):
    """Of a function: the positional ones, those that may be named, those without a default.

    `*arguments` are the positional one "*", `**options` the named one "**".
    """

    positional: list[str]
    named: list[str]
    bare: list[str]


def parameters(made: Function, *, method: bool) -> Parameters:
    spec = made.args
    positional = [one.arg for one in (*spec.posonlyargs, *spec.args)]
    bare = positional[: len(positional) - len(spec.defaults)][method:]
    bare += [o.arg for o, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is None]
    positional = positional[method:]
    named = [*positional, *(one.arg for one in spec.kwonlyargs), *["**"] * bool(spec.kwarg)]
    return Parameters([*positional, *["*"] * bool(spec.vararg)], named, bare)


def _call_problem(row: Row, made: ast.AST | None, *, method: bool) -> str:
    if not row.call:
        return ""
    if not isinstance(made, Function):
        return f"{row.member} is no function, and {row.user} calls it"
    static = (ast.unparse(one) == "staticmethod" for one in made.decorator_list)
    return _mismatch(row.call, parameters(made, method=method and not any(static)))


def _mismatch(call: str, takes: Parameters) -> str:
    """Why a call fails. Its positional arguments may have any name; "..." stands for others."""
    made = ast.parse(f"f{call}", mode="eval").body
    assert isinstance(made, ast.Call)
    given = [one for one in made.args if isinstance(one, ast.Name)]
    words = [str(one.arg) for one in made.keywords]
    if len(given) > len(takes.positional) and "*" not in takes.positional:
        return f"it takes ({', '.join(takes.positional)}), and not {call}"
    if "**" not in takes.named and (unknown := set(words) - {*takes.named}):
        return f"it takes no {', '.join(sorted(unknown))}"
    if len(given) < len(made.args):
        return ""
    left = [one for one in takes.bare if one not in {*takes.positional[: len(given)], *words}]
    return f"it also wants {', '.join(left)}" if left else ""
