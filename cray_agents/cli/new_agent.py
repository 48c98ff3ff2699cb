"""shop: an agent that looks prices up, its tasks, its reward and its loop. Change all of it.

cray-agents run shop.py "What do a dozen pears cost?"
cray-agents eval shop.py
cray-agents loop shop.py --iterations 3
"""

from cray_agents import (
    RFT,
    Agent,
    Evaluation,
    Loop,
    Message,
    Run,
    TaskSet,
    ToolError,
    Training,
    reward,
    tool,
)

PRICES = {"apple": 2, "pear": 3, "plum": 4, "lemon": 5, "melon": 7, "fig": 6, "lime": 8, "date": 9}
AMOUNTS = {"4": 4, "eleven": 11, "twenty": 20, "a dozen": 12, "half a dozen": 6, "a pair of": 2}
QUESTIONS = ("What do {} cost?", "I would like {}, please. How much is that?")


@tool
def price(item: str, amount: int) -> str:
    """Say what so many pieces of an item cost.

    Args:
        item: in the singular, such as 'pear'.
        amount: how many.
    """
    if item not in PRICES:
        raise ToolError(f"there is no {item!r} here: we have {', '.join(PRICES)}")
    return f"{amount * PRICES[item]} euros"


def example(question: str, item: str, amount: int) -> list[Message]:
    """Return the messages of a run that goes right."""
    call = {"name": "price", "arguments": f'{{"item": "{item}", "amount": {amount}}}'}
    answer = f"{amount * PRICES[item]} euros"
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "tool_calls": [{"id": item, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": item, "content": answer},
        {"role": "assistant", "content": answer},
    ]


agent = Agent(
    name="shop",
    instructions="Look the price up with the tool, then answer with the price alone.",
    tools=[price],
    tool_calls="constrained",  # for any model; without it, for one that was taught to call tools
    examples=[
        *example("What do 5 pears cost?", "pear", 5),
        *example("I would like nine figs, please. How much is that?", "fig", 9),
    ],
    max_turns=3,
    max_tokens=48,
    temperature=0.0,
)


@reward
def exact(run: Run) -> float:
    """1 when the answer is the right price and nothing else."""
    return float(run.output == run.target)


tasks = TaskSet.from_list(  # of your own: TaskSet.from_jsonl("tasks.jsonl", holdout=0.4)
    [
        {"input": question.format(f"{words} {item}s"), "target": f"{amount * PRICES[item]} euros"}
        for question in QUESTIONS
        for words, amount in AMOUNTS.items()
        for item in PRICES
    ],
    holdout=0.4,
)
training = Training(steps=8, batch_size=16, learning_rate=2e-5)
loop = Loop(
    agent,
    tasks,
    rewards=[exact],
    name="shop",
    method=RFT(tasks_per_iteration=48, group_size=4, training=training),
)
evaluation = Evaluation(agent, tasks.holdout, rewards=[exact])
