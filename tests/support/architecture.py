"""Tree of ARCHITECTURE.md: a caption for each file, its module's first line.

python -m tests.support.architecture        writes the tree anew, between its two marks
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- tree -->", "<!-- /tree -->"
FOLDERS = ("cray_agents", "tools", "runtime", "trainers", "cookbook", "tests/support")
WIDTH = 28  # columns of a name


def tree() -> str:
    """The tree as it is to stand in the document, its marks included."""
    blocks = [BEGIN]
    for name in FOLDERS:
        blocks += ["", f"### {name}/", "", "```", *_folder(ROOT / name, 0), "```"]
    return "\n".join([*blocks, "", END])


def written() -> str:
    """The tree as it stands in the document."""
    text = DOCUMENT.read_text()
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def _folder(folder: Path, depth: int) -> list[str]:
    files = sorted(folder.glob("*.py"), key=lambda file: (file.stem != "__init__", file.stem))
    lines = []
    for file in files:
        if file.stem == "__init__":
            lines.append(_line(f"{folder.name}/", file, max(0, depth - 1)))
        else:
            lines.append(_line(file.name, file, depth))
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not inner.is_symlink() and any(inner.glob("**/*.py")):
            if not (inner / "__init__.py").exists():
                lines.append(f"{'  ' * depth}{inner.name}/")
            lines += _folder(inner, depth + 1)
    return lines


def _line(name: str, file: Path, depth: int) -> str:
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = text.split("\n\n")[0].replace("\n", " ").strip()
    return f"{'  ' * depth + name:<{WIDTH}} {first}".rstrip()


def main() -> None:
    """Write the tree into the document."""
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text.replace(written(), tree()))


if __name__ == "__main__":
    main()
