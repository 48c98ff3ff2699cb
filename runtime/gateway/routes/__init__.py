"""The gateway's HTTP surface: every route, with the JSON that goes in and comes out.

`create_app` mounts the modules beside this one, and answers.py and passing.py, which ask the
engines. `GET /openapi.json` tells the same to machines (openapi/). Every answer carries
`x-request-id` and `openai-processing-ms`, that of a model call the `x-ratelimit-*-requests` headers
too (edge.py). Every error, also 404, 405 and a body that is no JSON, is
`{"error": {"message", "type", "param", "code"}}` with the status in brackets below.

Where keys are required (auth.py has the table of roles), a request without a good one is [401
invalid_api_key], one whose key has too small a role [403 insufficient_permissions], one that would
change what another key made [403 not_the_owner] (ownership.py); without keys, a web page of another
host is [403 origin_not_allowed, host_not_allowed]. A request for a model that finds the wait queue
full is [429 rate_limit_exceeded] with `retry-after-ms` (admission.py). A head or body that stops
coming is [408 request_timeout], a compressed body [415 unsupported_content_encoding]; where the
disk is full, what would be written is [507 disk_full], and what the shared root does not take
otherwise [503 store_error]. Who speaks Anthropic's API (by path, or by the header
`anthropic-version`) gets Anthropic's errors and models. No error tells a path of the platform's
machine (server_paths.py).

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
        Also under /runs/{run_id}. OpenAI's three, and Anthropic's, as vLLM serves them; fields that
        are unknown here go to it. `model` is `name` (the promoted version) or `name@N`. The
        answer's `id` is the ModelCall's id (choice k > 0 of `n`: `<id>-k`), its `model` the
        `name@N` that served it. Header `X-Run-Id` (or the path) names the run; without, it is that
        of the conversation which the messages go on with (conversations.py), else a new one. It is
        told as `x-run-id`. `X-Run-Tags: a, b` are words it is found by. With an `Idempotency-Key`,
        again: the recorded answer, to the byte (`x-idempotent-replayed: true`).
        `return_samples: true` adds `samples` to the answer, or to the last event but one:
        [{"prompt_token_ids", "token_ids", "logprobs"}] per choice.
        [404 model_not_found; 400 invalid_value, context_length_exceeded, idempotency_key_reused;
        the engine's own 4xx; 429; 503 engine_unavailable; 504 engine_timeout; 502 engine_error,
        engine_died: of this request, twice; 503 model_not_loaded: no replica holds the version]
    POST /v1/embeddings, /v1/tokenize, /v1/detokenize, /v1/messages/count_tokens
        Also under /runs/{run_id}. As vLLM serves them; nothing is recorded [400 unsupported_model]
    GET  /v1/models          {"object": "list", "data": [{"id", "object": "model", "created",
                             "owned_by": "cray-agents"}]}: each promoted `name`, each `name@N`
    GET  /v1/models/{id}     one of them [404 model_not_found]
    GET  /health, /health/live    {"status": "ok"}
    GET  /health/ready       {"status": "ready"} [503 not_ready]: a replica can answer, and what it
                             says could be recorded
    GET  /metrics            Prometheus' text, or OpenMetrics for who accepts that (metrics.py)
    GET  /v1/platform        the dict that `up` gave: engine, trainer, scheduler, home, version
    GET  /v1/whoami          {"key": its id or null, "name", "role"}
    GET  /v1/pool            {"data": [status of each replica], "spares": [of those started on
                             demand], "lease": null | {"holder", "version", "displaced",
                             "seconds_left"}}
    POST /v1/pool/lease      {"holder", "seconds"? (60)}: what he staged by force stays so long from
                             now on; 0 gives it back [404 no_lease]

    DELETE /v1/trajectories/{run_id}     {"id", "object": "trajectory", "deleted": true}: forgotten,
                                         and off the disk when segments are compacted [404]
    POST /v1/trajectories/{run_id}/events
        {"events": [{"kind": "run" | "reward", "body": Run | Reward, "id"?, "time"?}]}
        -> {"appended": n, "duplicates": m}. Without an id an event is named by its content, so that
        sending it again is harmless. A Run's `id` may be left out; a call inside a turn is dropped
        (tokens come from the engine alone). The newest `run` event of a run counts, and the newest
        reward of each (name, source, turn). A reward is a number of at most `reward_limit`; its
        `giver` is the name of the caller's key. The run is the caller's or new; of one that is not
        there nothing is rewarded [404]. To say that a run is a loop's, imported, or on a held-out
        task needs `train` [403 insufficient_permissions]; an admin may do all of it.
    POST /v1/trajectories/events        the same of several runs: each event has a "run_id", too
    POST /v1/trajectories/{run_id}/rewards      {"value", "name"? ("feedback"), "source"?
        ("human"), "turn"?, "comment"?} -> Reward: feedback on a run that is there [404; 400: it has
        no such turn]
    GET  /v1/trajectories?loop=&generation=&agent=&task=&split=&stop_reason=&model=&min_reward=
                         &max_reward=&error=(a type, or *)&since=&until=&tag=&tag=&text=
                         &order=(id | newest | oldest | task)&limit=(100, <= 1000)&after=
                         &tokens=(false)&view=(whole | summary)
        -> {"object": "list", "data": [Run + "reward" + "usage"], "has_more", "first_id", "last_id"}
        in that order; without tokens the calls' three token lists are empty (`usage` still counts).
        A summary is what the index knows of a run, at once. `text` reads what the other filters
        leave. [404 not_found: `after` names no run, in another order than id]
    GET  /v1/trajectories/{run_id}    Run + "reward" + "usage", tokens included [404 not_found]

    POST /v1/datasets        DatasetRecipe (`tokenizer`: checkpoint directory, id, or `name@N`) ->
                             {"id", "method", "samples", "trained_tokens", "accepted_runs",
                             "considered_runs", "rejected": {reason: count}}; built in a process of
                             its own, once [400 empty_dataset, step_taken]
    GET  /v1/datasets?limit=(20)&after=              the above + "created" of each, newest first
    GET  /v1/datasets/{id}   its manifest: the above + "tokens", "splits", "versions",
                             "demonstrations", "recipe", "loop", "step",
                             "files": {name: {"sha256", "bytes", "rows"?}} [404]
    GET  /v1/datasets/{id}/runs?accepted=&reason=&limit=(100)&after=
                             every run considered: {"run", "task", "generation", "attempt",
                             "reward", "accepted", "reason", "detail", "samples"} [404]
    GET  /v1/datasets/{id}/card          text/markdown [404]

    GET  /v1/datasets/{id}/export?format=(jsonl)&split=(train)&strict=&allow=&skip_missing=
                         &skip_unsupported=
        -> application/x-ndjson, a Parquet file (tokens, verl) or a tar (huggingface), streamed.
        Header `x-export-losses: code=count, ...` where that is known before the first byte: with
        `strict` (which makes losses but the `allow`ed ones an error), in Parquet, and where it is
        small. What fails later breaks the connection off. [404; 400 unknown_format, no_pairs,
        missing_runs, unsupported_export, export_loss; 429 where four are under way]
    GET  /v1/trajectories/export?format=&...     the same, of the runs that match

    POST /v1/jobs            JobSpec; `parent` and `reference` may be `name`, `name@N`, a checkpoint
                             id or directory; without `parent_sha256`, `reference_sha256`
                             and `code` they are filled in; without a `layout` the trainer chooses
                             it, and says why in the event `layout` -> JobStatus
    GET  /v1/jobs?limit=(20)&after=      JobStatus of each, newest first
    GET  /v1/jobs/{id}       JobStatus [404]
    GET  /v1/jobs/{id}/events?after=N    {"data": [event], "last": M}: the lines after the first N
    GET  /v1/jobs/{id}/logs?tail=200     text/plain, the last lines
    POST /v1/jobs/{id}/cancel            JobStatus
    POST /v1/jobs/{id}/pause             JobStatus: `running` until it has saved and its processes
                                         are gone, then `paused` [400 job_ended]
    POST /v1/jobs/{id}/resume            JobStatus; it goes on from there [400 job_not_paused]

    POST /v1/fine_tuning/jobs            OpenAI's, supervised and dpo: {"model", "training_file",
                             "validation_file"?, "method"?, "suffix"?, "seed"?, "metadata"?}
                             -> a job at once, which then validates its files; the same request is
                             the same job. Its result is registered as
                             `fine_tuned_model`, the next version of `suffix` or of the model's
                             own name, and answers by that name.
                             [404 model_not_found; 400 invalid_training_file,
                             invalid_validation_file, unsupported_value, job_exists]
    GET  /v1/fine_tuning/jobs?limit=(20)&after=&metadata[key]=value      newest first
    GET  /v1/fine_tuning/jobs/{id}       a paused job is `queued`, with metadata `paused: "true"`
    POST /v1/fine_tuning/jobs/{id}/cancel | pause | resume
                                         [400 job_ended, job_not_started, job_not_paused]
    GET  /v1/fine_tuning/jobs/{id}/events?limit=(20)&after=              newest first
    GET  /v1/fine_tuning/jobs/{id}/checkpoints     the final one: those in between are resume points

    POST /v1/models/{name}/versions      {"checkpoint": id or directory} -> ModelVersion, the same
                                         one for the same weights [404; 422 corrupt]
    GET  /v1/models/{name}/versions      {"data": [ModelVersion + "id" + "promoted"]} (oldest first)
    POST /v1/models/{name}/versions/{n}/stage    {"force"? (role admin), "holder"?, "seconds"?} ->
                                         ProbeReport; one replica holds it, the others serve on.
                                         The last one of a promoted version only by force, as a
                                         lease [409 swap_failed, would_displace, pool_busy]
    POST /v1/models/{name}/promote       {"version": n, "who"?, "reason"?, "numbers"?, "force"?} ->
                                         ModelEvent when the pool holds it [409 swap_failed,
                                         would_displace: another name's promoted version]
    POST /v1/models/{name}/rollback      {"to"?: n, "force"?, "who"?, "reason"?} -> ModelEvent: to
                                         what was promoted before [400; 409 swap_failed]
    POST /v1/models/{name}/reject        {"version": n, "who"?, "reason"?, "numbers"?} -> ModelEvent
    GET  /v1/models/{name}/history       {"data": [ModelEvent]} (oldest first)
        ModelEvent: {"name", "number", "kind", "version", "who", "reason", "numbers", "time"};
        `number` counts what happened to the name, `kind` is promoted | rolled_back | rejected |
        canary_started | canary_ended.
    GET  /v1/models/{name}/lineage       {"data": [version, job, dataset, parent, children, ...]} of
                                         `name` or `name@N`, parents first
    POST /v1/models/{name}/canary        {"version": n, "who"?, "reason"?, and what CanaryTest has}
                                         -> ModelEvent [400 canary_running; 409 swap_failed]
    GET  /v1/models/{name}/canary        ModelEvent + "seen" [404]
    DELETE /v1/models/{name}/canary?who=&reason=     ModelEvent [404; 409 swap_failed]

    GET  /v1/loops/{loop}/generations            {"data": [record]}, in order of number
    POST /v1/loops/{loop}/generations/{n}        any object -> {"created": bool}; the first stays
    GET  /v1/loops/{loop}/journal/{entry}        what was written there [404]
    POST /v1/loops/{loop}/journal/{entry}        any object -> {"created": bool}; the first stays

    POST /v1/files           OpenAI's: multipart `file` and `purpose`, "expires_after[anchor]" and
                             "expires_after[seconds]"? -> {"id", "bytes", "created_at", "filename",
                             "object": "file", "purpose", "status", "expires_at"?}; streamed to the
                             disk, at most 8 GiB (Services.max_file) [413 body_too_large;
                             400 invalid_multipart, invalid_content_type, missing_file,
                             missing_field, field_too_large]
    GET  /v1/files?after=&limit=(10000)&order=(desc)&purpose=     by time of creation
    GET  /v1/files/{id}      [404: deleted, expired]
    DELETE /v1/files/{id}    {"id", "object": "file", "deleted": true}
    GET  /v1/files/{id}/content          the bytes; one Range is served [416 range_not_satisfiable]

    POST /v1/uploads         OpenAI's: {"bytes", "filename", "mime_type", "purpose",
                             "expires_after"?} -> {"id", "status", "file", "expires_at", ...}. Ours:
                             `sha256` names the content; then a pending upload of the same caller,
                             content, filename and purpose is gone on with, and one whose content is
                             here comes back `completed`. It expires a day after its last part.
    GET  /v1/uploads/{id}    the same, and "parts": [{"id", "bytes", "sha256", "created_at", ...}]
    POST /v1/uploads/{id}/parts          multipart `data`, at most 64 MiB; or `sha256` alone, of
                             content that is here [404 content_unknown]. The same content again is
                             the same part. [400 upload_completed | _cancelled | _expired;
                             400 part_too_large; 413]
    POST /v1/uploads/{id}/complete       {"part_ids": [in order], "md5"?}; again: the same file
                             [400 part_not_found, bytes_mismatch, md5_mismatch, sha256_mismatch]
    POST /v1/uploads/{id}/cancel

    POST /v1/batches         OpenAI's: {"input_file_id" (purpose batch), "endpoint" (its chat,
                             completions, responses or embeddings), "completion_window" (24h; ours:
                             1h to 30d), "metadata"?, "output_expires_after"?} -> Batch. With an
                             `Idempotency-Key`, again: the same batch. Any number of lines. What is
                             wrong with the input shows as `failed`, with `errors`.
                             [404 not_found; 400 unknown_parameter]
    GET  /v1/batches?after=&limit=(20, <= 100)                           newest first
    GET  /v1/batches/{id}    Batch: status, request_counts, usage so far; at the end output_file_id,
                             error_file_id: together they hold every line once. A line that was not
                             asked has the error batch_cancelled or batch_expired.
    POST /v1/batches/{id}/cancel         Batch; lines in flight have 5 s [400 invalid_status]

ModelVersion in answers carries `id` (`name@N`) too; its `checkpoint` is an id under the home.
"""
