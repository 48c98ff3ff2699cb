"""What is asked of the store: which runs, and which of them make a training set.

Said by people, by loops and over HTTP, so an unknown field is an error. Read by runtime/store
(queries) and runtime/datasets (recipes). The nouns themselves are in records.py.
"""

from typing import Any, Literal

from pydantic import Field

from cray_agents.records import Message, Split, StopReason, StrictRecord
from cray_agents.text_words import SIMILAR


class RunFilter(StrictRecord):
    """Which runs: each field that is given must match.

    `model` is a `name@N`, or a `name` in any version; `error` the type of the run's error, `*` any
    error; `since` and `until` bound its start, in unix seconds; `tags` must all be there; `text` is
    looked for in its input, output and messages, whatever the case. A run without a reward has none
    in any range.
    """

    loop: str | None = None
    generation: int | None = None
    generations: list[int] | None = None
    agent: str | None = None
    task: str | None = None
    split: Split | None = None
    stop_reason: StopReason | None = None
    model: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    error: str | None = None
    since: float | None = None
    until: float | None = None
    tags: list[str] = Field(default_factory=list)
    text: str | None = None


class RunQuery(RunFilter):
    """A page of the runs that match: at most `limit`, those after the run `after` in this order.

    `id` is by run id. `newest` and `oldest` are by start. `task` is by task, generation, attempt,
    id: the same order on every machine, with the attempts at a task side by side.
    """

    order: Literal["id", "newest", "oldest", "task"] = "id"
    after: str | None = None
    limit: int | None = Field(None, gt=0)


class Decontamination(StrictRecord):
    """What must not be in a training set. Compared are inputs: of a run that of its task and every
    message of its user, of a demonstration every message of its user. One that is held is enough.

    `holdout`: the inputs of the held-out and test tasks that the recipe's loop was ever given, run
    or not, and of every run of it on a task that is not of split `train`; without a loop, of all.
    `files`: JSONL or text, ids of uploaded files or, on the command line, paths; a line's `input`,
    `prompt`, `question`, `text` or last user message counts, else all of it: of a conversation what
    it was asked in the end, not its greetings (one that ends in "thanks" holds back every other in
    which that is said). Inputs that are equal but for case, spaces and punctuation are always left
    out; numbers and operators are none (`2+3`, `23`, `-5` and `5` differ). Of those with at least
    ten words (numbers and signs do not count), also when the Jaccard similarity of their word
    5-grams is at least `threshold`, or when an input holds all of a held one. In a shorter text one
    word makes another task.
    """

    holdout: bool = True
    files: list[str] = Field(default_factory=list)
    threshold: float = Field(SIMILAR, gt=0, le=1)


Deviation = Literal["sample", "population"]


class DatasetRecipe(StrictRecord):
    """What goes into a training set. The same recipe over the same runs gives the same dataset,
    as long as the same is held out.

    Considered are the runs of `loop` and `generations` that match `where`. `method` decides:

    - `sft`: runs with a reward of at least `min_reward` (1 unless given) are imitated; `best_of`
      keeps the best so many of each task.
    - `grpo`: all scored runs, in groups of a task's runs in a generation; advantage = reward minus
      the group's mean, over its standard deviation unless `normalize` is false (arXiv 2402.03300).
      `deviation` says which: the `sample`'s, over n - 1, as TRL and verl have it, or the
      `population`'s, over n, which makes advantages of n runs sqrt(n / (n - 1)) times as large.
      A group of equal rewards says nothing and is left out, and so is a group of one. Where turns
      of a group's runs were rewarded, its supervision is of the process (4.1.3 there): all rewards
      of turns are normalised together, one for a whole run is its last turn's, and the advantage of
      a turn's tokens is the sum of what its own and the following turns got, `discount` to the
      power of how many turns ahead times each. A turn without a reward has none to normalise. Of
      outcomes alone nothing is discounted. A run that a reward failed on has none.
    - `dpo`: of each task, pairs of the best and the worst run of a generation whose rewards differ
      by at least `min_margin`; the best reaches `min_reward`, if that is given.
    - `kto`: all scored runs, each alone: desirable with a reward of at least `min_reward` (1 unless
      given), else undesirable.

    `max_per_task` bounds the runs (pairs) of a task over all generations, the first in order of
    generation and attempt; `max_tokens` the length of a sample. `rewards` overrides the recorded
    rewards by run id (controls use it), for whole runs. `validation` is the fraction of tasks,
    chosen by the hash of their ids, whose samples go to a split of their own. `near_duplicates`: of
    samples whose token 5-grams are this similar (Jaccard), the first is kept; equal ones always are
    one. In grpo they are draws of a group, and all stay.

    `step` makes the dataset the loop's training set number `step`: the same one when it is built
    again, also after a crash, and no other. A run then enters at most `max_uses` of the loop's
    steps up to this one.

    `demonstrations` are conversations (lists of messages) to imitate, rendered with the tokenizer
    and chat template of `tokenizer` (a checkpoint directory); `tools` are theirs, unless
    `demonstrations_tools` gives each its own. An assistant message whose `weight` is 0 is context
    that is not trained on. For `dpo` each is a pair: `demonstrations_rejected` holds the message
    that its last one is preferred to, and nothing else is trained on. `demonstrations_splits` says
    which are in the validation split, in the place of `validation`.

    `render`: runs that have no tokens because they were imported are rendered the same way;
    otherwise they are left out.

    `givers`: only rewards count that were given with API keys of these names, or on the platform's
    host itself; None: whoever gave them.

    With `balance_by` (a key of the tasks' metadata), a group of n samples weighs n**balance_power
    in all: 0 makes all groups equal, 1 all samples.
    """

    method: Literal["sft", "grpo", "dpo", "kto"] = "sft"
    loop: str | None = None
    generations: list[int] | None = None
    where: RunFilter | None = None
    split: Split = "train"
    min_reward: float | None = None
    best_of: int | None = Field(None, gt=0)
    min_margin: float = Field(0.0, ge=0)
    normalize: bool = True
    deviation: Deviation = "sample"
    discount: float = Field(1.0, gt=0, le=1)
    max_per_task: int | None = Field(None, gt=0)
    max_tokens: int | None = Field(None, gt=1)
    step: int | None = Field(None, ge=0)
    max_uses: int | None = Field(None, gt=0)
    validation: float = Field(0.0, ge=0, lt=1)
    near_duplicates: float | None = Field(None, gt=0, le=1)
    decontamination: Decontamination = Field(default_factory=Decontamination)
    balance_by: str | None = None
    balance_power: float = Field(0.0, ge=0, le=1)
    demonstrations: list[list[Message]] = Field(default_factory=list)
    demonstrations_metadata: list[dict[str, Any]] = Field(default_factory=list)
    demonstrations_tools: list[list[dict[str, Any]]] = Field(default_factory=list)
    demonstrations_rejected: list[Message] = Field(default_factory=list)
    demonstrations_splits: list[Literal["train", "validation"]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tokenizer: str | None = None
    render: bool = False
    rewards: dict[str, float] | None = None
    givers: list[str] | None = None
