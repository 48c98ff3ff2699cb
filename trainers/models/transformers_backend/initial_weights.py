"""Initial weights: a directory of weights that transformers draws, for jobs that start at random.

A job of `init` `random` needs no more than a config.json. Here transformers builds its whole model,
each kind by its own rules, from a seed, on the CPU, and saves it in this host's cache. From there
on the job goes as one from any parent. Called by models/backends.py. Read next: parent_files.py.
"""

from pathlib import Path

import orjson
import torch

from cray_agents.records import canonical, digest
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.foreign_model import read_config, with_whole_references
from cray_agents.trainers.host_copies import check_room, host_copy
from cray_agents.trainers.models.transformers_backend.parent_files import unquantised
from cray_agents.trainers.models.transformers_backend.text_model import TextModel


def initial_weights(parent: Path, seed: int) -> Path:
    """Return a directory with random weights for the config.json of `parent`.

    The same config, seed, and versions of torch and transformers give the same weights. Raises
    BadInput for a config that transformers does not take, and StoreError where the host's disk has
    no room.
    """
    import transformers

    raw = read_config(parent)
    config = unquantised(raw) if b'"quantization_config"' in canonical(raw) else raw
    config = with_whole_references(config, parent)

    def make(draft: Path) -> None:
        module = TextModel(raw, parent).draw(seed)
        size = sum(each.numel() * each.element_size() for each in module.parameters())
        check_room(draft, size, "the random weights of a job")
        # whichever rank of this host came first; transformers would let the job's first rank alone
        module.should_save_on_this_rank = lambda is_main_process: is_main_process
        module.save_pretrained(draft)
        durable.write_file(draft / "config.json", orjson.dumps(config))

    versions = [transformers.__version__, torch.__version__]
    return host_copy("initial", digest([config, seed, *versions]), make)
