"""SBOM: prints as CycloneDX what pip and dpkg installed. Run by install.sh."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator

from licences import licence  # of requirements/


def python_packages() -> Iterator[dict[str, object]]:
    """Return the installed distributions, with the licences that they name."""
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"]
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{found.version.replace('+', '%2B')}"
        licences = [{"license": {"name": told}} for told in [licence(name)] if told]
        yield component(name, found.version, purl) | {"licenses": licences}


def system_packages() -> Iterator[dict[str, object]]:
    """Return the packages of the distribution."""
    system = platform.freedesktop_os_release()
    argv = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
    for line in subprocess.check_output(argv, text=True).splitlines():
        name, version, architecture = line.split()
        purl = f"pkg:deb/{system['ID']}/{name.replace('+', '%2B')}@{version.replace('+', '%2B')}"
        distro = f"{system['ID']}-{system.get('VERSION_ID', '')}"
        yield component(name, version, f"{purl}?arch={architecture}&distro={distro}")


def component(name: str, version: str, purl: str) -> dict[str, object]:
    """Return a package's record; its reference is its package URL."""
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


when = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
version = importlib.metadata.version("cray-agents")
of = {"type": "container", "name": "cray-agents", "version": version}
packages = sorted([*python_packages(), *system_packages()], key=lambda one: str(one["purl"]))
about = {"timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", when), "component": of}
form = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}
print(json.dumps(form | {"metadata": about, "components": packages}, indent=1))
