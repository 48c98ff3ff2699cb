"""One platform process: gateway, pool, store, registry, scheduler and trainer, wired together.

`up` calls `serve`. This module only makes the parts, passes them to each other, and closes them in
reverse order. The scheduler starts first (a private Slurm takes half a second). The gateway answers
as soon as it listens, while the replicas are still loading.
"""

import asyncio
import contextlib
import gc
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from cray_agents.config import Config
from cray_agents.errors import SetupError, StoreError
from cray_agents.paths import Home
from cray_agents.processes import SAFE_IMPORTS, end_child, python
from cray_agents.records import ModelVersion
from cray_agents.runtime.accounting.ledger import HeldDevices, LedgerFile, keep_ledger
from cray_agents.runtime.controller_lease import ControllerLease
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.http.auth import is_loopback
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission, GatewayShares
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE
from cray_agents.runtime.pool.job_lease import ReplicaSpec
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.serving_plan import (
    ServedModel,
    check_fast_rollouts,
    check_kv_tier,
    load_format,
    plan_serving,
)
from cray_agents.runtime.pool.slurm_replica import JobBoard, SlurmReplica, cancel_surplus
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess, has_gpu_build
from cray_agents.runtime.pool.weight_transfer import FILES, TransferSettings, check_transfer
from cray_agents.runtime.registry.checkpoints import delete_leftovers, read_manifest
from cray_agents.runtime.registry.deltas import materialize, rebuilt_bytes
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scaling.decision import ServingRule
from cray_agents.runtime.scheduler.choose import configured_scheduler
from cray_agents.runtime.scheduler.gpu_placement import (
    GpuPlacement,
    check_weights_fit,
    host_gpus,
    place_on_host,
)
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.runtime.store.compaction import keep_up
from cray_agents.server.cluster_view import ClusterView
from cray_agents.server.first_version import first_version
from cray_agents.server.gateway_parts import (
    GC,
    SWITCH,
    admitted_each,
    blocks_of,
    check_access,
    live_traces,
    make_server,
    open_store,
    outage_seconds,
)
from cray_agents.server.gateway_ports import Ports, address
from cray_agents.server.gpu_turns import TrainingSide, take_turns
from cray_agents.server.permissions import keep_private, prepare_kv_tier
from cray_agents.server.platform_process import ReplicaCount, distribution_version
from cray_agents.server.replica_count import (
    devices_of_replicas,
    keep_replica_count,
    replica_command,
    replica_rule,
    scaling_rules,
    serving_device,
)
from cray_agents.server.root_claim import describe_inheritance, say, stand_by, start_anew
from cray_agents.server.trackers import check_trackers, follow
from cray_agents.trainers.job.failures.failure import failure_settings
from cray_agents.trainers.job.job_command import code_version
from cray_agents.trainers.job.job_state import restart_unfinished_jobs
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.planning.cluster_resources import Resources, resources_of

WORKER_STOP, GATEWAY_STOP = 5.0, 10.0  # seconds between SIGTERM and SIGKILL


def serve(
    config: Config,
    model: Path | None,
    name: str,
    replicas: ReplicaCount,
    *,
    standby: bool = False,
) -> None:
    """Run a platform until SIGINT or SIGTERM. Raises SetupError, BadInput, StoreError.

    A `standby` first waits until the platform that runs has no controller any more.
    """
    home = config.root
    make_root(config)
    check_access(config)
    check_trackers(config)
    resources_of(config)  # raises on a wrong configuration before anything starts
    control = (stand_by if standby else start_anew)(config, name, str(replicas))
    if control is None:
        return
    ports, lease = control.ports, control.lease
    with contextlib.closing(ports), contextlib.ExitStack() as ending:
        ending.callback(lambda: lease.give_back(hand_over=lease.hands_over))
        if control.before is not None:
            name, replicas = lease.claim["name"], ReplicaCount.parse(lease.claim["replicas"])
            say(describe_inheritance(home, control))
        delete_leftovers(home)
        registry = Registry(home, lease.check)
        version = first_version(registry, model, name, required=replicas.total > 0)
        gpu = replicas.total > 0 and has_gpu_build()
        servers = replicas.here if gpu else 0  # on GPUs of this host
        with contextlib.closing(configured_scheduler(config, servers)) as scheduler:
            scheduler.guard = lease.check
            say(f"scheduler: {scheduler.reason}")
            here = scheduler.on_this_host
            placement = place_on_host(config, replicas=servers, here=here)
            resources = resources_of(config, here=here, host_gpus=scheduler.gpus)
            say(f"trainer: {resources}")
            if host_gpus():
                say(f"GPUs of this host: {placement}")
            settings = training = None
            if version is not None:
                served = ServedModel.of(version.id, home.checkpoint(version.checkpoint))
                device = serving_device(config, replicas, gpu=gpu)
                config, plan = plan_serving(config, served, device)
                if replicas.total:
                    settings = engine_settings(config, sleeps=False)
                    say(f"replicas: {plan}")
            if version and placement.turns and isinstance(scheduler, LocalProcesses):
                check_serving(config, version, placement, resources)
                training = TrainingSide(home, scheduler)
            if replicas.total:
                check_transfer(config.weight_transfer, gpu=gpu, turns=placement.turns, here=here)
            idle = 60 * config.train_session_idle_minutes
            trainer = MegatronTrainer(
                home,
                scheduler,
                resources,
                idle,
                turns=training is not None,
                parked_gib=config.train_session_parked_gib,
                weight_transfer=config.weight_transfer,
                engine_dtype=None if settings is None else settings.rounding,
                failures=failure_settings(config),
                guard=lease.check,
            )
            rule = replica_rule(config, replicas)
            platform = describe_platform(config, scheduler, resources, settings)
            jobs = slurm_hosts(config, name, replicas.jobs, scheduler, lease)
            pool = make_pool(config, name, replicas.here, placement, jobs)
            threads = [config.threads] * replicas.here
            platform_run = run(
                config,
                registry,
                trainer,
                platform,
                version,
                pool,
                ports,
                lease,
                training,
                devices_of_replicas(config, placement, replicas.jobs, threads),
                rule,
                cluster_view(config, scheduler, resources, rule),
            )
            os.environ.update(SAFE_IMPORTS)  # of all that is started from here
            uvloop.run(platform_run)


async def run(
    config: Config,
    registry: Registry,
    trainer: MegatronTrainer,
    platform: dict[str, Any],
    version: ModelVersion | None,
    pool: Pool,
    ports: Ports,
    lease: ControllerLease,
    training: TrainingSide | None = None,
    devices: Sequence[HeldDevices] = (),
    rule: ServingRule | None = None,
    cluster: ClusterView | None = None,
) -> None:
    """Run the replicas and the gateway in the event loop until the platform ends.

    `training`: the jobs that use the replicas' GPUs by turns. `devices`: of each replica.
    `rule`: by which replicas come and go; None: all stay. `cluster`: whose training gives way.
    """
    listener = ports.listener
    sys.setswitchinterval(SWITCH)
    gc.set_threshold(*GC)
    home = config.root
    store = await open_store(config)
    shares = GatewayShares()
    services = Services(
        home=home,
        store=store,
        registry=registry,
        trainer=trainer,
        pool=pool,
        platform=platform,
        code=code_version(),
        keep_alive=config.keep_alive,
        body_timeout=config.body_timeout,
        model_roots=tuple(config.model_roots),
        delta_checkpoints=config.delta_checkpoints,
        api_keys=config.api_keys if is_loopback(config.host) else "required",
        token=lease.token,
        lease=lease,
        reward_limit=config.reward_limit,
        run_headers=tuple(config.run_headers),
        prices=config.prices,
        traces=live_traces(config),
        blocks=blocks_of(config),
        admission=make_admission(config, pool, registry, shares, scales=rule is not None),
        shares=shares,
        metrics=Metrics(f"{socket.gethostname()}:{os.getpid()}" if config.gateways > 1 else ""),
    )
    server = make_server(create_app(services), config)
    # both end the platform by an error; all other tasks are started again
    serving = asyncio.create_task(server.serve(sockets=ports.listeners))
    starting = asyncio.create_task(start_pool(pool, home, version, rule))
    keep = services.tasks.keep
    keep("batch worker", partial(run_worker, home, address(listener), key=lease.token))
    if config.watch.scanners:
        keep("watch", partial(run_watch, home, config.watch.every, key=lease.token))
    keep("upkeep of the store", partial(keep_up, store))
    for tracker in config.trackers:
        keep("tracker", partial(follow, home, tracker), tracker)
    keep("restart of jobs", partial(restart_unfinished_jobs, home, trainer))
    ledger = LedgerFile(home.ledger, "platform")
    account = (ledger, pool.status, lambda: services.metrics.sampled_tokens, devices)
    keep("ledger", partial(keep_ledger, *account))
    if rule is not None:
        rules = scaling_rules(config, rule)
        counting = (pool, services.admission, shares, rules, cluster)
        keep("replica count", partial(keep_replica_count, *counting))
    if config.gateways > 1:
        services.note_other_gateways()
        port = listener.getsockname()[1]
        for number in range(1, config.gateways):
            keep("further gateway", partial(run_gateway, config, port, number), str(number))
    if training is not None:
        asked = partial(is_asked, services.admission, shares)
        keep("GPU turns", partial(take_turns, pool, training, asked, report=say))
    await services.fine_tuning.start()
    try:
        say(f"gateway: {address(listener)}/v1; Ctrl-C ends it")
        await wait_for_end(serving, starting, server)
    finally:
        hands_over = lease.hands_over
        if not hands_over:
            lease.give_back(hand_over=False)  # from now on no command uses this platform
        server.should_exit = True
        await services.changes.close()  # its streams would keep the server for ever
        starting.cancel()
        await asyncio.gather(serving, starting, services.tasks.close(), return_exceptions=True)
        await services.close()
        if not hands_over:  # else the standby takes the replicas' jobs over
            await pool.stop()
        await store.close()


def engine_settings(config: Config, *, sleeps: bool) -> EngineSettings:
    """Return the settings of every vLLM server. Raises SetupError for what this vLLM cannot do."""
    check_fast_rollouts(config, gpu=has_gpu_build())
    check_kv_tier(config, sleeps=sleeps)
    return EngineSettings(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        dtype=config.dtype,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        quantization=config.quantization,
        router_replay=config.router_replay,
        speculative=config.speculative,
        speculative_tokens=config.speculative_tokens,
        engine_args=tuple(config.engine_args),
        kv_cache_gib=config.kv_cache_gib,
        threads=config.threads or None,
        max_lora_rank=config.max_lora_rank,
        sleeps=sleeps,
        start_timeout=config.start_timeout,
        answer_timeout=config.engine_timeout,
        load_timeout=config.load_timeout,
        load_format=load_format(config.load_format, gpu=has_gpu_build()),
        scratch=config.replica_scratch,
        kv_tier=config.kv_tier,
        kv_tier_gib=config.kv_tier_gib,
        kv_tier_memory_gib=config.kv_tier_memory_gib,
        transfer=None
        if config.weight_transfer == FILES
        else TransferSettings(
            config.weight_transfer, config.root.sessions, timeout=config.load_timeout
        ),
    )


def slurm_hosts(
    config: Config,
    name: str,
    replicas: int,
    scheduler: Slurm | LocalProcesses,
    lease: ControllerLease | None = None,
) -> list[SlurmReplica]:
    """Make the replicas that are Slurm jobs, and cancel those that an earlier platform had more.

    No job is submitted yet. Raises SetupError without a Slurm, BadInput for nodes that do not fit.
    """
    folder = config.root.replicas
    if not isinstance(scheduler, Slurm):
        if replicas:
            raise SetupError(
                f"--replicas slurm:{replicas} needs Slurm, and this platform has "
                f"{scheduler.reason}: give a number of replicas on this host instead"
            )
        return []
    cancel_surplus(folder, scheduler, replicas)
    if not replicas:
        return []
    # late, as cryptography takes a moment to import
    from cray_agents.runtime.pool.replica_certificates import tls_folder

    settings = engine_settings(config, sleeps=config.replica_warm > 0)
    command = replica_command(config)
    spec = ReplicaSpec(
        model=name,
        number=0,
        attempt=0,
        settings=settings,
        gateway=socket.gethostname(),
        package=distribution_version("cray-agents"),
        interface=config.replica_interface,
        tls=tls_folder(config.replica_tls, config.root.tls),
        nodes=command.nodes,
        minutes=config.replica_minutes,
        keep_minutes=config.replica_keep_minutes,
    )
    board = JobBoard(scheduler, term=lambda: 0 if lease is None else lease.term)
    lead = 60 * config.replica_handover_minutes
    return [
        SlurmReplica(
            spec.model_copy(update={"number": n}), folder / str(n), board, command, lead=lead
        )
        for n in range(replicas)
    ]


def cluster_view(
    config: Config,
    scheduler: Slurm | LocalProcesses,
    resources: Resources,
    rule: ServingRule | None,
) -> ClusterView | None:
    """Return the cluster whose training gives way to replicas; None where none does."""
    if rule is None or not config.preempt_training or not isinstance(scheduler, Slurm):
        return None
    return ClusterView(config.root, scheduler, resources, replica_command(config))


def make_pool(
    config: Config,
    name: str,
    replicas: int,
    placement: GpuPlacement,
    jobs: Sequence[SlurmReplica] = (),
) -> Pool:
    """Make the pool of `replicas` on this host, or of `jobs`; no replica is started yet."""
    hosts: list[VllmProcess] = []
    limits = FLOAT32_PROBE
    if replicas:
        settings = engine_settings(config, sleeps=placement.turns)
        devices: list[str | None] = [None] * (replicas + config.spare_replicas)
        if has_gpu_build():
            devices = [",".join(gpus) for gpus in (*placement.replicas, *placement.spares)]
        hosts = [
            VllmProcess(name, settings, config.root.logs / f"replica-{n}.log", gpus)
            for n, gpus in enumerate(devices)
        ]
    if replicas or jobs:
        limits = engine_settings(config, sleeps=False).probe_limits
    return Pool(
        [*hosts[:replicas], *jobs],
        spares=hosts[replicas:],
        probe_limits=limits,
        slots=config.max_num_seqs,
        start_timeout=config.start_timeout,
        wait_timeout=config.swap_timeout,
        swap_mode=config.swap_mode,
        swap_share=config.swap_share,
        affinity=config.replica_affinity,
        silence_timeout=config.silence_timeout,
        name_of=partial(Registry(config.root).name_of, first=name),
    )


def check_serving(
    config: Config, version: ModelVersion, placement: GpuPlacement, resources: Resources
) -> None:
    """Raise BadInput if a version's weights exceed the GPUs that a replica has in its turn."""
    if resources.gpus is not None:
        size = rebuilt_bytes(config.root.checkpoint(version.checkpoint))
        check_weights_fit(version.id, size, len(placement.replicas[0]), resources.gpus.gib)


def is_asked(admission: Admission, shares: GatewayShares) -> bool:
    """Tell whether requests are under way or wait."""
    return admission.demand > 0 or shares.demand > 0


def make_admission(
    config: Config,
    pool: Pool,
    registry: Registry,
    shares: GatewayShares,
    *,
    scales: bool = False,
) -> Admission:
    """Make the admission control; it admits a few more calls than vLLM runs at once.

    With further gateways it admits its own share of them. Where
    replicas come and go (`scales`), a request waits for as long as one may take to start.
    """
    each = admitted_each(config)

    def share_of(number: int) -> int:
        return math.ceil(number * shares.own(admission.demand))

    admission = Admission(
        lambda: share_of(pool.serving * each),
        lambda: share_of(config.max_queue),
        serves=lambda model: pool.serves(registry.resolve(model).id),
        swapping=lambda: pool.swapping,
        outage=outage_seconds(config, scales=scales),
    )
    return admission


async def start_pool(
    pool: Pool, home: Home, version: ModelVersion | None, rule: ServingRule | None = None
) -> None:
    """Start the replicas on a version and check it; by a rule only the fewest, at least one."""
    if version is not None:
        say(f"starting {version.id}")
        directory = home.checkpoint(version.checkpoint)
        manifest = await asyncio.to_thread(read_manifest, directory)
        await asyncio.to_thread(materialize, home, directory)
        started = time.monotonic()
        count = None if rule is None else max(1, rule.least)
        await pool.start(directory, version.id, manifest.probe, count)
    if version is None or not pool.status():
        say("no replicas, as asked for: requests to models are not answered")
        return
    say(f"ready: {version.id} is served after {time.monotonic() - started:.0f} s")


async def wait_for_end(
    serving: "asyncio.Task[None]", starting: "asyncio.Task[None]", server: uvicorn.Server
) -> None:
    """Wait for a signal; raise the error that ended the gateway or the replicas' start."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, signalled.set)
    end = asyncio.create_task(signalled.wait())
    waiting: set[asyncio.Task[Any]] = {end, serving, starting}
    while end not in (done := (await asyncio.wait(waiting, return_when="FIRST_COMPLETED"))[0]):
        for task in done:
            task.result()  # raises the error of the task
        waiting -= done
        if serving in done:
            return


def make_root(config: Config) -> None:
    """Make the shared root, private; check that it can be written. Raises StoreError."""
    home = config.root
    for note in (keep_private(config), prepare_kv_tier(config.kv_tier)):
        if note:
            say(note)
    try:
        home.logs.mkdir(parents=True, exist_ok=True)
        probe = home.root / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"the shared root {home.root} cannot be written ({error.strerror}): choose another "
            "with --home or CRAY_AGENTS_HOME"
        ) from error


def describe_platform(
    config: Config,
    scheduler: Slurm | LocalProcesses,
    resources: Resources,
    served: EngineSettings | None,
) -> dict[str, Any]:
    """Return the answer of `/v1/platform`: engine, trainer and scheduler with versions."""
    megatron = distribution_version("megatron")
    return {
        "version": distribution_version("cray-agents"),
        "home": str(config.root.root),
        "engine": {
            "name": "vllm",
            "version": distribution_version("vllm"),
            "quantized": served is not None and served.quantized,
            "rounding": served and served.rounding,
            "router_replay": served is not None and served.router_replay,
            "kv_tier": None if served is None or served.kv_tier is None else str(served.kv_tier),
        },
        "trainer": {
            "name": "megatron-core",
            "version": megatron,
            "uses": str(resources),
            "host": asdict(resources.host) if resources.host is not None else None,
            "ranks": resources.ranks,
            "nodes": resources.nodes,
            "gpus": asdict(resources.gpus) if resources.gpus is not None else None,
        },
        "scheduler": {"name": scheduler.name, "reason": scheduler.reason},
    }


# ---- child processes; runtime/background.py starts one again that ended by itself
async def run_worker(home: Home, url: str, *, key: str | None = None) -> None:
    """Run a batch worker that uses the gateway at `url`. `key`: its API key. Raises SetupError."""
    argv = python("-m", "cray_agents.runtime.batches.worker", str(home.root), url)
    argv += ["--parent", str(os.getpid())]
    secret = {"CRAY_AGENTS_API_KEY": key} if key else {}
    await _run(argv, home.logs / "batch-worker.log", WORKER_STOP, secret)


async def run_watch(home: Home, every: float, *, key: str | None = None) -> None:
    """Run the scanners of the section [watch]: `key` as of `run_worker`. Raises SetupError."""
    argv = python("-m", "cray_agents", "--home", str(home.root), "scan", "--every", str(every))
    argv += ["--parent", str(os.getpid())]
    secret = {"CRAY_AGENTS_API_KEY": key} if key else {}
    await _run(argv, home.logs / "watch.log", WORKER_STOP, secret)


async def run_gateway(config: Config, port: int, number: int) -> None:
    """Run a further gateway at a port. `number`: in its log's name. Raises SetupError.

    It does not die with the platform: where that is killed it answers models' calls on, as long as
    replicas do, until another process has taken over (further_process.py).
    """
    argv = python("-m", "cray_agents", "up", "--gateway-only", "--home", str(config.root.root))
    argv += ["--host", config.host, "--port", str(port), "--parent", str(os.getpid())]
    await _run(argv, config.root.logs / f"gateway-{number}.log", GATEWAY_STOP, outlives=True)


async def _run(
    argv: Sequence[str],
    log: Path,
    stop: float,
    environment: dict[str, str] | None = None,
    *,
    outlives: bool = False,
) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | (environment or {}),
            start_new_session=outlives,
        )
    try:
        code = await process.wait()
    finally:
        await end_child(process, stop)
    raise SetupError(f"its process {process.pid} ended ({code}), see {log}")
