"""Weight offers: ranks of a training session say where their latest weights can be fetched.

    sessions/<id>/offers/<hash of the weights>.<rank>    a WeightOffer, one a rank
    sessions/<id>/offers/<job>.<rank>                    the same, before the files are whole

Each rank offers its share of a checkpoint's tensors, as they are stored. A replica that is to load
this checkpoint fetches them instead of the files, which stay what counts: an offer is gone with its
rank, or with the next checkpoint. The weights have no hash before their files are whole, so until
then the job names them. Both offers of the same tensors have the same token. One connection is one
transfer to one replica; messages are lines of JSON:

    platform                                    rank
    {"token", "weights", "gpus"}             ->
                                             <- {"tensors": [[name, dtype, shape]], "init": {...}}
    {"join": true}                           ->
    vLLM's init route, while the rank joins
    {"send": [names]}                        ->
                                             <- {"update": {...}}
    vLLM's update route, while the rank sends, and so on until the platform hangs up
                                             <- {"error": "..."} instead of any answer

`init` and `update` are of vLLM's backend; `init` is null where a rank has no tensors. `gpus` are
the uuids of the replica's GPUs. Nothing is a pickle. Written by trainers/checkpointing/
weight_sender.py, read by runtime/pool/weight_transfer.py.
"""

from contextlib import suppress
from pathlib import Path

from cray_agents.records import Record, canonical
from cray_agents.runtime.disk import checksums


class WeightOffer(Record):
    """The address of one rank of `world`, and the secret that it asks for.

    `weights`: their hash, or the job that writes them.
    """

    weights: str
    rank: int
    world: int
    host: str
    port: int
    token: str


def write_offer(session: Path, offer: WeightOffer) -> Path:
    """Record an offer, and return its file. A crash may lose it: the weights are in files too."""
    path = session / "offers" / f"{offer.weights}.{offer.rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.touch(mode=0o660)  # its secret is for those who may use the root
    draft.write_bytes(checksums.with_crc(canonical(offer.model_dump())))
    draft.replace(path)
    return path


def find_offers(sessions: Path, weights: str) -> list[WeightOffer]:
    """Return the offers of these weights by all ranks of one session, in their order; else none."""
    for folder in sorted(sessions.glob("*/offers")):
        offers = []
        for path in folder.glob(f"{weights}.*"):
            with suppress(FileNotFoundError):  # the rank went on to its next checkpoint
                offers.append(checksums.read_record(WeightOffer, path))
        offers.sort(key=lambda offer: offer.rank)
        if offers and [offer.rank for offer in offers] == list(range(offers[0].world)):
            return offers
    return []


def drop_offers(session: Path, rank: int) -> None:
    """Delete what a rank of this session offered, also before it was killed."""
    for path in (session / "offers").glob(f"*.{rank}"):
        path.unlink(missing_ok=True)
