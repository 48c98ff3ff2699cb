"""Exact JSON: what clients and models wrote is read and written without a change."""

import json
from typing import Any

import pytest

from cray_agents.exact_json import (
    DEEPEST,
    dump_json,
    load_json,
    malformed_calls,
    parse_json,
    read_arguments,
    sendable,
    sent_arguments,
)

BIG = 123456789012345678901234567890


@pytest.mark.parametrize("number", [2**63 - 1, 2**64, -(2**63) - 1, BIG, -BIG, 10**300])
def test_whole_numbers_keep_their_digits(number: int) -> None:
    for before in range(40):  # wherever it stands
        value = {"x" * before: [number, 1.5, str(number)]}
        text = dump_json(value)
        assert text == json.dumps(value, separators=(",", ":")).encode()
        assert load_json(text) == load_json(bytearray(text)) == parse_json(text.decode()) == value


def test_floats_are_as_orjson_reads_them() -> None:
    assert load_json("[0.12345678901234567890123, 1e25, 12345678901234567890.5]") == [
        0.12345678901234568, 1e25, 1.2345678901234567e19
    ]  # fmt: skip


def test_half_a_character_is_replaced_and_told() -> None:
    told: list[bool] = []
    text = '{"\\uDE00": "a\\ud83d b \\ud83d\\ude00", "n": ' + f"{BIG}}}"
    assert load_json(text, lambda: told.append(True)) == {"?": "a? b 😀", "n": BIG}
    assert told == [True]
    assert load_json('"\\ud83d\\ude00"', lambda: told.append(True)) == "😀" and told == [True]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"NaN", b"1e400", b'"\\ud83d', b'"\xed\xa0\xbd"', b'["\\ud83d", NaN]',
     b"[" * 2000 + b'"\\ud83d"' + b"]" * 2000],
)  # fmt: skip
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        load_json(text)


@pytest.mark.parametrize("value", [{1: BIG}, {"x": {BIG}}, [BIG, float("nan")], [BIG, "\ud800"]])
def test_what_has_no_form_in_json_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError):
        dump_json(value)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (f'{{"a": {BIG}}}', {"a": BIG}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        *((text, {"unparsed": text}) for text in ('{"a"', "[1]", "7", '{"a": NaN}')),
        *((text, {"unparsed": text}) for text in ['{"a":' * 70 + "1" + "}" * 70]),
    ],
)
def test_arguments_have_one_form_on_every_road(given: Any, sent: dict[str, Any]) -> None:
    assert sent_arguments(given) == sent
    message = {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": given}}]}
    (call,) = sendable(message)["tool_calls"]
    assert read_arguments(call["function"]["arguments"]) == sent
    assert len(malformed_calls(message)) == (read_arguments(given) is None)
    assert sendable(sendable(message)) == sendable(message)


def test_calls_of_other_shapes_are_left_alone() -> None:
    for calls in (None, "x", [None, 7, {"custom": {}}, {"function": 7}]):
        assert sendable({"tool_calls": calls}) == {"tool_calls": calls}
        assert malformed_calls({"tool_calls": calls}) == []


def test_depth_is_bounded() -> None:
    for depth in (DEEPEST, DEEPEST + 1):
        assert parse_json("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="nested more than"):
        parse_json("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2))
