"""A hostile MCP server over stdio: its schemas, or its list of tools, are the attack.

python hostile_mcp_server.py [many | pages | large | wordy | silent | broken | refused]
"""

import json
import sys
import time
from typing import Any

GOES_BACK = "^(a+)+$"
TEXT = {"a": {"type": "string", "pattern": GOES_BACK}}
DEPTH = 60
SCHEMAS: dict[str, dict[str, Any]] = {
    "pattern": {"type": "object", "properties": TEXT},
    "names": {
        "type": "object",
        "properties": {"a": {"propertyNames": {"pattern": GOES_BACK}, "pattern": GOES_BACK}},
    },
    "doubling": {
        "type": "object",
        "allOf": [{"$ref": "#/$defs/0"}],
        "$defs": {
            **{str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(DEPTH)},
            str(DEPTH): {},
        },
    },
    "endless": {"type": "object", "allOf": [{"$ref": "#"}]},
    "answer": {"type": "object"},
    "meta": {  # another validator's way to look for equals, which takes the square of the values
        "type": "object",
        "properties": {"a": {"uniqueItems": True}},
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
}


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": schema, **more}


def listed(way: str, cursor: str | None) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": "object"}
    match way:
        case "many":
            return {"tools": [tool(f"t{number}", plain) for number in range(20_000)]}
        case "pages":
            return {"tools": [], "nextCursor": f"{cursor}x"}
        case "large":
            return {"tools": [tool("t", {**plain, "title": "x" * 200_000})]}
        case "wordy":
            return {"tools": [tool("t", plain, description="x" * 200_000)]}
        case "silent":
            time.sleep(600)
        case "broken":
            return {"tools": [{"name": "t"}]}
        case "refused":
            return {"error": 1}
    output = {"outputSchema": {"type": "object", "properties": TEXT}}
    return {
        "tools": [
            tool(name, schema, **(output if name == "answer" else {}))
            for name, schema in SCHEMAS.items()
        ]
    }


def answered(method: str, params: dict[str, Any], way: str) -> dict[str, Any] | None:
    match method:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "hostile", "version": "1"},
            }
        case "tools/list":
            return listed(way, params.get("cursor"))
        case "tools/call":
            said = {"content": [{"type": "text", "text": "done"}]}
            return said | (
                {"structuredContent": params["arguments"]} if params["name"] == "answer" else {}
            )
    return None


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        result = answered(asked["method"], asked.get("params") or {}, (*sys.argv[1:], "")[0])
        refused = {"error": {"code": -32601, "message": "no such method"}}
        found = refused if result is None or "error" in result else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **found}), flush=True)


if __name__ == "__main__":
    main()
