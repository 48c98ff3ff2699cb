"""Operations on trajectories: told, rewarded, found, forgotten."""

from typing import get_args

from cray_agents.queries import RunQuery
from cray_agents.records import Split, StopReason
from cray_agents.runtime.gateway.openapi.operation import Operation, Schema, query, ref
from cray_agents.runtime.gateway.openapi.schemas import listed, record, some
from cray_agents.runtime.gateway.routes.trajectories import FILTERS, MOST

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
KINDS: dict[str, Schema] = {
    "generation": COUNT,
    "split": {"enum": list(get_args(Split))},
    "stop_reason": {"enum": list(StopReason)},
    **dict.fromkeys(("min_reward", "max_reward", "since", "until"), NUMBER),
}
WHICH = (
    *(query(name, KINDS.get(name, TEXT)) for name in FILTERS),
    query("tag", {"type": "array", "items": TEXT}, "Each of them must be there."),
)
ORDERS = get_args(RunQuery.model_fields["order"].annotation)
MISSING = ("404 not_found",)

TRAJECTORIES = (
    Operation(
        "post",
        "/v1/trajectories/{run_id}/events",
        "appendEvents",
        "Training",
        "Tell of a run, or reward it",
        record({"appended": COUNT, "duplicates": COUNT}),
        takes=record({"events": some(ref("Event"))}),
        more="An event's body is a Run or a Reward. The same event again changes nothing.",
    ),
    Operation(
        "post",
        "/v1/trajectories/events",
        "appendEventsOfRuns",
        "Training",
        "Tell of several runs, or reward them",
        record({"appended": COUNT, "duplicates": COUNT}),
        takes=record({"events": some({"allOf": [ref("Event"), record({"run_id": TEXT})]})}),
        more="As for one run; all are taken, or none.",
    ),
    Operation(
        "post",
        "/v1/trajectories/{run_id}/rewards",
        "giveReward",
        "Training",
        "Reward a run, or one of its turns",
        ref("Reward"),
        takes=ref("Feedback"),
        more="Given again by the same source under the same name, for the same turn, it replaces "
        "what was given. Datasets that are built afterwards see it.",
        fails=(*MISSING, "400 invalid_value"),
    ),
    Operation(
        "get",
        "/v1/trajectories",
        "listRuns",
        "Training",
        "The runs that match",
        listed(ref("ShownRun")),
        query=(
            *WHICH,
            query("limit", {**COUNT, "minimum": 1, "maximum": MOST}),
            query("after", TEXT, "The last id of the page before."),
            query("order", {"enum": list(ORDERS)}),
            query("tokens", {"enum": ["false", "true"]}, "Whether calls come with their tokens."),
            query("view", {"enum": ["whole", "summary"]}, "What the index knows, at once."),
        ),
    ),
    Operation(
        "get",
        "/v1/trajectories/{run_id}",
        "retrieveRun",
        "Training",
        "One run, with its tokens",
        ref("ShownRun"),
        fails=MISSING,
    ),
    Operation(
        "delete",
        "/v1/trajectories/{run_id}",
        "deleteRun",
        "Training",
        "Forget a run",
        record({"id": TEXT, "object": {"const": "trajectory"}, "deleted": {"const": True}}),
        more="It is gone from every answer at once, from the disk when segments are compacted.",
        fails=MISSING,
    ),
)
