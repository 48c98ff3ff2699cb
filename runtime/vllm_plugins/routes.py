"""Routes: write the experts of a mixture that each token of a call was sent to, compactly.

capture.py collects them from vLLM; records.Routes describes them. Imports nothing of vLLM.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def encode(pieces: Sequence[Any], tokens: int) -> dict[str, Any] | None:
    """Return pieces of [tokens, layers, experts of a token] as JSON: at most so many tokens.

    None without pieces. A stop string drops tokens that vLLM returned the routes of.
    """
    if not pieces:
        return None
    whole = np.concatenate(pieces)[:tokens]
    data = base64.b64encode(zlib.compress(whole.astype("<u2").tobytes(), 1)).decode()
    return {"layers": whole.shape[1], "experts": whole.shape[2], "data": data}
