"""Settings of a loop as tests vary them: by their names alone, whatever group they are in."""

from typing import Any

from cray_agents.loop.methods import METHODS, RFT, Method
from cray_agents.loop.settings import Data, Sampling
from cray_agents.loop.stop_rules import Stop
from cray_agents.records import StrictRecord

GROUPS: dict[str, type[StrictRecord]] = {"sampling": Sampling, "data": Data, "stop": Stop}


def grouped(**settings: Any) -> dict[str, Any]:
    """Arguments of a Loop. `method`: a kind of method, or methods; they get what they leave out."""
    made = dict(settings)
    for name, kind in GROUPS.items():
        own = {key: made.pop(key) for key in kind.model_fields if key in made}
        if own:
            made[name] = kind(**own)
    given = made.pop("method", RFT)
    known = {field for kind in METHODS.values() for field in kind.model_fields}
    own = {key: made.pop(key) for key in known if key in made}
    methods = [given] if isinstance(given, type | Method) else given
    filled = [_filled(method, own) for method in methods]
    return made | {"method": filled if len(filled) > 1 else filled[0]}


def _filled(method: type[Method] | Method, own: dict[str, Any]) -> Method:
    if isinstance(method, Method):
        fields = type(method).model_fields.keys() - method.model_fields_set
        return method.model_copy(update={key: own[key] for key in fields if key in own})
    return method(**{key: value for key, value in own.items() if key in method.model_fields})
