"""Tree of ARCHITECTURE.md: a caption for each folder of code, its docstring's first line.

python -m tests.support.architecture        writes the tree anew, between its two marks
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- tree -->", "<!-- /tree -->"
FOLDERS = ("cray_agents", "tools", "runtime", "trainers")
WIDTH = 22  # columns of a name


def tree() -> str:
    """The tree as it is to stand in the document, its marks included."""
    lines = [line for name in FOLDERS for line in _folder(ROOT / name, 0)]
    return "\n".join([BEGIN, "```", *lines, "```", END])


def written() -> str:
    """The tree as it stands in the document."""
    text = DOCUMENT.read_text()
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def _folder(folder: Path, depth: int) -> list[str]:
    file = folder / "__init__.py"
    text = (ast.get_docstring(ast.parse(file.read_text())) or "") if file.exists() else ""
    caption = text.split("\n\n")[0].replace("\n", " ").strip()
    lines = [f"{'  ' * depth + folder.name + '/':<{WIDTH}} {caption}".rstrip()]
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not inner.is_symlink() and any(inner.glob("*.py")):
            lines += _folder(inner, depth + 1)
    return lines


def main() -> None:
    """Write the tree into the document."""
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text.replace(written(), tree()))


if __name__ == "__main__":
    main()
