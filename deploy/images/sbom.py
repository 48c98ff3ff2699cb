"""SBOM: prints as CycloneDX what pip and dpkg installed. Run by install.sh."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from urllib.parse import quote

from licences import licence  # of requirements/


def component(
    kind: str, name: str, version: str, told: str = "", end: str = ""
) -> dict[str, object]:
    """Return a package's record, with the licence that it tells; its reference is its URL."""
    url = f"pkg:{kind}/{quote(name.lower().replace('_', '-'))}@{quote(version)}{end}"
    licences = [{"license": {"name": told}}] if told else []
    found = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    return found | {"licenses": licences}


packages = [
    component("pypi", one.metadata["Name"], one.version, licence(one.metadata["Name"]))
    for one in importlib.metadata.distributions()
]
system = platform.freedesktop_os_release()
listing = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
for line in subprocess.check_output(listing, text=True).splitlines():
    name, version, architecture = line.split()
    end = f"?arch={architecture}&distro={system['ID']}-{system.get('VERSION_ID', '')}"
    packages.append(component(f"deb/{system['ID']}", name, version, end=end))

made = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
of = component("generic", "cray-agents", importlib.metadata.version("cray-agents"))
about = {
    "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", made),
    "component": of | {"type": "container"},
}
form = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": about}
print(
    json.dumps(form | {"components": sorted(packages, key=lambda one: str(one["purl"]))}, indent=1)
)
