"""Paths: every path under the shared root, named once.

    <home>/
      segments/<writer>-<n>.jsonl      the store: one writer a file, append-only
      segments/<writer>-<n>.jsonl.zst  ... sealed (see runtime/store/segments)
      segments/damaged/                damaged segments that fsck put aside, unchanged
      datasets/<id>/                   immutable: token shards, manifest.json (last)
      jobs/<id>/                       spec.json, events.jsonl, status.json, log.txt,
                                       attempts/<n>, megatron/step-<n>/ (resume points)
      sessions/<id>/                   a training session: spec.json, attempts/<n>, queue/<job>,
                                       offers/, log.txt; its jobs are in jobs/
      checkpoints/<id>/                immutable: a Hugging Face directory, manifest.json (last)
      checkpoints/<id>/delta/          what changed in its parent: the weights may be made of it
      checkpoints/<id>.pruned          the record of one that `maintain prune models` deleted
      models/<name>/<n>.json           versions, append-only
      models/<name>/history/<n>.json   the name's history, append-only: promotions, rollbacks,
                                       rejections, canaries; in an older root the first of them
                                       are in promotions/
      models/<name>/canaries/<n>.json  results of the canary that event n began
      loops/<name>/                    a loop's settings, and a record per iteration;
                                       datasets/: the training set of each of its steps
      blobs/<aa>/<sha256>              contents of files and upload parts, each stored once
      files/<id>.json                  OpenAI's file objects; their contents are blobs
      uploads/<id>/                    upload.json, parts/<part id>.json, end.json
      batches/<id>/                    batch.json, chunks, claims, results: see runtime/batches
      fine_tuning/<id>.json            a fine-tuning request; its job is in jobs/
      fine_tuning/<id>.validated, .ended  the JobSpec made of it, and the outcome
      tinker/models/<id>/              a model of a Tinker script: model.json, steps/<n>.json,
                                       weights/ and sampler_weights/<name>.json; its job is in jobs/
      tinker/samplers/<id>.json        the version that a script samples from
      exports/<id>/                    an export over HTTP, until it is sent
      replicas/<n>/<attempt>/          a replica as a Slurm job: spec.json, secret, lease.json, logs
      tls/                             the CA of replicas in Slurm: ca.pem, ca-key.pem
      replicas/serving.json            addresses, versions and secrets, for further gateways
      keys/<id>.json                   API keys, hashed; <id>.revoked beside one that was revoked
      audit/<writer>.jsonl           who changed what, chained by hashes
      ledger/<writer>.jsonl            who held which node when, and what came of it
      excluded_nodes/<node>.json       a node that failed, left out by jobs until a time is over
      slurm/                           the private cluster of a laptop
      platform.json                    who controls the platform: URL, key, term, heartbeat
      controller/terms/<n>.json        who claimed term n, and when; never deleted
      controller/standbys/<id>.json    a process that waits to take over, with its heartbeat
      controller/down.json             the term that `down` ended for good
      trackers/<tracker>.json, .../    the steps that a tracker has, and its own files
      logs/                            logs of the running platform

Rules for NFS, Lustre, Weka and a laptop alike: one writer per file, publish by rename, the
manifest last, claims by exclusive create.
"""

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cray_agents.errors import StoreError

ITERATIONS = "generations"  # their name in earlier versions, whose loops go on in the same folder
CACHE = "CRAY_AGENTS_CACHE"  # environment variable: the folder for a host's caches, not /var/tmp
SCRATCH = "RANKS_SCRATCH"  # likewise, of jobs: the folder that `[job] scratch` names
HARDWARE = "hardware."  # ... <node>.jsonl, in a job's or a session's folder: the load of a node


@dataclass(frozen=True)
class Home:
    """The shared root, `$CRAY_AGENTS_HOME`."""

    root: Path

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def root_id(self) -> Path:
        """The file with the root's random name. A root made anew at the same path has another."""
        return self.segments / ".root-id"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    def dataset(self, dataset_id: str) -> Path:
        return self.datasets / dataset_id

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def job(self, job_id: str) -> Path:
        return self.jobs / job_id

    @property
    def sessions(self) -> Path:
        return self.root / "sessions"

    def checkpoint(self, checkpoint_id: str) -> Path:
        return self.root / "checkpoints" / checkpoint_id

    @property
    def models(self) -> Path:
        return self.root / "models"

    def canary(self, name: str, number: int) -> Path:
        return self.models / name / "canaries" / f"{number}.json"

    @property
    def loops(self) -> Path:
        return self.root / "loops"

    def loop(self, name: str) -> Path:
        return self.loops / name

    def iterations(self, loop: str) -> Path:
        return self.loop(loop) / ITERATIONS

    def loop_datasets(self, name: str) -> Path:
        return self.loop(name) / "datasets"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    def blob(self, sha256: str) -> Path:
        return self.blobs / sha256[:2] / sha256

    @property
    def drafts(self) -> Path:
        """Blobs being written, on the file system of `blobs` so that they can be linked there."""
        return self.blobs / "drafts"

    @property
    def files(self) -> Path:
        return self.root / "files"

    @property
    def uploads(self) -> Path:
        return self.root / "uploads"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    @property
    def fine_tuning(self) -> Path:
        return self.root / "fine_tuning"

    @property
    def tls(self) -> Path:
        return self.root / "tls"

    @property
    def tinker(self) -> Path:
        return self.root / "tinker"

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def replicas(self) -> Path:
        return self.root / "replicas"

    @property
    def serving(self) -> Path:
        return self.replicas / "serving.json"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def excluded_nodes(self) -> Path:
        return self.root / "excluded_nodes"

    @property
    def audit(self) -> Path:
        return self.root / "audit"

    @property
    def trackers(self) -> Path:
        return self.root / "trackers"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    @property
    def platform(self) -> Path:
        return self.root / "platform.json"

    @property
    def controller(self) -> Path:
        return self.root / "controller"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def host_cache() -> Path:
    """Make and return this user's cache folder on this host's own disk.

    No other user may read it, and its contents can be rebuilt. Raises StoreError.
    """
    usual = Path("/var/tmp")
    if not os.access(usual, os.W_OK | os.X_OK):
        usual = Path(tempfile.gettempdir())
    return own_folder(Path(os.environ.get(CACHE) or usual), CACHE)


def own_folder(place: Path, setting: str) -> Path:
    """Make and return this user's folder in a place. Raises StoreError, which names the setting."""
    directory = place / f"cray-agents-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError as error:
        raise StoreError(f"cannot write in {directory}: {error}: set {setting}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StoreError(f"{directory} is not this user's: set {setting} to another place")
    return directory
