"""Catalog: the boards and alerts, as data. tests check each expression against a real scrape.

`$__rate_interval` is Grafana's: the shortest range over which a rate can be computed. Written as
files by board_files.py. A new panel or alert is a line here.
"""

from dataclasses import dataclass

RATE = "$__rate_interval"


@dataclass(frozen=True)
class BoardPanel:
    """A chart. `curves`: PromQL and legend of each; `unit`: Grafana's name of the unit."""

    title: str
    curves: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""


@dataclass(frozen=True)
class MetricBoard:
    """A page of charts. `name`: of its file."""

    name: str
    title: str
    panels: tuple[BoardPanel, ...]


@dataclass(frozen=True)
class Alert:
    """An alert: `expression` holds for `minutes`. `summary` says what is wrong and what to do."""

    name: str
    expression: str
    minutes: int
    summary: str
    severity: str = "warning"


def _rate(counter: str, by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({counter}[{RATE}]))"


def _quantile(share: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket[{RATE}])))"


def _quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


def _latest(gauge: str, legend: str) -> tuple[tuple[str, str], ...]:
    return ((gauge, legend),)


SERVING = MetricBoard(
    "serving",
    "Serving",
    (
        BoardPanel(
            "Calls by version",
            ((_rate("cray_model_requests_total", "version"), "{{version}}"),),
            "reqps",
        ),
        BoardPanel(
            "Tokens by version",
            ((_rate("cray_model_tokens_total", "version, kind"), "{{version}} {{kind}}"),),
            "short",
            "Prompt and sampled tokens a second, as recorded.",
        ),
        BoardPanel("Time to first token", _quantiles("cray_first_token_seconds"), "s"),
        BoardPanel("Time between tokens", _quantiles("cray_inter_token_seconds"), "s"),
        BoardPanel(
            "Calls by finish reason",
            ((_rate("cray_model_requests_total", "finish"), "{{finish}}"),),
            "reqps",
        ),
        BoardPanel("Errors by code", ((_rate("cray_errors_total", "code"), "{{code}}"),), "reqps"),
        BoardPanel(
            "Requests by route",
            ((_rate("cray_requests_total", "route, status"), "{{route}} {{status}}"),),
            "reqps",
        ),
        BoardPanel(
            "Tokens by key",
            ((_rate("cray_model_tokens_total", "key"), "{{key}}"),),
            "short",
            "A key is the hash of its id.",
        ),
    ),
)

POOL = MetricBoard(
    "pool",
    "Replicas and swaps",
    (
        BoardPanel("Replicas by state", _latest("cray_replicas", "{{state}}")),
        BoardPanel(
            "Version of each replica",
            _latest("cray_replica_info", "{{replica}} {{version}} {{state}}"),
        ),
        BoardPanel("Requests in flight", _latest("cray_replica_requests", "{{replica}}")),
        BoardPanel(
            "Busy share",
            ((f"rate(cray_replica_busy_seconds_total[{RATE}])", "{{replica}}"),),
            "percentunit",
        ),
        BoardPanel(
            "KV cache used",
            _latest("vllm:kv_cache_usage_perc", "{{replica}}"),
            "percentunit",
        ),
        BoardPanel(
            "Prefix cache hits",
            (
                (
                    f"sum by (replica) (rate(vllm:prefix_cache_hits_total[{RATE}])) / "
                    f"sum by (replica) (rate(vllm:prefix_cache_queries_total[{RATE}]))",
                    "{{replica}}",
                ),
            ),
            "percentunit",
        ),
        BoardPanel(
            "Requests at the engines",
            (
                ("vllm:num_requests_running", "{{replica}} running"),
                ("vllm:num_requests_waiting", "{{replica}} waiting"),
            ),
        ),
        BoardPanel(
            "Last change by phase",
            _latest("cray_replica_change_seconds", "{{replica}} {{version}} {{phase}}"),
            "s",
        ),
        BoardPanel(
            "Golden probe: difference from the trainer (nats)",
            (
                ('cray_probe_logprob_diff{kind="max"}', "{{version}} max"),
                ('cray_probe_logprob_diff{kind="tolerance"}', "{{version}} tolerance"),
            ),
        ),
        BoardPanel(
            "Swaps",
            ((f"sum by (outcome) (increase(cray_swap_seconds_count[{RATE}]))", "{{outcome}}"),),
        ),
        BoardPanel(
            "Restarts",
            ((f"sum by (replica) (increase(cray_replica_restarts_total[{RATE}]))", "{{replica}}"),),
        ),
        BoardPanel("Canary share", _latest("cray_canary_share", "{{version}}"), "percentunit"),
        BoardPanel(
            "Canary: failed sessions",
            _latest("cray_canary_failed_share", "{{version}} {{arm}}"),
            "percentunit",
        ),
    ),
)

QUEUE = MetricBoard(
    "queue",
    "Queue, batches and store",
    (
        BoardPanel(
            "Calls inside and waiting",
            _latest("cray_admission_requests", "{{class}} {{place}}"),
        ),
        BoardPanel("Places at the engines", _latest("cray_admission_capacity", "places")),
        BoardPanel("Wait for a place", _quantiles("cray_queue_wait_seconds"), "s"),
        BoardPanel("Batches", _latest("cray_batches", "{{status}}")),
        BoardPanel("Lines of batches under way", _latest("cray_batch_lines", "{{state}}")),
        BoardPanel("Age of the oldest batch", _latest("cray_batch_oldest_seconds", "age"), "s"),
        BoardPanel("Recording a call", _quantiles("cray_store_append_seconds"), "s"),
        BoardPanel(
            "Appends in a commit",
            (
                (
                    f"{_rate('cray_store_committed_appends_total')} / "
                    f"{_rate('cray_store_commits_total')}",
                    "appends",
                ),
            ),
        ),
        BoardPanel("Store", _latest("cray_store_bytes", "{{form}}"), "bytes"),
        BoardPanel("Index behind", _latest("cray_store_index_lag", "events")),
    ),
)

LOOP = MetricBoard(
    "loop",
    "Loops",
    (
        BoardPanel("Held-out success", _latest("cray_loop_holdout_success", "{{loop}}")),
        BoardPanel("Evidence for the candidate", _latest("cray_loop_evidence", "{{loop}}")),
        BoardPanel("Runs of a generation", _latest("cray_loop_runs", "{{loop}} {{kind}}")),
        BoardPanel(
            "Seconds by phase", _latest("cray_loop_phase_seconds", "{{loop}} {{phase}}"), "s"
        ),
        BoardPanel("Generations", _latest("cray_loop_generations_total", "{{loop}} {{outcome}}")),
        BoardPanel("Engines idle", _latest("cray_loop_idle_share", "{{loop}}"), "percentunit"),
        BoardPanel(
            "Tasks whose attempts all got the same reward",
            _latest("cray_loop_zero_variance_groups", "{{loop}}"),
        ),
        BoardPanel("Tokens trained on", _latest("cray_loop_trained_tokens", "{{loop}}")),
    ),
)

JOB = MetricBoard(
    "job",
    "Training jobs",
    (
        BoardPanel("Jobs", _latest("cray_jobs", "{{state}}")),
        BoardPanel("Loss (nats)", _latest("cray_job_loss", "{{job}}")),
        BoardPanel("Norm of the gradient", _latest("cray_job_grad_norm", "{{job}}")),
        BoardPanel("Tokens a second", _latest("cray_job_tokens_per_second", "{{job}}")),
        BoardPanel("MFU", _latest("cray_job_mfu", "{{job}}"), "percentunit"),
        BoardPanel(
            "Share of communication", _latest("cray_job_communication", "{{job}}"), "percentunit"
        ),
        BoardPanel("Seconds of a step", _latest("cray_job_step_seconds", "{{job}}"), "s"),
        BoardPanel(
            "Since the last step",
            (("time() - cray_job_last_step_time", "{{job}}"),),
            "s",
        ),
        BoardPanel("Slowest rank", _latest("cray_job_straggler_ratio", "{{job}}")),
        BoardPanel(
            "Trainer and engine: difference of logprobs (nats)",
            (
                ("cray_job_agreement_max", "{{job}} max"),
                ("cray_job_agreement_mean", "{{job}} mean"),
            ),
        ),
    ),
)

DEVICES = MetricBoard(
    "devices",
    "Devices and disk",
    (
        BoardPanel(
            "What came of GPUs",
            ((f'deriv(cray_held_seconds{{unit="gpu"}}[{RATE}])', "{{kind}} {{use}}"),),
            "short",
            "GPUs in use at a time; from the ledger, once a minute or less often.",
        ),
        BoardPanel(
            "What came of cores",
            ((f'deriv(cray_held_seconds{{unit="core"}}[{RATE}])', "{{kind}} {{use}}"),),
            "short",
            "Cores in use at a time; from the ledger, once a minute or less often.",
        ),
        BoardPanel("Disk of the shared root", _latest("cray_disk_bytes", "{{kind}}"), "bytes"),
        BoardPanel("Damaged places in the store", _latest("cray_store_problems", "places")),
    ),
)

COST = MetricBoard(
    "cost",
    "Cost",
    (
        BoardPanel(
            "Cost of a day, by what came of it",
            (("sum by (use) (cray_cost - cray_cost offset 1d)", "{{use}}"),),
            "short",
            "In the currency of [prices]; requests and training are use, all else is not.",
        ),
        BoardPanel("Cost so far", (("sum by (use) (cray_cost)", "{{use}}"),)),
        BoardPanel(
            "Share of use",
            (
                (
                    'sum by (unit) (cray_held_seconds{use=~"requests|training"}) / '
                    "sum by (unit) (cray_held_seconds)",
                    "{{unit}}",
                ),
            ),
            "percentunit",
        ),
        BoardPanel("Energy measured", (("sum by (use) (cray_energy_joules)", "{{use}}"),), "joule"),
        BoardPanel("Cost by loop", _latest("cray_loop_cost", "{{loop}}")),
        BoardPanel(
            "Device-seconds by loop",
            _latest("cray_loop_device_seconds", "{{loop}} {{use}} {{unit}}"),
            "s",
        ),
        BoardPanel("Cost of a success", _latest("cray_loop_cost_per_success", "{{loop}}")),
        BoardPanel(
            "Cost of a point of held-out success",
            _latest("cray_loop_cost_per_point", "{{loop}}"),
            "short",
            "A point is a hundredth. Nothing is shown for a loop that gained nothing.",
        ),
        BoardPanel(
            "Cost by key",
            _latest("cray_key_cost", "{{key}}"),
            "short",
            "A key is the hash of its id.",
        ),
        BoardPanel(
            "Device-seconds by key", _latest("cray_key_device_seconds", "{{key}} {{unit}}"), "s"
        ),
    ),
)

BOARDS = (SERVING, POOL, QUEUE, LOOP, JOB, DEVICES, COST)

ALERTS = (
    Alert(
        "NoReplicaServes",
        'sum(cray_replicas{state="serving"}) == 0 and '
        "sum(cray_admission_requests) > 0",
        2,
        "No replica serves, and calls wait: `cray-agents status` says why.",
        "critical",
    ),
    Alert(
        "EngineSilent",
        'cray_engine_up == 0 and on (replica) cray_replica_info{state="serving"} == 1',
        2,
        "The vLLM of replica {{ $labels.replica }} does not answer.",
    ),
    Alert(
        "ReplicaRestarts",
        "sum by (replica) (increase(cray_replica_restarts_total[30m])) > 2",
        0,
        "Replica {{ $labels.replica }} was restarted several times: see logs/ and /v1/pool.",
    ),
    Alert(
        "ProbeFailed",
        "cray_probe_passed == 0",
        0,
        "{{ $labels.version }} gave other logprobs than its trainer and does not serve.",
        "critical",
    ),
    Alert(
        "SwapFailed",
        'increase(cray_swap_seconds_count{outcome="failed"}[30m]) > 0',
        0,
        "A change of version failed; the version before goes on serving.",
    ),
    Alert(
        "CallsRefused",
        'sum(rate(cray_errors_total{code="rate_limit_exceeded"}[5m])) > 1',
        5,
        "More calls than max_queue wait: add replicas, or raise max_queue.",
    ),
    Alert(
        "ServerErrors",
        'sum(rate(cray_requests_total{status="5xx"}[5m])) / sum(rate(cray_requests_total[5m]))'
        " > 0.02",
        5,
        "More than 2 % of the requests fail: see cray_errors by code, and logs/platform.log.",
    ),
    Alert(
        "KvCacheFull",
        "vllm:kv_cache_usage_perc > 0.95 and on (replica) vllm:num_requests_waiting > 0",
        5,
        "Replica {{ $labels.replica }} has no room for the calls that wait: lower max_num_seqs, or"
        " add replicas.",
    ),
    Alert(
        "JobStands",
        'time() - max(cray_job_last_step_time) > 1800 and sum(cray_jobs{state="running"}) > 0',
        5,
        "No job that runs has ended a step for half an hour: `cray-agents why JOB`.",
    ),
    Alert(
        "LoopStands",
        "time() - cray_loop_last_generation_time > 6 * cray_loop_wall and "
        "time() - cray_loop_last_generation_time < 86400",
        15,
        "Loop {{ $labels.loop }} takes six times as long as its last generation, or has ended.",
    ),
    Alert(
        "RewardsAllEqual",
        "cray_loop_zero_variance_groups > 0 and on (loop) "
        'cray_loop_runs{kind="kept"} == 0',
        0,
        "Loop {{ $labels.loop }} learns nothing: the attempts at each task got equal rewards.",
    ),
    Alert(
        "Straggler",
        "cray_job_straggler_ratio > 1.5",
        5,
        "A rank of {{ $labels.job }} is slow: its events name the node.",
    ),
    Alert(
        "AgreementLost",
        "cray_job_agreement_mean > 0.1",
        0,
        "Trainer and engine of {{ $labels.job }} disagree on the sampled tokens.",
    ),
    Alert(
        "IndexBehind",
        "cray_store_index_lag > 10000",
        5,
        "Recorded events wait for the index: look at the host's own disk.",
    ),
    Alert(
        "StoreDamaged",
        "cray_store_problems > 0",
        0,
        "Records are damaged: `cray-agents runs fsck`.",
        "critical",
    ),
    Alert(
        "DiskFull",
        'sum(cray_disk_bytes{kind="free"}) / sum(cray_disk_bytes{kind="size"}) < 0.1',
        5,
        "Less than 10 % of the shared root's disk is free: `cray-agents models prune`.",
        "critical",
    ),
)  # fmt: skip
