"""The golden probe: prompts of a dataset whose log-probabilities go into the manifest.

Called by rank.py and export.py.
"""

from cray_agents.trainers.data.samples import Samples

PROBE_PROMPTS = 8
PROBE_TOKENS = 64


def probe_prompts(samples: Samples) -> list[list[int]]:
    """The golden prompts of a dataset: starts and ends, by turns, of its first samples.

    The first samples often start alike (a system prompt); their ends differ.
    """
    found: list[list[int]] = []
    for number, ids in enumerate(samples.tokens):
        window = ids[-PROBE_TOKENS:] if number % 2 else ids[:PROBE_TOKENS]
        prompt = [int(token) for token in window]
        if prompt not in found:
            found.append(prompt)
        if len(found) == PROBE_PROMPTS:
            break
    return found
