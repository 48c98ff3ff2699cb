"""Protocol buffers: their wire format, read and written by the numbers of fields.

A message is a series of fields, each a key (number * 8 + wire type) and a value. Tinker's client
sends one kind of message and takes two. forward_backward.py and samples.py know their fields.
https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections import defaultdict

from cray_agents.errors import BadInput

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types

Value = int | bytes
#: The values of each field, in their order. A fixed value is its bytes.
Fields = defaultdict[int, list[Value]]


def read_fields(message: bytes) -> Fields:
    """Return the fields of a message by their numbers. Raises BadInput where it is cut off."""
    fields: Fields = defaultdict(list)
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _read_varint(message, place)
            fields[number].append(value)
            continue
        if kind == BYTES:
            size, place = _read_varint(message, place)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise BadInput(f"the body is no protocol buffer: field {number} has the type {kind}")
        if place + size > len(message):
            raise BadInput(f"the body is no protocol buffer: field {number} is cut off")
        fields[number].append(message[place : place + size])
        place += size
    return fields


def messages(fields: Fields, number: int) -> list[bytes]:
    """Return the messages, texts or bytes of a field. Raises BadInput for numbers."""
    values = fields.get(number, [])
    if not all(isinstance(value, bytes) for value in values):
        raise BadInput(f"the body is no such protocol buffer: field {number} holds a number")
    return [value for value in values if isinstance(value, bytes)]


def message(fields: Fields, number: int) -> bytes:
    """Return the last message of a field; empty without one."""
    return (messages(fields, number) or [b""])[-1]


def text(fields: Fields, number: int) -> str:
    """Return the text of a field. Raises BadInput if it is not UTF-8."""
    try:
        return message(fields, number).decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"field {number} of the body is not UTF-8: {error}") from error


def whole(fields: Fields, number: int) -> int:
    """Return the whole number of a field; 0 without one."""
    value = (fields.get(number) or [0])[-1]
    if not isinstance(value, int):
        raise BadInput(f"the body is no such protocol buffer: field {number} holds bytes")
    return value


def real(fields: Fields, number: int) -> float:
    """Return the double of a field; 0 without one."""
    value = message(fields, number) or bytes(8)
    if len(value) != 8:
        raise BadInput(f"the body is no such protocol buffer: field {number} is no double")
    return float(struct.unpack("<d", value)[0])


def write_bytes(number: int, content: bytes) -> bytes:
    """Return a field with bytes, a text or a message."""
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def write_whole(number: int, value: int) -> bytes:
    """Return a field with a number that is not negative."""
    return _varint(number << 3 | VARINT) + _varint(value)


def write_real(number: int, value: float) -> bytes:
    """Return a field with a double."""
    return _varint(number << 3 | FIXED64) + struct.pack("<d", value)


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    """Return a number and the place behind it. Raises BadInput."""
    value = shift = 0
    while place < len(message) and shift < 70:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise BadInput("the body is no protocol buffer: a number is cut off")
