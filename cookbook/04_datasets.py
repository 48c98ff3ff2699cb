"""04: conversations that you have, as a training set, and in formats that others read.

    python cookbook/04_datasets.py [FOLDER]     FOLDER: where it all goes; default: ./datasets-demo

No platform, no GPU, half a minute. It writes a file of chats in OpenAI's fine-tuning format, and
then does what you would type: each command is shown before it runs. One chat asks what a benchmark
asks: it is left out of the training set, counted, and told with its reason.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cray_agents.testing import make_tiny_model

CITIES = ["Oslo", "Bern", "Rome", "Lima", "Cairo", "Quito", "Tunis", "Seoul", "Riga", "Accra"]
ASK = "Please tell me in one short sentence whether I will need an umbrella in {} tomorrow"
BENCHMARK = ASK.format("Lima")


def chat(city: str, answer: str) -> list[dict[str, str]]:
    """The messages of a conversation."""
    turns = [("system", "Answer briefly."), ("user", ASK.format(city)), ("assistant", answer)]
    return [{"role": role, "content": text} for role, text in turns]


def cray_agents(*words: object) -> None:
    """Show a command, and run it."""
    argv = [str(word) for word in words]
    print(f"\n$ cray-agents {shlex.join(argv)}", flush=True)
    subprocess.run([sys.executable, "-P", "-m", "cray_agents", *argv], check=True)


def main(folder: Path) -> None:
    """Bring in, look, build, take out."""
    folder.mkdir(parents=True, exist_ok=True)
    home, chats, held_out = folder / "root", folder / "chats.jsonl", folder / "benchmark.txt"
    conversations = [chat(city, f"No, {city} stays dry.") for city in CITIES]
    chats.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    held_out.write_text(BENCHMARK + "\n")
    # any Hugging Face checkpoint of yours; here a tiny random one
    tokenizer = make_tiny_model(folder / "model", [(one, {}) for one in conversations])

    where = ("--home", home)
    cray_agents("import", chats, "--format", "openai", "--loop", "weather", "--reward", 1, *where)
    cray_agents("runs", "list", *where)
    cray_agents("runs", "stats", "--by", "agent,model", *where)
    recipe = ("--set", "render=true", "--tokenizer", tokenizer, "--held-out", held_out)
    cray_agents("dataset", "build", "--where", "loop=weather", *recipe, *where)
    cray_agents("dataset", "list", *where)
    for form, target in (("trl", "chats.trl.jsonl"), ("sharegpt", "chats.sharegpt.jsonl")):
        what = ("--format", form, "--where", "loop=weather")
        cray_agents("export", *what, "-o", folder / target, *where)
    shutil.rmtree(folder / "huggingface", ignore_errors=True)  # no folder is overwritten
    cray_agents("export", "--format", "huggingface", "-o", folder / "huggingface", *where)
    cray_agents("maintain", "fsck", *where)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "datasets-demo"))
