"""The calculator task beside TRL: both sides read the same tokens, and one measure is for both."""

from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli.loop import calculator_loop
from tests.bench.rivals import held_out
from tests.bench.rivals.training import area, cells, reached
from tests.bench.rivals.training_sides import Learned, Point, exact, trl_trainer
from tests.bench.rivals.trl_settings import load


def way(*points: tuple[float, int, float]) -> Learned:
    made = [Point(seconds=s, tokens=t, success=reached) for s, t, reached in points]
    return Learned(points=made, limit=100, starting=1, evaluating=5, load=0)


def test_the_area_holds_each_success_until_the_next() -> None:
    assert area(way((0, 0, 0.5), (50, 10, 0.75), (90, 20, 0.95)).points, 100) == pytest.approx(
        0.5 * 0.5 + 0.4 * 0.75 + 0.1 * 0.95
    )
    late = way((0, 0, 0.5), (150, 10, 0.9)).points
    assert area(late, 100) == 0.5


def test_who_never_gets_there_is_slower_than_all_who_do() -> None:
    quick, slow = way((0, 0, 0.5), (10, 100, 0.9)), way((0, 0, 0.5), (30, 300, 0.91))
    never = way((0, 0, 0.5), (90, 900, 0.8))
    assert reached(never.points) is None
    assert [*cells([quick, slow, never])][:2] == ["30", "300"]
    assert [*cells([never])][:2] == ["not reached", "not reached"]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>',
         "6"),
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*"}}\n</tool_call>',
         "error: "),
        ('<tool_call>\n{"name": "calculator", "arguments": "2*3"}\n</tool_call>', None),
        ('<tool_call>\n{"name": "calculator", "argu', None),
        ("6", None),
    ],
)  # fmt: skip
def test_calls_are_carried_out_as_the_agent_does(text: str, result: str | None) -> None:
    call = held_out.call_in(text)
    assert (call is None) == (result is None)
    if call is not None and result is not None:
        assert call[1].startswith(result)


def test_trl_reads_what_our_agent_reads(tmp_path: Path) -> None:
    """A demonstrated run, put together of TRL's pieces, has the tokens of its own rendering."""
    calculator_loop.make_model(tmp_path / "model", 0)
    network, tokenizer = load(tmp_path / "model")
    trainer = trl_trainer(network, tokenizer, 0, tmp_path / "trl")
    messages, _ = calculator_loop.make_loop(0, method="grpo").demonstrations[0]
    whole = rendered(tokenizer, messages)
    prompts, _, _ = trainer._tokenize_prompts([messages[:2]])
    call = whole[len(prompts[0]) : len(rendered(tokenizer, messages[:3])) - 1]  # not its newline
    suffix = trainer._get_tool_suffix_ids([{**messages[3], "name": "calculator"}])
    answer = tokenizer(messages[4]["content"] + tokenizer.eos_token)["input_ids"]
    assert prompts[0] + call + suffix + answer == whole[:-1]
    assert held_out.call_in(tokenizer.decode(call, skip_special_tokens=True)) == (
        {"role": "assistant", "content": "", "tool_calls": messages[2]["tool_calls"]},
        messages[3]["content"],
    )
    short, long = [messages[:2], messages[:4]]
    together = held_out.complete(network, tokenizer, [short, long])
    alone = [held_out.complete(network, tokenizer, [talk])[0] for talk in (short, long)]
    assert together == alone  # padding changes nothing
    assert exact([messages[2:]], [messages[4]["content"]]) == [1.0]
    assert exact([messages[2:4]], [messages[4]["content"]]) == [0.0]


def rendered(tokenizer: Any, messages: Any) -> list[int]:
    tools = calculator_loop.agent.tool_schemas
    ids: list[int] = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    return ids
