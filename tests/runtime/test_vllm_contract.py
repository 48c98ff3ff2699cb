"""The contract with vLLM: each name of it that our code imports, calls, overrides or sends.

Its sources are read, which takes a second and starts nothing. After an upgrade the failing rows say
what is to be mended, and where. By default they are those of the installed vLLM; `VLLM_SOURCES`
names a folder with another one's wheel unpacked, whatever it computes on.
"""

import ast
import functools
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.package_sources import Function, Row, Sources, parameters, rows

ROOT = Path(__file__).parent.parent.parent
PLUG_INS, POOL = ROOT / "runtime" / "vllm_plugins", ROOT / "runtime" / "pool"
#: Our file, a module of vLLM, its classes ("-": none), and the members that we use. Parentheses
#: hold the arguments that we call one with; without a member they make an object of the class.
INTERNALS = """
capture.py
  v1.engine.logprobs
    LogprobsProcessor: from_new_request(tokenizer=_, request=_) logprobs
    LogprobsProcessor: update_from_output(output)
  v1.engine.output_processor
    RequestState: logprobs_processor output_kind detokenizer lora_name track_weight_version(v)
    RequestState: make_request_output(new_token_ids, pooling_output, finish_reason, ...)
  v1.engine.detokenizer
    BaseIncrementalDetokenizer: stop
  v1.engine
    EngineCoreOutput: new_token_ids prefill_stats new_logprobs routed_experts finish_reason
    EngineCoreRequest: sampling_params request_id external_req_id prompt_token_ids
  v1.metrics.stats
    PrefillStats: num_cached_tokens
  v1.outputs
    LogprobsLists: logprobs
  sampling_params
    SamplingParams: extra_args logprobs prompt_logprobs stop output_kind structured_outputs
    RequestOutputKind: DELTA FINAL_ONLY
  v1.engine.async_llm
    AsyncLLM: engine_core remove_lora(lora_id)
  v1.engine.core_client
    AsyncMPClient: call_utility_async(method, ids)
  lora.request
    LoRARequest: lora_int_id lora_name
  entrypoints.openai.models.serving
    OpenAIServingModels: lora_requests engine_client unload_lora_adapter(request)
chat_route.py
  entrypoints.openai.chat_completion.serving
    OpenAIServingChat: create_chat_completion(request, raw_request)
server.py
  envs
    -: enable_envs_cache()
  entrypoints.launchers.api_server.entry
    -: main()
  entrypoints.launchers.launcher
    -: create_server_socket(...)
  entrypoints.serve.tokenize.protocol
    TokenizeCompletionRequest: build_tok_params(model_config)
    TokenizeChatRequest: build_tok_params(model_config)
    DetokenizeRequest: build_tok_params(model_config)
  renderers.params
    TokenizeParams: max_total_tokens
  entrypoints.cli.serve
    -: run_headless(args) make_arg_parser(parser)
scheduler.py
  v1.core.sched.scheduler
    Scheduler: waiting running kv_holding_waiting deferred_waiting requests policy connector
    Scheduler: finished_req_ids finished_recving_kv_req_ids failed_recving_kv_req_ids
    Scheduler: _inflight_prefills kv_cache_manager get_request_counts() has_finished_requests()
    Scheduler: add_request(request) finish_requests(request_ids, finished_status)
    Scheduler: reset_prefix_cache(reset_running_requests, reset_connector)
    Scheduler: set_pause_state(pause_state) update_from_output(scheduler_output, output)
  v1.core.sched.interface
    PauseState: UNPAUSED
  v1.core.sched.request_queue
    -: create_request_queue(policy)
    RequestQueue: add_request(r) prepend_request(r) remove_request(r) remove_requests(rs)
  v1.core.kv_cache_manager
    KVCacheManager: free(request)
  v1.request
    Request: request_id cache_salt block_hashes _block_hasher kv_transfer_params lora_request
    Request: status sampling_params client_index num_computed_tokens num_preemptions
    Request: update_block_hashes()
    RequestStatus: WAITING PREEMPTED
  v1.structured_output
    StructuredOutputManager: executor
  config.scheduler
    SchedulerConfig: async_scheduling scheduler_cls
  v1.engine.core
    EngineCore: set_weight_version(weight_version) get_weight_version() scheduler
    EngineCoreProc: output_queue
  v1.engine
    EngineCoreOutputs: outputs weight_version
    EngineCoreOutput: (request_id, new_token_ids) events new_sampling_mask
  v1.outputs
    LogprobsLists: (logprob_token_ids, logprobs, sampled_token_ranks) cu_num_generated_tokens
    LogprobsLists: slice_request(req_idx, num_positions)
    ModelRunnerOutput: logprobs
  distributed.kv_transfer.kv_connector.v1.offloading_connector
    OffloadingConnector: connector_scheduler
  distributed.kv_transfer.kv_connector.v1.offloading.scheduler
    OffloadingConnectorScheduler: _req_status
    RequestOffloadState: group_states
    RequestGroupState: offload_keys next_stored_chunk_idx
kv_tier.py
  v1.kv_offload.tiering.base
    SecondaryTierManager: __init__(offloading_spec, primary_kv_view, tier_type, detector) medium
    SecondaryTierManager: tier_type block_size_bytes on_new_request(c) drain_jobs()
    SecondaryTierManager: on_request_finished(c) on_schedule_end(c) lookup(key, c) shutdown()
    SecondaryTierManager: submit_load(job) submit_store(job) get_finished_jobs() get_stats()
    SecondaryTierManager: build_metric_definitions(extra_config)
    TransferJob: job_id keys chunk_ids is_promotion req_context
    JobResult: (job_id=_, success=_, successful_keys=_, transfer_time=_, transfer_bytes=_)
  v1.kv_offload.tiering.async_lookup
    AsyncLookupManager: __init__(tier_type) lookup(key, c) flush() cleanup(req_id) mark_miss(keys)
    AsyncLookupManager: batch_lookup(keys, c) _lookup_queue
  v1.kv_offload.base
    ReqContext: req_id kv_transfer_params get_offload_key_position(key)
    LookupResult: HIT MISS RETRY
    Medium: STORAGE
    RequestOffloadingContext: ()
    OffloadingCounterMetadata: (documentation)
    OffloadingWorker: submit_store(job_id, src_spec, dst_spec)
    OffloadingWorker: submit_load(job_id, src_spec, dst_spec) get_finished() wait(job_ids)
    OffloadingWorker: shutdown()
    TransferResult: (job_id, success, transfer_size, transfer_time)
    GPULoadStoreSpec: block_ids group_sizes
    CanonicalKVCaches: tensors group_data_refs
    CanonicalKVCacheTensor: tensor page_size_bytes
    CanonicalKVCacheRef: tensor_idx
  v1.kv_offload.config
    OffloadingConfig: engine_id parallel kv_cache_layout
  v1.kv_offload.tiering.spec
    TieringOffloadingSpec: _scheduler_mmap _worker config blocks_per_chunk num_chunks
    TieringOffloadingSpec: replicated_layout kv_bytes_per_chunk cpu_page_size_per_worker
    TieringOffloadingSpec: get_worker(kv_caches)
  v1.kv_offload.cpu.shared_offload_region
    SharedOffloadRegion: _creator mmap_path create_next_worker_view(size) cleanup()
    SharedOffloadRegion: (..., engine_id=_, num_chunks=_, rank=_)
    SharedOffloadRegion: (..., kv_bytes_per_chunk=_, cpu_page_size=_)
  v1.kv_offload.file_mapper
    FileMapper: from_offloading_spec(root_dir, spec, blocks_per_file) get_run_config()
  v1.kv_offload.tiering.fs.io
    -: probe_o_direct(directory)
  distributed.kv_transfer.kv_connector.v1.offloading.metrics
    OffloadingConnectorStats: increase_counter(name, value)
worker.py
  v1.worker.gpu_model_runner
    GPUModelRunner: sampler input_batch discard_request_mask sample_tokens(grammar) get_model()
    GPUModelRunner: reload_weights(weights_path=_)
  v1.worker.gpu_input_batch
    InputBatch: num_reqs generators
  v1.utils
    CpuGpuBuffer: np
  v1.sample.sampler
    Sampler: gather_logprobs(logprobs, num_logprobs, token_ids)
  v1.outputs
    LogprobsTensors: (logprob_token_ids, logprobs, selected_token_ranks)
  v1.worker.gpu_worker
    Worker: model_runner vllm_config device weight_transfer_engine update_weights(update_info)
    Worker: _weight_update_active reload_weights(weights_path=_)
  distributed.weight_transfer.base
    WeightTransferEngine: shutdown() finish_weight_update() reset_weight_update_target()
  distributed.weight_transfer.nccl_engine
    NCCLWeightTransferEngine: model_update_group
  distributed.weight_transfer.ipc_engine
    IPCWeightTransferUpdateInfo: ipc_handles names dtype_names shapes
  model_executor.layers.fused_moe.fused_moe_method_base
    FusedMoEMethodBase: moe_kernel process_weights_after_loading(l)
  model_executor.layers.rotary_embedding.base
    RotaryEmbedding: _forward_method forward_cpu(positions, query, key)
  model_executor.layers.utils
    -: dispatch_cpu_unquantized_gemm(layer, remove_weight=_)
  model_executor.model_loader.checkpoint_weight_patch
    CheckpointWeightPatch: (name, shape, dtype, values, indices)
    -: load_checkpoint_weight_patches(model, patches, validate_unique_indices=_)
vllm_engine.py
  entrypoints.openai.completion.protocol
    CompletionRequest: prompt max_tokens prompt_logprobs ignore_eos vllm_xargs
    CompletionResponseChoice: index prompt_logprobs
  entrypoints.serve.engine.protocol
    ModelCard: id root parent max_model_len
  entrypoints.serve.lora.protocol
    LoadLoRAAdapterRequest: lora_name lora_path
    UnloadLoRAAdapterRequest: lora_name
weight_transfer.py
  distributed.weight_transfer.nccl_engine
    NCCLWeightTransferUpdateInfo: names dtype_names shapes
vllm_process.py
  config.kv_transfer
    KVTransferConfig: kv_connector kv_role kv_connector_extra_config
  config.speculative
    SpeculativeConfig: method model num_speculative_tokens
  config.weight_transfer
    WeightTransferConfig: backend
weight_sender.py
  distributed.weight_transfer.nccl_common
    -: uid_init_process_group(id, rank, world_size, device)
    NCCLWeightTransferInitInfo: nccl_unique_id_b64 rank_offset world_size packed
    NCCLWeightTransferInitInfo: packed_buffer_size_bytes packed_num_buffers
  distributed.weight_transfer.ipc_engine
    IPCWeightTransferInitInfo: packed
  distributed.device_communicators.pynccl_wrapper
    NCCLLibrary: ncclGetUniqueId()
"""
#: What stands in a file: names that plug-ins put others in the place of, or that are looked for.
TEXTS = {
    "v1/engine/output_processor.py": (
        *("LogprobsProcessor.from_new_request(", "RequestState.from_new_request("),
        *(".make_request_output(", ".track_weight_version(", ".update_from_output("),
    ),
    "v1/engine/core.py": ("EngineCore encountered a fatal error", "EngineCore failed to start"),
    "v1/executor/multiproc_executor.py": ("WorkerProc failed",),
    "entrypoints/launchers/launcher.py": ("= create_server_socket(",),
    "entrypoints/launchers/api_server/app_state.py": ("state.engine_client =",),
    "model_executor/layers/utils.py": ("layer.cpu_linear =",),
    "v1/kv_offload/factory.py": ('"spec_name"', '"spec_module_path"'),
    "v1/kv_offload/tiering/factory.py": ('"module_path"', '"type"'),
    "v1/kv_offload/tiering/spec.py": ('"secondary_tiers"',),
    "v1/kv_offload/cpu/spec.py": ('"cpu_bytes_to_use"',),
    "v1/kv_offload/base.py": ('"offload_prompt_only"',),
}
#: What we send to routes and read in their answers.
FIELDS = {
    "/pause": ("mode", "clear_cache"),
    "/sleep": ("level", "mode"),
    "/collective_rpc": ("method", "kwargs", "results"),
    "/reset_prefix_cache": ("success",),
    "/update_weight_version": ("new_version",),
    "/init_weight_transfer_engine": ("init_info",),
    "/update_weights": ("update_info",),
}
#: Where vLLM's flags are: as fields of its configuration, or as words.
FLAGS = ("config/*.py", "engine/arg_utils.py", "entrypoints/**/*.py")


def imports() -> Iterator[Row]:
    """What our code imports of vLLM, in functions too."""
    for folder in ("runtime", "trainers", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            if re.search(r"^\s*from vllm", text := file.read_text(), re.MULTILINE):
                yield from (Row(file.name, *one) for one in imported(ast.parse(text)))


def imported(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Module, "" and name of each import from vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
            module = str(node.module).partition(".")[2]
            yield from ((module, "", one.name) for one in node.names)


def overriding() -> Iterator[tuple[Row, Function]]:
    """Methods of our classes over vLLM's: as a row of the base's, and as ours."""
    for file in PLUG_INS.glob("*.py"):
        tree = ast.parse(file.read_bytes())
        origin = {name: module for module, _, name in imported(tree)}
        for made in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for base in {ast.unparse(one) for one in made.bases} & origin.keys():
                for ours in (node for node in made.body if isinstance(node, Function)):
                    yield Row(f"{file.name} {made.name}", origin[base], base, ours.name), ours


def quoted(pattern: str, *files: Path) -> list[str]:
    """What our files hold in quotes and is as the pattern says, each once."""
    words = re.compile(f'"({pattern})"')
    return sorted({word for file in files for word in words.findall(file.read_text())})


def metrics() -> list[str]:
    texts = [file.read_text() for file in (ROOT / "deploy/observability").rglob("*.*")]
    found = {name for text in texts for name in re.findall(r"\bvllm:\w+", text)}
    return sorted(name.removesuffix("_total") for name in found)


@functools.cache
def text_of(*patterns: str) -> str:
    files = (file for pattern in patterns for file in VLLM.package.glob(pattern))
    return "".join(file.read_text() for file in files)


VLLM = Sources(
    Path(os.environ["VLLM_SOURCES"]) / "vllm"
    if "VLLM_SOURCES" in os.environ
    else Path(str(getattr(find_spec("vllm"), "origin", ""))).parent
)
ROWS = [*dict.fromkeys([*imports(), *rows(INTERNALS)])]
OVERRIDING = [*overriding()]
SENT = [POOL / "vllm_process.py", POOL / "vllm_http.py"]
ASKED = [POOL / "vllm_engine.py", POOL / "weight_transfer.py"]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_vllm_has_what_we_use(row: Row) -> None:
    why = VLLM.problem(row)
    assert not why, why


@pytest.mark.parametrize(("row", "ours"), OVERRIDING, ids=[str(row) for row, _ in OVERRIDING])
def test_our_methods_take_what_vllm_gives(row: Row, ours: Function) -> None:
    base = VLLM.members(row.module, row.kind).get(row.member)
    if isinstance(base, Function) and row.member != "__init__":
        taken, given = parameters(ours, method=True), parameters(base, method=True)
        first = taken.positional[: len(given.positional)]
        assert "*" in taken.positional or first == given.positional
        assert "**" in taken.named or {*taken.bare} <= {*given.named} <= {*taken.named}


@pytest.mark.parametrize(("place", "text"), [(at, one) for at in TEXTS for one in TEXTS[at]])
def test_vllm_says_what_we_look_for(place: str, text: str) -> None:
    assert text in text_of(place)


@pytest.mark.parametrize("flag", quoted(r"--[a-z][a-z-]+", *SENT))
def test_vllm_has_the_flags_of_our_command_line(flag: str) -> None:
    setting = flag.removeprefix("--").replace("-", "_")
    assert re.search(rf"^    {setting}: |\"{flag}\"", text_of(*FLAGS), re.MULTILINE)


@pytest.mark.parametrize("variable", quoted("VLLM_[A-Z_]+", *SENT, *PLUG_INS.glob("*.py")))
def test_vllm_reads_the_variables_of_its_environment(variable: str) -> None:
    assert f'"{variable}"' in text_of("envs.py")


@pytest.mark.parametrize("route", quoted(r"/(?:v1/)?[a-z_]+(?:\?[^\"]*)?", *ASKED))
def test_vllm_has_the_routes_that_we_ask(route: str) -> None:
    path = route.partition("?")[0]
    _, *uses = text_of("entrypoints/**/*.py").split(f'"{path}"')
    handlers = [use.partition("\n@")[0] for use in uses]
    assert any(all(word in one for word in FIELDS.get(path, ())) for one in handlers)


def test_the_fields_are_those_of_routes_that_we_ask() -> None:
    asked = "".join(file.read_text() for file in ASKED)
    assert [word for path, words in FIELDS.items() for word in (path, *words)
            if word not in asked] == []  # fmt: skip


@pytest.mark.parametrize("metric", metrics())
def test_vllm_has_the_metrics_of_our_boards(metric: str) -> None:
    assert f'"{metric}"' in text_of("v1/metrics/loggers.py")


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    package = Sources(tmp_path / "vllm")
    package.package.mkdir()
    package.file("queue").write_text(
        "from .base import Base\n\nclass Queue(Base):\n"
        "    size: int\n    def add(self, one, two=2, *, key): self.last = one\n"
    )
    package.file("base").write_text("class Base:\n    @staticmethod\n    def of(name): ...\n")
    told = {
        "Queue: size last of(name) (size) add(one, key=_) add(one, two, key=_) add(...)": "",
        "Stack: size": "there is no class vllm.queue.Stack",
        "-: take()": "vllm.queue has no take",
        "Queue: first": "vllm.queue.Queue has no first",
        "Queue: add(one)": "it also wants key",
        "Queue: add(..., lock=_)": "it takes no lock",
        "Queue: of(a, b)": "it takes (name), and not (a, b)",
        "Queue: (a, b)": "it takes (size), and not (a, b)",
        "Queue: size()": "size is no function, and a.py calls it",
    }
    for line, why in told.items():
        made = rows(f"a.py\n  queue\n    {line}")
        assert {package.problem(row) for row in made} == {why}, line
    assert package.problem(Row("a.py", "other")) == "there is no module vllm.other"
