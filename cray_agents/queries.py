"""Queries: filters that choose runs of the store, and recipes of training sets.

People, loops and HTTP clients write these, so an unknown field is an error. Read by runtime/store
(queries) and runtime/datasets (recipes). The records themselves are in records.py.
"""

from typing import Any, Literal

from pydantic import Field

from cray_agents.records import Message, Split, StopReason, StrictRecord
from cray_agents.text_words import SIMILAR

LARGEST = 2**53 - 1  # that JSON counts to


class RunFilter(StrictRecord):
    """A filter of runs: each given field must match.

    `model` is a `name@N`, or a `name` in any version. `error` is the type of the run's error, `*`
    any error. `since` and `until` bound its start, in unix seconds. A run must have all `tags`, and
    none of `without_tags`.
    `text` is searched in its input, output and messages, ignoring case. A run without a reward
    matches no range of rewards. `tokens` are those of all its calls' prompts and answers.
    """

    loop: str | None = None
    iteration: int | None = None
    iterations: list[int] | None = None
    agent: str | None = None
    task: str | None = None
    split: Split | None = None
    stop_reason: StopReason | None = None
    model: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_seconds: float | None = None
    max_seconds: float | None = None
    min_turns: int | None = Field(None, ge=0, le=LARGEST)
    max_turns: int | None = Field(None, ge=0, le=LARGEST)
    min_tokens: int | None = Field(None, ge=0, le=LARGEST)
    max_tokens: int | None = Field(None, ge=0, le=LARGEST)
    error: str | None = None
    since: float | None = None
    until: float | None = None
    tags: list[str] = Field(default_factory=list)
    # left out where it is empty: recipes and exports of before have no such field in their ids
    without_tags: list[str] = Field(default_factory=list, exclude_if=lambda tags: not tags)
    text: str | None = None


class RunQuery(RunFilter):
    """A page of the matching runs: at most `limit`, beginning behind the run `after` in `order`.

    `id` sorts by run id, `newest` and `oldest` by start. `task` sorts by task, iteration, attempt,
    id: the same order on every machine, with the attempts at a task side by side.
    """

    order: Literal["id", "newest", "oldest", "task"] = "id"
    after: str | None = None
    limit: int | None = Field(None, gt=0)


class Decontamination(StrictRecord):
    """Inputs that must stay out of a training set.

    A run is compared by the input of its task and every message of its user, a demonstration by
    every message of its user. One blocked input is enough to leave it out.

    - `holdout` blocks the held-out and test tasks that the recipe's loop was ever given, run or
      not. It also blocks the tasks of its runs outside the split `train`; without a loop, of all
      runs.
    - `files` block their lines: JSONL or text, given by ids of uploaded files or, on the command
      line, by paths. A line counts by its `input`, `prompt`, `question`, `text` or last user
      message, else by all of it. A conversation counts by its last question, not its greetings. One
      that ends in "thanks" blocks every other in which a user says that.

    Inputs that differ only in case, spaces and punctuation are always left out. Numbers and
    operators are not punctuation (`2+3`, `23`, `-5` and `5` differ). Inputs of at least ten words
    (numbers and signs do not count) are also left out in two cases: the Jaccard similarity of the
    word 5-grams is at least `threshold`, or the input contains all of a blocked one. In a shorter
    text one word makes another task.
    """

    holdout: bool = True
    files: list[str] = Field(default_factory=list)
    threshold: float = Field(SIMILAR, gt=0, le=1)


Deviation = Literal["sample", "population"]


class DatasetRecipe(StrictRecord):
    """A recipe of a training set. The same recipe over the same runs gives the same dataset, as
    long as the blocked inputs are the same.

    The runs of `loop` and `iterations` that match `where` are considered. `method` decides:

    - `sft`: imitate runs with a reward of at least `min_reward` (1 unless given). `best_of` bounds
      their number per task to the best ones.
    - `grpo`: use all scored runs, in groups of a task's runs in an iteration. The advantage is the
      reward minus the group's mean, over its standard deviation unless `normalize` is false (arXiv
      2402.03300). `deviation` chooses the `sample`'s, over n - 1, as in TRL and verl, or the
      `population`'s, over n, which makes advantages of n runs sqrt(n / (n - 1)) times as large. A
      group of one or of equal rewards is left out, as it has no advantages. If turns of a group's
      runs were rewarded, its supervision is of the process (section 4.1.3): all rewards of turns
      are normalised together, and a reward of a whole run counts for its last turn. The advantage
      of a turn's tokens is the sum of the rewards of this and the following turns, each times
      `discount` to the power of its distance in turns. A turn without a reward has none to
      normalise. Rewards of whole runs alone are not discounted. A run that a reward failed on has
      no reward.
    - `dpo`: pair the best and the worst run of each task in an iteration, if their rewards differ
      by at least `min_margin` and the best reaches `min_reward`, if that is given.
    - `kto`: use all scored runs, each alone. A run is desirable with a reward of at least
      `min_reward` (1 unless given), else undesirable.
    - `distill`: use all runs whose tokens were recorded, rewarded or not: a teacher judges their
      tokens.

    `max_per_task` bounds the runs (pairs) of a task over all iterations, to the first in order of
    iteration and attempt. `max_tokens` bounds the length of a sample. `rewards` overrides the
    recorded rewards of whole runs by run id (controls use it). `validation` is the fraction of
    tasks, chosen by the hash of their ids, whose samples go to a split of their own. Of samples
    whose token 5-grams are as similar as `near_duplicates` (Jaccard), only the first is kept; equal
    samples always become one. In grpo and distill all stay, as they are draws.

    `step` makes the dataset the loop's training set number `step`: building it again gives the same
    dataset, also after a crash. A run then enters at most `max_uses` of the loop's steps up to this
    one.

    `demonstrations` are conversations (lists of messages) to imitate, rendered with the tokenizer
    and chat template of `tokenizer` (a checkpoint directory). All have the definitions `tools`,
    unless `demonstrations_tools` gives each its own. An assistant message whose `weight` is 0 is
    context that is not trained on. For `dpo` each is a pair of its last message, the preferred one,
    and a message in `demonstrations_rejected`; nothing else is trained on. `demonstrations_splits`
    names the split of each, in the place of `validation`.

    `documents` are texts to learn as they are (sft), in files: paths, folders, or ids of uploaded
    files, with a text a line (.txt), or in the field or column `text` (.jsonl, .json, .parquet).
    They are the whole dataset, without runs. `tokenizer` makes their tokens, and ends each text.
    They are packed into contexts of `max_tokens` inputs, without attention from one document to
    another: a longer document is cut, and goes on in the next context. A job's `batch_size` then
    counts contexts. `near_duplicates` and `decontamination` compare whole documents.

    `render` renders imported runs, which have no tokens, the same way. Otherwise they are left out.

    With `givers`, only rewards count that were given with API keys of these names or on the
    platform's host itself. With None all count.

    Runs in which a scanner found something (tag `scan:NAME`) are left out, unless `with_findings`
    is true or `where` asks for the tag.

    `router_replay` keeps the experts of each token where replicas recorded them, for training.

    With `balance_by` (a key of the tasks' metadata), a group of n samples weighs n**balance_power
    in all. A power of 0 makes all groups equal, 1 all samples.
    """

    method: Literal["sft", "grpo", "dpo", "kto", "distill"] = "sft"
    loop: str | None = None
    iterations: list[int] | None = None
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
    documents: list[str] = Field(default_factory=list, exclude_if=lambda files: not files)
    tokenizer: str | None = None
    render: bool = False
    rewards: dict[str, float] | None = None
    givers: list[str] | None = None
    with_findings: bool = False
    router_replay: bool = False
