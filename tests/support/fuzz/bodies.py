"""A good request for every route that takes a body, by its template in the OpenAPI document.

`known-batch-file`, `known-upload` and so on stand for what the fuzzed gateway has; see cases.py.
"""

from typing import Any

CHAT = "/v1/chat/completions"
SAYS = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
EXPIRY = {"anchor": "created_at", "seconds": 3600}
RECIPE: dict[str, Any] = {
    "loop": "l",
    "iterations": [1],
    "split": "train",
    "min_reward": 1.0,
    "balance_by": "level",
    "balance_power": 0.5,
    "demonstrations": [],
    "demonstrations_metadata": [],
    "tools": [TOOL],
    "tokenizer": None,
    "rewards": {"run": 1.0},
}
RUN: dict[str, Any] = {
    "agent": "a",
    "model": "m@1",
    "input": "q",
    "output": "r",
    "stop_reason": "completed",
    "task": {"input": "q", "target": 1, "metadata": {"level": 1}},
    "trajectory": {
        "messages": SAYS,
        "turns": [{"call_id": "c", "tool_calls": [{"id": "t", "name": "f", "arguments": "{}"}]}],
    },
    "loop": "l",
    "iteration": 1,
    "attempt": 0,
}
METHOD = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "messages": [{"role": "system", "content": "be"}, *SAYS],
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "n": 2,
        "stop": ["x"],
        "logprobs": True,
        "return_token_ids": True,
        "metadata": {"a": "b"},
    },
    "/v1/completions": {"model": "m", "prompt": ["a", "b"], "stream": False, "max_tokens": 4},
    "/v1/responses": {
        "model": "m",
        "instructions": "be",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "stream": False,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "be"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}],
            },
        ],
        "stream": False,
    },
    "/v1/embeddings": {"model": "m", "input": ["a", "b"], "encoding_format": "float"},
    "/v1/messages/count_tokens": {"model": "m", "messages": SAYS},
    "/v1/tokenize": {"model": "m", "prompt": "hi", "add_special_tokens": False},
    "/v1/detokenize": {"model": "m", "tokens": [1, 2]},
    "/v1/trajectories/{run_id}/events": {
        "events": [
            {"kind": "run", "body": RUN, "id": "e1", "time": 1.0},
            {"kind": "reward", "body": {"name": "r", "value": 1.0, "source": "s"}},
        ]
    },
    "/v1/trajectories/events": {
        "events": [
            {"run_id": "run_1", "kind": "run", "body": RUN, "id": "e1", "time": 1.0},
            {"run_id": "r2", "kind": "reward", "body": {"name": "r", "value": 1.0, "source": "s"}},
        ]
    },
    "/v1/trajectories/{run_id}/rewards": {
        "value": 1.0,
        "name": "r",
        "source": "s",
        "turn": 0,
        "comment": "c",
    },
    "/v1/trajectories/{run_id}/turns/{number}/score": {"model": "m", "top": 5},
    "/v1/keys": {"name": "k", "role": "use"},
    "/v1/dashboard/sign_ins/exchange": {"token": "t"},
    "/v1/datasets": RECIPE,
    "/v1/jobs": {
        "method": "sft",
        "dataset": "known-dataset",
        "parent": "m@1",
        "optimizer_from": None,
        "hyperparameters": {"steps": 1, "batch_size": 1, "learning_rate": 0.001},
        "code": "c",
        "layout": {"data": 1, "tensor": 1},
        "save_every": 5,
        "keep": 1,
        "recompute": "none",
        "logprob_limit": 0.5,
    },
    "/v1/fine_tuning/jobs": {
        "model": "m",
        "training_file": "known-file",
        "method": METHOD,
        "suffix": "s",
        "seed": 1,
        "integrations": [],
        "metadata": {"a": "b"},
    },
    "/v1/models/{name}/versions": {"checkpoint": "m@1"},
    "/v1/models/{name}/promote": {"version": 1, "who": "w", "reason": "r"},
    "/v1/models/{name}/rollback": {"to": 1, "force": False, "who": "w", "reason": "r"},
    "/v1/models/{name}/reject": {"version": 2, "who": "w", "reason": "r", "numbers": {"wins": 1}},
    "/v1/models/{name}/versions/{number}/stage": {"force": False, "holder": "h", "seconds": 5.0},
    "/v1/gateways": {
        "gateway": "host:1",
        "demand": 3,
        "outcomes": [{"model": "calc", "session": "s", "version": "calc@1", "failed": False}],
        "rewarded": ["run_1"],
        "failures": [{"replica": 99, "losses": 0, "why": "it died"}],
    },
    "/v1/gateways/load": {"version": "m"},
    "/v1/pool/lease": {"holder": "h", "seconds": 5.0},
    "/v1/models/{name}/canary": {"version": 2, "share": 0.1, "alpha": 0.05, "promote_after": 9},
    "/v1/loops/{loop}/iterations/{number}": {"score": 0.5, "promoted": [1, 2]},
    "/v1/loops/{loop}/journal/{entry}": {"carried": ["run_1"]},
    "/v1/rollouts": {
        "run_id": "run_9",
        "environment": "e",
        "agent": "a",
        "model": "m@1",
        "task": {"input": "q", "target": 1, "metadata": {"level": 1}},
        "loop": "l",
        "iteration": 1,
        "attempt": 0,
        "sampling": {"temperature": 1.0},
        "seconds": 60.0,
    },
    "/v1/rollouts/lease": {"environment": "e", "worker": "w", "seconds": 5.0},
    "/v1/rollouts/{run_id}/renew": {"lease": "l", "seconds": 5.0},
    "/v1/rollouts/{run_id}/result": {
        "lease": "l",
        "rewards": [{"name": "r", "value": 1.0, "turn": None}],
        "output": "o",
        "stop_reason": "completed",
        "tags": ["t"],
        "error": None,
    },
    "/v1/uploads": {
        "bytes": 3,
        "filename": "f.txt",
        "mime_type": "text/plain",
        "purpose": "batch",
        "expires_after": EXPIRY,
        "sha256": "0" * 64,
    },
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part-0"], "md5": "0" * 32},
    "/v1/batches": {
        "input_file_id": "known-batch-file",
        "endpoint": CHAT,
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": EXPIRY,
    },
    "/v1/jobs/{job_id}/receive": {"force": False, "holder": "me", "seconds": 9},
    "/v1/jobs/{job_id}/commands": {
        "sequence": 1,
        "command": {"kind": "forward_backward", "data": [{"token_ids": [1, 2], "weights": [0, 1]}]},
    },
    "/api/v1/create_model": {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "Qwen/m",
        "user_metadata": {"a": "b"},
        "lora_config": {"rank": 4, "seed": 1, "train_attn": True, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
    },
    "/api/v1/load_weights": {
        "session_id": "s",
        "model_seq_id": 1,
        "path": "tinker://s:train:0/weights/w",
        "optimizer": False,
    },
    "/api/v1/unload_model": {"model_id": "s:train:8"},
    "/api/v1/get_info": {"model_id": "s:train:0"},
    "/api/v1/optim_step": {
        "model_id": "s:train:0",
        "seq_id": 1,
        "adam_params": {"learning_rate": 0.1, "beta1": 0.9, "eps": 1e-8, "grad_clip_norm": 1},
    },
    "/api/v1/save_weights": {"model_id": "s:train:0", "seq_id": 2, "path": "w"},
    "/api/v1/save_weights_for_sampler": {
        "model_id": "s:train:0",
        "seq_id": 3,
        "sampling_session_seq_id": 1,
        "kind": "snapshot",
    },
    "/api/v1/weights_info": {"tinker_path": "tinker://s:train:0/weights/w"},
    "/api/v1/create_sampling_session": {
        "session_id": "s",
        "sampling_session_seq_id": 0,
        "base_model": "m",
        "model_path": None,
    },
    "/api/v1/asample": {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2, "stop": [3], "temperature": 1.0, "seed": 1},
        "num_samples": 2,
        "prompt_logprobs": False,
    },
    "/api/v1/cancel_future": {"request_id": "s:sample:0/sample/9"},
    "/api/v1/retrieve_future": {"request_id": "s:train:0/create", "allow_metadata_only": True},
}
#: The field that holds the file, of each route that takes a form.
FORMS = {"/v1/files": "file", "/v1/uploads/{upload_id}/parts": "data"}
#: What a template's path parameters mean when they are meant well.
PLAIN = {
    "name": "m",
    "model": "m",
    "number": "1",
    "run_id": "run_1",
    "loop": "l",
    "entry": "g1",
    "file_id": "known-batch-file",
    "upload_id": "known-upload",
    "dataset_id": "known-dataset",
    "job_id": "known-job",
    "fine_tuning_job_id": "known-tuning",
    "batch_id": "known-batch",
    "model_id": "s:train:0",
    "sampler_id": "s:sample:0",
}
