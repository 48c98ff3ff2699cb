"""The gateway's HTTP surface: every route, with the JSON that goes in and comes out.

`create_app` mounts the six modules beside this one and `chat.py`. Every answer carries
`x-request-id`. Every error, also 404, 405 and a body that is no JSON, is
`{"error": {"message", "type", "param", "code"}}` with the status in brackets below.

    POST /v1/chat/completions, /runs/{run_id}/v1/chat/completions
        OpenAI's request; `model` is `name` (the promoted version) or `name@N`. The answer's `id` is
        the ModelCall's id (choice k > 0 of `n`: `<id>-k`), its `model` the `name@N` that served it.
        Header `X-Run-Id` (or the path) names the run, else a new one; echoed as `x-run-id`.
        [404 model_not_found; 400 invalid_value; the engine's own 4xx; 503 engine_unavailable;
        504 engine_timeout; 502 engine_error]
    GET  /v1/models          {"object": "list", "data": [{"id", "object": "model", "created",
                             "owned_by": "cray-agents"}]}: each promoted `name`, each `name@N`
    GET  /v1/models/{id}     one of them [404 model_not_found]
    GET  /health, /health/live    {"status": "ok"}
    GET  /health/ready       {"status": "ready"} [503 not_ready]
    GET  /v1/platform        the dict that `up` gave: engine, trainer, scheduler, home, version
    GET  /v1/pool            {"data": [status of each replica]}

    POST /v1/trajectories/{run_id}/events
        {"events": [{"kind": "run" | "reward", "body": Run | Reward, "id"?, "time"?}]}
        -> {"appended": n, "duplicates": m}. Without an id an event is named by its content, so that
        sending it again is harmless. A Run's `id` may be left out; a call inside a turn is dropped
        (tokens come from the engine alone). The newest `run` event of a run counts, and the newest
        reward of each (name, source).
    GET  /v1/trajectories?loop=&generation=&agent=&task=&split=&stop_reason=&model=
                         &limit=(100, <= 1000)&after=&tokens=(false)
        -> {"object": "list", "data": [Run + "reward" + "usage"], "has_more", "first_id", "last_id"}
        by run id; without tokens the calls' three token lists are empty (`usage` still counts).
    GET  /v1/trajectories/{run_id}    Run + "reward" + "usage", tokens included [404 not_found]

    POST /v1/datasets        DatasetRecipe (`tokenizer`: checkpoint directory, id, or `name@N`) ->
                             {"id", "samples", "trained_tokens", "accepted_runs",
                             "considered_runs", "rejected": {reason: count}} [400 empty_dataset]
    GET  /v1/datasets/{id}   its manifest: the above + "tokens", "demonstrations", "recipe",
                             "runs": [{"run", "accepted", "reason", "reward", "samples"}],
                             "files": {name: sha256}, "created" [404]

    POST /v1/jobs            JobSpec; `parent` may be `name`, `name@N` or a checkpoint id; without
                             `parent_sha256` and `code` they are filled in -> JobStatus
    GET  /v1/jobs            {"data": [JobStatus]}
    GET  /v1/jobs/{id}       JobStatus [404]
    GET  /v1/jobs/{id}/events?after=N    {"data": [event], "last": M}: the lines after the first N
    GET  /v1/jobs/{id}/logs?tail=200     text/plain, the last lines
    POST /v1/jobs/{id}/cancel            JobStatus

    POST /v1/models/{name}/versions      {"checkpoint": id or directory} -> ModelVersion, the same
                                         one for the same weights [404; 422 corrupt]
    GET  /v1/models/{name}/versions      {"data": [ModelVersion + "id" + "promoted"]} (oldest first)
    POST /v1/models/{name}/versions/{n}/stage    ProbeReport [409 swap_failed]
    POST /v1/models/{name}/promote       {"version": n, "who", "reason"} -> Promotion; the pool is
                                         swapped first if it holds another version [409 swap_failed]
    GET  /v1/models/{name}/promotions    {"data": [Promotion]} (oldest first)
        Promotion: {"name", "number", "version", "who", "reason", "time"}; `number` counts them.

    GET  /v1/loops/{loop}/generations            {"data": [record]}, in order of number
    POST /v1/loops/{loop}/generations/{n}        any object -> {"created": bool}; the first stays

ModelVersion in answers carries `id` (`name@N`) too; its `checkpoint` is an id under the home.
"""
