"""A client of a batch as people write it: the openai client, 32 lines at a time.

    python bench/rivals/batch_client.py URL INPUT OUTPUT

Each answer is written as soon as it is there.
"""

import asyncio
import json
import sys
from pathlib import Path

import openai

AT_A_TIME = 32


async def run(url: str, source: Path, target: Path) -> None:
    """Send the bodies of all lines, and write what comes back under their ids."""
    lines = iter(source.read_text().splitlines())
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=2)
    with target.open("w") as out:

        async def work() -> None:
            for line in lines:
                request = json.loads(line)
                body = request["body"]
                more = {name: body.pop(name) for name in ("min_tokens", "ignore_eos")}
                answer = await client.chat.completions.create(**body, extra_body=more)
                result = {"custom_id": request["custom_id"], "body": answer.model_dump()}
                out.write(json.dumps(result) + "\n")
                out.flush()

        await asyncio.gather(*(work() for _ in range(AT_A_TIME)))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
