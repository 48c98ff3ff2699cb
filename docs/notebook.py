"""Outputs of the cookbook's notebook: runs it, and keeps in it what its cells show.

    cray-agents up --model smollm2 --name m
    .venv/bin/python docs/notebook.py      writes cookbook/10_notebook.ipynb

Asks the platform at CRAY_AGENTS_URL. docs/reference.py makes a page of the notebook.
"""

import json
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

BOOK = Path(__file__).parents[1] / "cookbook" / "10_notebook.ipynb"


def main() -> None:
    """Run the cells, each with what those before it left."""
    book = json.loads(BOOK.read_text())
    shell = InteractiveShell.instance()
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = shown(shell, "".join(cell["source"]))
    BOOK.write_text(json.dumps(book, indent=1) + "\n")


def shown(shell: InteractiveShell, source: str) -> list[dict[str, Any]]:
    """What a cell shows in the end, as HTML. Raises what the cell raises."""
    with capture_output() as captured:
        done = shell.run_cell(source)
        done.raise_error()
    formatted, _ = shell.display_formatter.format(done.result)
    last = [output.data for output in captured.outputs[-1:]]  # each update replaces the one before
    return [
        {"output_type": kind, "metadata": {}, "data": {"text/html": data["text/html"]}} | more
        for kind, datas, more in (
            ("display_data", last, {}),
            ("execute_result", [formatted], {"execution_count": None}),
        )
        for data in datas
        if "text/html" in data
    ]


if __name__ == "__main__":
    main()
