"""Tracker worker: writes the numbers of jobs and loops to one experiment tracker.

    PYTHON tracker_worker.py tensorboard|wandb|trackio FOLDER

trackers.py starts it and sends it a JSON object a line: `run`, `config`, `step`, `time`, `values`;
`run` and `ended`; or `flush`, which is answered by its number once all before it was handed over.
It imports nothing of this package, so that any Python that has the tracker can run it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

PROJECT = "cray-agents"


class TensorBoard:
    """A folder of event files a run, which any TensorBoard shows: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # it would import it for tensors
        from tensorboardX import SummaryWriter

        self._writer, self._folder, self._open = SummaryWriter, folder, dict[str, Any]()

    def log(self, line: dict[str, Any]) -> None:
        """Write the numbers of a step."""
        run = line["run"]
        if run not in self._open:
            self._open[run] = self._writer(str(self._folder / run), write_to_disk=True)
            if line["config"]:
                text = json.dumps(line["config"], indent=1)
                self._open[run].add_text("config", f"```\n{text}\n```", walltime=line["time"])
        for name, value in line["values"].items():
            self._open[run].add_scalar(name, value, line["step"], walltime=line["time"])

    def flush(self) -> None:
        """Have all on disk."""
        for writer in self._open.values():
            writer.flush()

    def end(self, run: str) -> None:
        """Close a run's file."""
        if run in self._open:
            self._open.pop(run).close()


class Wandb:
    """Weights & Biases, or trackio, which has the same functions; set up by their own variables."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self._module, self._options, self._open = module, options, dict[str, Any]()

    def log(self, line: dict[str, Any]) -> None:
        """Send the numbers of a step."""
        run = line["run"]
        if run not in self._open:
            named = {"project": PROJECT, "name": run, "config": line["config"], "resume": "allow"}
            self._open[run] = self._module.init(**named, **self._options_of(run))
        self._open[run].log(line["values"], step=line["step"])

    def _options_of(self, run: str) -> dict[str, Any]:
        return self._options | ({"id": run} if "id" in self._options else {})

    def flush(self) -> None:
        """Have all on disk: wandb writes by itself, trackio at a run's end, which may go on."""
        for run in list(self._open) if "id" not in self._options else ():
            self.end(run)

    def end(self, run: str) -> None:
        """Tell that no more follows."""
        if run in self._open:
            self._open.pop(run).finish()


def tracker(name: str, folder: Path) -> TensorBoard | Wandb:
    """Return the tracker of a name. Raises ImportError."""
    if name == "tensorboard":
        return TensorBoard(folder)
    module = __import__(name)
    if name == "wandb":
        return Wandb(module, {"id": "", "dir": str(folder), "reinit": "create_new"})
    return Wandb(module, {"embed": False})


def main() -> None:
    """Serve until the input ends."""
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is no answer
    writer, runs = tracker(sys.argv[1], folder), set[str]()
    for text in sys.stdin:
        line = json.loads(text)
        if "values" in line:
            runs.add(line["run"])
            writer.log(line)
        elif "ended" in line:
            runs.discard(line["run"])
            writer.end(line["run"])
        else:
            writer.flush()
            print(line["flush"], file=answers, flush=True)
    for run in runs:
        writer.end(run)


if __name__ == "__main__":
    main()
