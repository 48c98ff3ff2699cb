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
    Sampling,
    TaskSet,
    ToolError,
    Training,
    reward,
    tool,
)

PRICES = {"apple": 2, "pear": 3, "plum": 4, "lemon": 5, "melon": 7, "fig": 6, "lime": 8, "date": 9}
AMOUNTS = {"2": 2, "4": 4, "8": 8, "three": 3, "seven": 7, "eleven": 11, "twenty": 20}
AMOUNTS |= {"a dozen": 12, "half a dozen": 6}
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


CALL = {"name": "price", "arguments": '{"item": "pear", "amount": 5}'}
EXAMPLES: list[Message] = [
    {"role": "user", "content": "What do 5 pears cost?"},
    {"role": "assistant", "tool_calls": [{"id": "call", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "call", "content": "15 euros"},
    {"role": "assistant", "content": "15 euros"},
]

agent = Agent(
    name="shop",
    instructions="Look the price up with the tool, then answer with the price alone.",
    tools=[price],
    tool_calls="constrained",  # for any model; without it, for one that was taught to call tools
    examples=EXAMPLES,
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
    method=RFT(tasks_per_iteration=64, group_size=4, training=training),
    sampling=Sampling(temperature=0.8),
)
evaluation = Evaluation(agent, tasks.holdout, rewards=[exact])
