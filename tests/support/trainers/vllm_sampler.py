"""Samples from a model with vLLM, as the servers do: `python vllm_sampler.py MODEL OUT < requests`.

A request is {"prompt": [ids], "temperature": ..., ...}, one a line; so are the answers, with
`token_ids` and `logprobs`. A process of its own: vLLM and Megatron do not share one.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=32,
        kv_cache_memory_bytes=2**27,
        enforce_eager=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
    )
    requests = [json.loads(line) for line in sys.stdin]
    prompts = [{"prompt_token_ids": request.pop("prompt")} for request in requests]
    params = [
        SamplingParams(max_tokens=24, logprobs=0, detokenize=False, ignore_eos=True, seed=n, **more)
        for n, more in enumerate(requests)
    ]
    with Path(sys.argv[2]).open("w") as out:
        for answer in engine.generate(prompts, params, use_tqdm=False):
            said = answer.outputs[0]
            ids = list(said.token_ids)
            found = [at[token].logprob for at, token in zip(said.logprobs, ids, strict=True)]
            out.write(json.dumps({"token_ids": ids, "logprobs": found}) + "\n")


if __name__ == "__main__":
    main()
