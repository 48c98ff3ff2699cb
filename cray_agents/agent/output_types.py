"""Output types: instructions and schema for the model, and the reading of its answer.

Called by description.py, run_state.py and conversation.py.
"""

import json
import re
from typing import Any

from pydantic import FiniteFloat, PydanticUserError, TypeAdapter, ValidationError

from cray_agents.errors import BadInput, CrayError

_SCALARS = (int, float, bool)
_FENCE = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)


class OutputError(CrayError, ValueError):
    """The model's answer is not of the agent's output type. The message is for the model."""

    code = "output_error"


class OutputReader:
    """Reader of answers as `type_`.

    A str is taken as it is; int, float and bool are read from the bare text; other types (pydantic
    models, lists, ...) from JSON.

    `constrain`: ask the server to hold answers to the type's JSON schema. Raises BadInput for a
    type that pydantic cannot read from JSON.
    """

    def __init__(self, type_: Any, constrain: bool = True) -> None:
        self.constrain = constrain
        self._type = type_
        self._bare = type_ is str or type_ in _SCALARS
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(FiniteFloat if type_ is float else type_)
            self._json_schema = {} if self._bare else self._adapter.json_schema()
        except PydanticUserError as error:
            raise BadInput(
                f"output_type={type_!r}: {error.message.splitlines()[0]}", param="output_type"
            ) from error

    @property
    def instructions(self) -> str:
        """Instructions with the JSON schema of the answer, whose fields no model can guess."""
        if self._bare:
            return ""
        return f"Answer with JSON alone, of this schema: {json.dumps(self._json_schema)}"

    @property
    def schema(self) -> dict[str, Any] | None:
        """A request's `response_format`; None for types that are read from the bare text."""
        if self._bare:
            return None
        name = re.sub(r"\W", "_", getattr(self._type, "__name__", "answer"), flags=re.ASCII)[:64]
        schema = {"name": name, "schema": self._json_schema}
        return {"type": "json_schema", "json_schema": schema}

    def read(self, text: str) -> Any:
        """Read an answer. Raises OutputError."""
        if self._type is str:
            return text
        text = text.strip()
        try:
            if self._bare:
                return self._adapter.validate_python(text)
            fenced = _FENCE.fullmatch(text)
            return self._adapter.validate_json(fenced[1] if fenced else text)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = "".join(f"{part}: " for part in problem["loc"])
            wanted = getattr(self._type, "__name__", str(self._type))
            raise OutputError(
                f"The answer is not of type {wanted}: {place}{problem['msg']}."
            ) from error
