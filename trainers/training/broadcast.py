"""All ranks of a job doing as rank 0 says. Called wherever only one of them looks or decides."""

from typing import Any

import torch


def is_main() -> bool:
    """Whether this is rank 0: the one that writes."""
    return torch.distributed.get_rank() == 0


def agree(value: Any) -> Any:
    """Rank 0's value, on every rank. Collective."""
    if torch.distributed.get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]
