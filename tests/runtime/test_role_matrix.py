"""Every route of the gateway, who may ask it, and whose things it changes: a new one needs a row.

The table is written by hand on purpose: routes say what is done, this what was meant. It changes

    nothing     reads, or asks a model and records nothing under a name of the client's choice
    own         makes something that is the caller's
    owned       changes what is there, for its owner or an admin
    shared      training, versions, loops: who has the role may change all of it
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.routing import Route

from cray_agents.paths import Home
from cray_agents.runtime.gateway.app import create_app, routes
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from tests.support.scripted_gateway import CHAT, Gateway, says, served

MATRIX = """
POST    /v1/chat/completions                            use     own
POST    /v1/completions                                 use     own
POST    /v1/responses                                   use     own
POST    /v1/messages                                    use     own
POST    /runs/{run_id}/v1/chat/completions              use     owned
POST    /runs/{run_id}/v1/completions                   use     owned
POST    /runs/{run_id}/v1/responses                     use     owned
POST    /runs/{run_id}/v1/messages                      use     owned
POST    /v1/embeddings                                  use     nothing
POST    /runs/{run_id}/v1/embeddings                    use     nothing
POST    /v1/messages/count_tokens                       use     nothing
POST    /runs/{run_id}/v1/messages/count_tokens         use     nothing
POST    /v1/tokenize                                    use     nothing
POST    /runs/{run_id}/v1/tokenize                      use     nothing
POST    /v1/detokenize                                  use     nothing
POST    /runs/{run_id}/v1/detokenize                    use     nothing
GET     /v1/models                                      use     nothing
GET     /runs/{run_id}/v1/models                        use     nothing
GET     /v1/models/lineage                              use     nothing
GET     /v1/models/{model}                              use     nothing
GET     /v1/models/{name}/versions                      use     nothing
POST    /v1/models/{name}/versions                      train   shared
POST    /v1/models/{name}/versions/{number}/stage       train   shared
POST    /v1/models/{name}/promote                       admin   shared
POST    /v1/models/{name}/rollback                      admin   shared
POST    /v1/models/{name}/reject                        admin   shared
GET     /v1/models/{name}/history                       use     nothing
GET     /v1/models/{name}/lineage                       use     nothing
GET     /v1/models/{name}/canary                        use     nothing
POST    /v1/models/{name}/canary                        admin   shared
DELETE  /v1/models/{name}/canary                        admin   shared
GET     /v1/trajectories                                train   nothing
GET     /v1/trajectories/export                         train   nothing
GET     /v1/trajectories/stats                          train   nothing
GET     /v1/trajectories/diff                           use     nothing
GET     /v1/trajectories/{run_id}                       use     nothing
GET     /v1/trajectories/{run_id}/outline               use     nothing
GET     /v1/trajectories/{run_id}/turns                 use     nothing
GET     /v1/trajectories/{run_id}/turns/{number}/tokens use     nothing
POST    /v1/trajectories/{run_id}/turns/{number}/score  use     nothing
DELETE  /v1/trajectories/{run_id}                       admin   shared
POST    /v1/trajectories/events                         use     owned
POST    /v1/trajectories/{run_id}/events                use     owned
POST    /v1/trajectories/{run_id}/rewards               use     owned
GET     /v1/datasets                                    train   nothing
POST    /v1/datasets                                    train   shared
GET     /v1/datasets/diff                               train   nothing
GET     /v1/datasets/diff/runs                          train   nothing
GET     /v1/datasets/{dataset_id}                       train   nothing
GET     /v1/datasets/{dataset_id}/runs                  train   nothing
GET     /v1/datasets/{dataset_id}/card                  train   nothing
GET     /v1/datasets/{dataset_id}/histograms            train   nothing
GET     /v1/datasets/{dataset_id}/samples               train   nothing
GET     /v1/datasets/{dataset_id}/export                train   nothing
GET     /v1/jobs                                        train   nothing
POST    /v1/jobs                                        train   shared
GET     /v1/jobs/{job_id}                               train   nothing
GET     /v1/jobs/{job_id}/spec                          train   nothing
GET     /v1/jobs/{job_id}/series                        train   nothing
GET     /v1/jobs/{job_id}/hardware                      train   nothing
GET     /v1/jobs/{job_id}/timeline                      train   nothing
GET     /v1/jobs/{job_id}/events                        train   nothing
GET     /v1/jobs/{job_id}/logs                          train   nothing
POST    /v1/jobs/{job_id}/cancel                        train   shared
POST    /v1/jobs/{job_id}/pause                         train   shared
POST    /v1/jobs/{job_id}/resume                        train   shared
POST    /v1/jobs/{job_id}/receive                       train   shared
POST    /v1/jobs/{job_id}/commands                      train   shared
GET     /v1/jobs/{job_id}/commands                      train   nothing
GET     /v1/jobs/{job_id}/commands/{sequence}           train   nothing
GET     /v1/fine_tuning/jobs                            train   nothing
POST    /v1/fine_tuning/jobs                            train   shared
GET     /v1/fine_tuning/jobs/{fine_tuning_job_id}       train   nothing
POST    /v1/fine_tuning/jobs/{fine_tuning_job_id}/cancel        train   shared
POST    /v1/fine_tuning/jobs/{fine_tuning_job_id}/pause         train   shared
POST    /v1/fine_tuning/jobs/{fine_tuning_job_id}/resume        train   shared
GET     /v1/fine_tuning/jobs/{fine_tuning_job_id}/events        train   nothing
GET     /v1/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints   train   nothing
GET     /v1/evaluations                                 train   nothing
GET     /v1/loops                                       train   nothing
GET     /v1/loops/{loop}/iterations/{number}/timeline  train   nothing
GET     /v1/loops/{loop}/journal/{entry}                train   nothing
POST    /v1/loops/{loop}/journal/{entry}                train   shared
GET     /v1/loops/{loop}/iterations                    train   nothing
GET     /v1/loops/{loop}/settings                      train   nothing
GET     /v1/loops/{loop}/iterations/{number}           train   nothing
GET     /v1/loops/{loop}/iterations/{number}/pairs     train   nothing
POST    /v1/loops/{loop}/iterations/{number}           train   shared
GET     /v1/rollouts                                    train   nothing
POST    /v1/rollouts                                    train   shared
GET     /v1/rollouts/{run_id}                           train   nothing
POST    /v1/rollouts/lease                              train   shared
POST    /v1/rollouts/{run_id}/renew                     train   shared
POST    /v1/rollouts/{run_id}/result                    train   shared
GET     /health                                         open    nothing
GET     /health/live                                    open    nothing
GET     /health/ready                                   open    nothing
GET     /v1/platform                                    use     nothing
GET     /v1/whoami                                      use     nothing
GET     /v1/queue                                       use     nothing
GET     /v1/health/warnings                             train   nothing
GET     /v1/keys                                        admin   nothing
POST    /v1/keys                                        admin   shared
DELETE  /v1/keys/{key}                                  admin   shared
GET     /v1/usage                                       use     nothing
GET     /v1/cost                                        use     nothing
GET     /v1/events                                      train   nothing
GET     /v1/pool                                        admin   nothing
GET     /v1/pool/{replica}/log                          admin   nothing
POST    /v1/pool/lease                                  admin   shared
POST    /v1/gateways                                    admin   shared
POST    /v1/gateways/load                               admin   shared
GET     /v1/gateways/proof                              open    nothing
GET     /metrics                                        use     nothing
GET     /metrics/engines                                use     nothing
GET     /openapi.json                                   use     nothing
GET     /                                               open    nothing
GET     /assets/{asset}                                 open    nothing
POST    /v1/dashboard/sign_ins                          use     own
POST    /v1/dashboard/sign_ins/exchange                 open    nothing
GET     /api/v1/healthz                                 open    nothing
POST    /api/v1/client/config                           use     nothing
POST    /api/v1/client/dynamic_config                   use     nothing
GET     /api/v1/get_server_capabilities                 use     nothing
POST    /api/v1/create_session                          use     nothing
POST    /api/v1/session_heartbeat                       use     nothing
POST    /api/v1/telemetry                               use     nothing
POST    /api/v1/create_sampling_session                 use     own
GET     /api/v1/samplers/{sampler_id}                   use     nothing
POST    /api/v1/asample                                 use     own
POST    /api/v1/cancel_future                           use     own
POST    /api/v1/retrieve_future                         use     nothing
POST    /api/v1/auth/token                              use     nothing
POST    /api/v1/join_sampling_session                   use     nothing
POST    /api/v1/retrieve_futures                        use     nothing
POST    /api/v1/create_custom_loss                      use     nothing
POST    /api/v1/copy_weights                            use     nothing
POST    /api/v1/save_weights_external                   use     nothing
POST    /api/v1/create_model                            train   shared
POST    /api/v1/load_weights                            train   shared
POST    /api/v1/unload_model                            train   shared
POST    /api/v1/get_info                                train   nothing
POST    /api/v1/forward_backward                        train   shared
POST    /api/v1/optim_step                              train   shared
POST    /api/v1/save_weights                            train   shared
POST    /api/v1/save_weights_for_sampler                train   shared
POST    /api/v1/weights_info                            train   nothing
GET     /api/v1/training_runs                           train   nothing
GET     /api/v1/training_runs/{model_id}                train   nothing
GET     /api/v1/training_runs/{model_id}/checkpoints    train   nothing
GET     /v1/files                                       use     nothing
POST    /v1/files                                       use     own
GET     /v1/files/{file_id}                             use     nothing
DELETE  /v1/files/{file_id}                             use     owned
GET     /v1/files/{file_id}/content                     use     nothing
POST    /v1/uploads                                     use     own
GET     /v1/uploads/{upload_id}                         use     nothing
POST    /v1/uploads/{upload_id}/parts                   use     owned
POST    /v1/uploads/{upload_id}/complete                use     owned
POST    /v1/uploads/{upload_id}/cancel                  use     owned
GET     /v1/batches                                     use     nothing
POST    /v1/batches                                     use     own
GET     /v1/batches/{batch_id}                          use     nothing
GET     /v1/batches/{batch_id}/errors                   use     nothing
POST    /v1/batches/{batch_id}/cancel                   use     owned
"""
ROWS = {(row[0], row[1]): (row[2], row[3]) for row in map(str.split, MATRIX.strip().splitlines())}


@dataclass
class Site:
    """A gateway that asks for keys, and what ann has there."""

    gateway: Gateway
    keys: dict[str, str]
    things: dict[str, str]

    async def call(self, who: str, method: str, template: str, **options: Any) -> tuple[int, str]:
        """The status, and the code of the error."""
        path = template
        for name, value in self.things.items():
            path = path.replace(f"{{{name}}}", value)
        path = "/".join("1" if part.startswith("{") else part for part in path.split("/"))
        headers = {"authorization": f"Bearer {self.keys[who]}"} if who in self.keys else {}
        status, answer = await self.gateway.call(method, path, headers=headers, **options)
        return status, answer["error"]["code"] if status >= 400 else ""

    def sent(self, template: str) -> dict[str, Any]:
        """What makes a request good enough to be asked whose it is."""
        if template.endswith("/parts"):
            form = aiohttp.FormData()
            form.add_field("data", b"x", filename="data")
            return {"data": form}
        event = {"kind": "reward", "body": {"name": "r", "value": 1}}
        if template.endswith("/events"):
            return {"json": {"events": [{**event, "run_id": self.things["run_id"]}]}}
        if template.endswith("/rewards"):
            return {"json": {"value": 1}}
        if template.endswith("/complete"):
            return {"json": {"part_ids": []}}
        if template.endswith("/exchange"):
            return {"json": {"token": "made-up"}}
        asks = {"model": "calc", "messages": says("x"), "prompt": "x", "input": "x"}
        return {"json": {**asks, "max_tokens": 1}}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    roles = {"ann": Role.use, "bob": Role.use, "use": Role.use, "train": Role.train,
             "admin": Role.admin}  # fmt: skip
    keys = Keys(Home(tmp_path / "home"))
    secrets = {name: keys.create(name, role)[1] for name, role in roles.items()}
    async with served(tmp_path, api_keys="required") as gateway:
        ann = {"authorization": f"Bearer {secrets['ann']}"}

        async def made(path: str, **options: Any) -> str:
            status, answer = await gateway.call("POST", path, headers=ann, **options)
            assert status == 200, answer
            return str(answer["id"])

        line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions",'
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", line + b'"body":{"model":"calc"}}', filename="f.jsonl")
        file = await made("/v1/files", data=form)
        batch = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        upload = {"bytes": 1, "filename": "f", "mime_type": "text/plain", "purpose": "user_data"}
        things = {
            "run_id": (await gateway.ask("hello", headers=ann)).run_id,
            "file_id": file,
            "batch_id": await made("/v1/batches", json=batch),
            "upload_id": await made("/v1/uploads", json=upload),
        }
        yield Site(gateway, secrets, things)


async def test_every_route_has_a_row(site: Site) -> None:
    served_routes = set()
    for route in create_app(site.gateway.services).routes:
        assert isinstance(route, Route)
        served_routes |= {(m, route.path_format) for m in (route.methods or {"GET"}) - {"HEAD"}}
    assert served_routes == set(ROWS)


async def test_each_role_gets_what_its_row_says(site: Site) -> None:
    """That who may is let in, test_middleware.py tries, for all roles."""
    roles = [role.name for role in Role]
    declared = {(route.method, route.path): route.role for route in routes()}
    for (method, template), (need, _) in ROWS.items():
        assert declared[method, template] == (need if need == "open" else Role[need]), template
        if need == "open":
            # a file that no build has, a token that nobody made: refused, but not for want of a key
            status, code = await site.call("nobody", method, template, **site.sent(template))
            assert status in (200, 404, 503) or code in ("invalid_token", "invalid_value"), template
            continue
        assert await site.call("nobody", method, template) == (401, "invalid_api_key")
        for role in roles[: roles.index(need)]:
            found = await site.call(role, method, template)
            assert found == (403, "insufficient_permissions"), (method, template, role)


async def test_what_strains_the_machine_or_takes_a_model_off_the_air_is_the_admins(
    site: Site,
) -> None:
    for path, body in (
        ("/v1/jobs", {"oversubscribe": True}),
        ("/v1/models/calc/versions/1/stage", {"force": True}),
        ("/v1/jobs/{job_id}/receive", {"force": True}),
    ):
        found = await site.call("train", "POST", path, json=body)
        assert found == (403, "insufficient_permissions"), path


async def test_what_is_owned_is_changed_by_its_owner_or_an_admin(site: Site) -> None:
    owned = [row for row, (_, changes) in ROWS.items() if changes == "owned"]
    assert len(owned) >= 12
    for method, template in owned:
        for who in ("bob", "train"):
            found = await site.call(who, method, template, **site.sent(template))
            assert found == (403, "not_the_owner"), (method, template, who)
    for method, template in sorted(owned):  # DELETE comes first, `cancel` before the others
        who = "admin" if template.endswith(("events", "cancel")) else "ann"
        status, code = await site.call(who, method, template, **site.sent(template))
        assert status not in (401, 403), (method, template, code)
