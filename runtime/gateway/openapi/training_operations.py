"""Operations from runs to promoted weights: trajectories, datasets, jobs, versions, loops."""

from cray_agents.runtime.gateway.openapi.operation import Operation, Schema, query, ref
from cray_agents.runtime.gateway.openapi.schemas import data, listed, record, some
from cray_agents.runtime.gateway.openapi.trajectory_operations import TRAJECTORIES
from cray_agents.runtime.gateway.routes.datasets import MOST as MOST_DATASETS
from cray_agents.runtime.gateway.routes.fine_tuning import MOST as MOST_JOBS
from cray_agents.runtime.gateway.routes.jobs import MOST as MOST_TRAINED

TEXT: Schema = {"type": "string"}
ANY: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}
AFTER = query("after", TEXT, "The last id of the page before.")
PAGE = (AFTER, query("limit", {**COUNT, "maximum": MOST_JOBS}))
MISSING = ("404 not_found",)
LINES = "How many lines."


def _about(path: str, acts: tuple[tuple[str, str, str], ...], answer: str) -> list[Operation]:
    """What can be done to a job: each a POST without a body."""
    return [
        Operation(
            "post",
            f"{path}/{act}",
            name,
            "Training",
            summary,
            ref(answer),
            fails=("404 not_found", "400 job_ended", "400 job_not_paused"),
        )
        for act, name, summary in acts
    ]


DATASETS = (
    Operation(
        "post",
        "/v1/datasets",
        "buildDataset",
        "Training",
        "Build a training set from runs and demonstrations",
        ref("DatasetSummary"),
        takes=ref("DatasetRecipe"),
        fails=("400 empty_dataset", "400 step_taken"),
    ),
    Operation(
        "get",
        "/v1/datasets",
        "listDatasets",
        "Training",
        "The training sets, newest first",
        listed({"allOf": [ref("DatasetSummary"), record({"created": {"type": "number"}})]}),
        query=(AFTER, query("limit", {**COUNT, "maximum": MOST_DATASETS})),
    ),
    Operation(
        "get",
        "/v1/datasets/{dataset_id}",
        "retrieveDataset",
        "Training",
        "A training set's manifest",
        ref("DatasetSummary"),
        fails=MISSING,
    ),
    Operation(
        "get",
        "/v1/datasets/{dataset_id}/runs",
        "listDatasetRuns",
        "Training",
        "Every run that a training set considered: in or out, and why",
        listed(ref("ConsideredRun")),
        query=(
            query("accepted", {"enum": ["true", "false"]}, "Only those that are in, or out."),
            query("reason", TEXT, "Only those left out for this reason."),
            query("limit", {**COUNT, "maximum": MOST_DATASETS}),
            query("after", TEXT, "The last run of the page before."),
        ),
        fails=MISSING,
    ),
    Operation(
        "get",
        "/v1/datasets/{dataset_id}/card",
        "readDatasetCard",
        "Training",
        "A training set's card",
        {"text/markdown": TEXT},
        fails=MISSING,
    ),
)
JOBS = (
    Operation(
        "post",
        "/v1/jobs",
        "createJob",
        "Training",
        "Train on a dataset",
        ref("JobStatus"),
        takes=ref("JobSpec"),
        more="The same spec is the same job. `parent` and `reference`: a name, `name@N` or a "
        "checkpoint's id. Their hashes and `code` are filled in where they are left out. A spec "
        "without a `layout` gets one of the trainer's, and the event `layout` says why that one. A "
        "job that failed is tried again where it is to be run otherwise: another layout, "
        "`recompute`, `save_every`, `keep`, `evaluate_every` or `logprob_limit`. A layout that "
        "takes more than there is of cores, memory or GPUs is refused without `oversubscribe`. "
        "`optimizer_from` may be `parent`: the job that made the parent, if it did so here and "
        "neither has LoRA.",
        fails=("400 invalid_value", "404 model_not_found"),
    ),
    Operation(
        "get",
        "/v1/jobs",
        "listJobs",
        "Training",
        "Every job, newest first",
        listed(ref("JobStatus")),
        query=(AFTER, query("limit", {**COUNT, "maximum": MOST_TRAINED})),
    ),
    Operation(
        "get",
        "/v1/jobs/{job_id}",
        "retrieveJob",
        "Training",
        "Where a job stands",
        ref("JobStatus"),
        fails=MISSING,
    ),
    Operation(
        "get",
        "/v1/jobs/{job_id}/events",
        "listJobEvents",
        "Training",
        "A job's events, after the first `after`",
        record({"data": some({}), "last": COUNT}),
        query=(query("after", COUNT),),
        fails=MISSING,
    ),
    Operation(
        "get",
        "/v1/jobs/{job_id}/logs",
        "readJobLog",
        "Training",
        "The last lines of a job's log",
        {"text/plain": TEXT},
        query=(query("tail", COUNT, LINES),),
        fails=MISSING,
    ),
    *_about(
        "/v1/jobs/{job_id}",
        (
            ("cancel", "cancelJob", "End a job for good"),
            ("pause", "pauseJob", "Let a job save and stop"),
            ("resume", "resumeJob", "Go on from where a job was paused"),
        ),
        "JobStatus",
    ),
)
FINE_TUNING = (
    Operation(
        "post",
        "/v1/fine_tuning/jobs",
        "createFineTuningJob",
        "Training",
        "Train on an uploaded file (OpenAI's API, supervised and dpo)",
        ref("FineTuningJob"),
        takes=ref("CreateJob"),
        more="The same request is the same job. The result is a version that waits for promotion.",
        fails=(
            "404 model_not_found",
            "400 invalid_training_file",
            "400 invalid_validation_file",
            "400 unsupported_value",
        ),
    ),
    Operation(
        "get",
        "/v1/fine_tuning/jobs",
        "listFineTuningJobs",
        "Training",
        "The fine-tuning jobs, newest first",
        listed(ref("FineTuningJob")),
        query=PAGE,
        more="Filter with `metadata[key]=value`; `metadata=null` for those without.",
    ),
    Operation(
        "get",
        "/v1/fine_tuning/jobs/{fine_tuning_job_id}",
        "retrieveFineTuningJob",
        "Training",
        "Where a fine-tuning job stands",
        ref("FineTuningJob"),
        fails=MISSING,
    ),
    Operation(
        "get",
        "/v1/fine_tuning/jobs/{fine_tuning_job_id}/events",
        "listFineTuningEvents",
        "Training",
        "What happened, newest first",
        listed(ref("FineTuningEvent")),
        query=PAGE,
        fails=MISSING,
    ),
    Operation(
        "get",
        "/v1/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints",
        "listFineTuningCheckpoints",
        "Training",
        "The weights that a job ended with",
        listed(ref("FineTuningCheckpoint")),
        query=PAGE,
        fails=MISSING,
    ),
    *_about(
        "/v1/fine_tuning/jobs/{fine_tuning_job_id}",
        (
            ("cancel", "cancelFineTuningJob", "End a fine-tuning job for good"),
            ("pause", "pauseFineTuningJob", "Let a fine-tuning job save and stop"),
            ("resume", "resumeFineTuningJob", "Go on from where it was paused"),
        ),
        "FineTuningJob",
    ),
)
_SAID: Schema = {"who": TEXT, "reason": TEXT}
VERSIONS = (
    Operation(
        "post",
        "/v1/models/{name}/versions",
        "registerVersion",
        "Versions",
        "Make a version of a checkpoint",
        ref("ShownVersion"),
        takes=record({"checkpoint": TEXT}),
        more="`checkpoint`: an id, or a directory on the gateway's machine.",
        fails=("404 not_found", "422 corrupt"),
    ),
    Operation(
        "get",
        "/v1/models/{name}/versions",
        "listVersions",
        "Versions",
        "A name's versions, oldest first",
        data({"allOf": [ref("ShownVersion"), record({"promoted": {"type": "boolean"}})]}),
        fails=("404 model_not_found",),
    ),
    Operation(
        "post",
        "/v1/models/{name}/versions/{number}/stage",
        "stageVersion",
        "Versions",
        "Let a replica hold a version, proven by its probe",
        ref("ProbeReport"),
        takes=record(
            {},
            {"force": {"type": "boolean"}, "holder": TEXT, "seconds": {"type": "number"}},
        ),
        empty=True,
        more="The others serve on what they served. What is promoted is taken off its last replica "
        "only with `force` (role admin), for a `holder`: it comes back `seconds` after he last "
        "renewed that at /v1/pool/lease, or when the version is rejected.",
        fails=("404 model_not_found", "409 swap_failed", "409 would_displace", "409 pool_busy"),
    ),
    Operation(
        "post",
        "/v1/models/{name}/promote",
        "promote",
        "Versions",
        "Let a name mean a version",
        ref("ModelEvent"),
        takes=record(
            {"version": {"type": "integer"}},
            {**_SAID, "numbers": ANY, "force": {"type": "boolean"}},
        ),
        more="`force`: although what another name means is then served no more.",
        fails=("404 model_not_found", "409 swap_failed", "409 would_displace"),
    ),
    Operation(
        "post",
        "/v1/models/{name}/rollback",
        "rollBack",
        "Versions",
        "Let a name mean the version that was promoted before",
        ref("ModelEvent"),
        takes=record(
            {}, {"to": {"type": ["integer", "null"]}, "force": {"type": "boolean"}, **_SAID}
        ),
        more="`to`: another version that was promoted once, or any with `force`.",
        fails=("404 model_not_found", "409 swap_failed", "400 invalid_value"),
    ),
    Operation(
        "post",
        "/v1/models/{name}/reject",
        "reject",
        "Versions",
        "Note that a version was found not good enough",
        ref("ModelEvent"),
        takes=record({"version": {"type": "integer"}}, {**_SAID, "numbers": ANY}),
        fails=("404 model_not_found", "400 invalid_value", "400 canary_running"),
    ),
    Operation(
        "get",
        "/v1/models/{name}/history",
        "listHistory",
        "Versions",
        "What happened to a name, oldest first",
        data(ref("ModelEvent")),
        fails=("404 model_not_found",),
    ),
    Operation(
        "get",
        "/v1/models/{name}/lineage",
        "lineage",
        "Versions",
        "Where versions come from, parents first",
        data(ref("Ancestry")),
        more="`name`: all its versions and their ancestors. `name@N`: its ancestors and what came "
        "of it.",
        fails=("404 model_not_found",),
    ),
    Operation(
        "get",
        "/v1/models/{name}/canary",
        "retrieveCanary",
        "Versions",
        "The canary that runs, and what was seen of it",
        {"allOf": [ref("ModelEvent"), record({"seen": ANY})]},
        fails=("404 not_found",),
    ),
    Operation(
        "post",
        "/v1/models/{name}/canary",
        "startCanary",
        "Versions",
        "Answer a share of the live sessions by a version",
        ref("ModelEvent"),
        takes=ref("CanaryRequest"),
        more="A session is named by `X-Session-Id`, else by `user`, else by its run; it stays with "
        "its version. Rolled back by itself when more fails or rewards are lower.",
        fails=("404 model_not_found", "409 swap_failed", "400 canary_running"),
    ),
    Operation(
        "delete",
        "/v1/models/{name}/canary",
        "stopCanary",
        "Versions",
        "Answer all sessions by the promoted version again",
        ref("ModelEvent"),
        query=(query("who", TEXT), query("reason", TEXT)),
        fails=("404 not_found", "409 swap_failed"),
    ),
)
LOOPS = (
    Operation(
        "get",
        "/v1/loops/{loop}/generations",
        "listGenerations",
        "Training",
        "A loop's finished generations",
        data(ANY),
    ),
    Operation(
        "post",
        "/v1/loops/{loop}/generations/{number}",
        "finishGeneration",
        "Training",
        "Record a generation; the first record stays",
        record({"created": {"type": "boolean"}}),
        takes=ANY,
    ),
    Operation(
        "get",
        "/v1/loops/{loop}/journal/{entry}",
        "recallEntry",
        "Training",
        "What a loop noted",
        ANY,
        fails=MISSING,
    ),
    Operation(
        "post",
        "/v1/loops/{loop}/journal/{entry}",
        "noteEntry",
        "Training",
        "Note a decision of a loop; the first note stays",
        record({"created": {"type": "boolean"}}),
        takes=ANY,
    ),
)
OPERATIONS = (*TRAJECTORIES, *DATASETS, *JOBS, *FINE_TUNING, *VERSIONS, *LOOPS)
