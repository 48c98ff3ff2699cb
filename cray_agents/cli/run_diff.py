"""Printed differences of two runs, for `runs diff`. run_differences.py computes them."""

from typing import Any

from cray_agents.cli.screen import console, line
from cray_agents.runtime.views.run_differences import value_text

COLORS = {"-": "red", "+": "green", "@": "cyan"}
Json = dict[str, Any]


def print_differences(one: str, other: str, diff: Json) -> None:
    """Print differences for people: - is the first run, + the second."""
    line(f"- {one}", style="red")
    line(f"+ {other}", style="green")
    for each in diff["fields"]:
        line("")
        line(each["name"], style="bold")
        _print_sides(each)
    for each in diff["messages"]:
        line("")
        places = [each[side] for side in ("one", "other")]
        titles = ["-" if place is None else f"messages[{place}]" for place in places]
        line(" | ".join(titles), style="bold")
        for text in each["diff"]:
            line(text, 2, COLORS.get(text[:1], ""))
    for each in diff["rewards"]:
        line("")
        turn = "" if each["turn"] is None else f", turn {each['turn'] + 1}"
        line(f"reward {each['name']} ({each['source']}{turn})", style="bold")
        _print_sides(each)
    _print_tokens(diff["tokens"])
    if not (diff["fields"] or diff["messages"] or diff["rewards"]):
        console.print(
            "\nno other difference" if _tokens_differ(diff["tokens"]) else "\nno difference"
        )


def _print_sides(each: Json) -> None:
    for mark, side in (("-", "one"), ("+", "other")):
        if each[side] is not None:
            line(f"{mark} {value_text(each[side])}", 2, COLORS[mark], hanging=2)


def _print_tokens(tokens: Json | None) -> None:
    if tokens is None:
        return
    line("")
    line("tokens", style="bold")
    for name in ("prompt", "sampled"):
        line(f"{name}: {tokens[name][0]} | {tokens[name][1]}", 2)
    first = tokens["first"]
    if first is None:
        line("the exact tokens are the same", 2)
        return
    position = f"turn {first['turn']}, {first['list']} token {first['position']}"
    line(f"they differ first at {position}: {first['one']} | {first['other']}", 2)


def _tokens_differ(tokens: Json | None) -> bool:
    return tokens is not None and tokens["first"] is not None
