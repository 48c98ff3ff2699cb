"""The contract with torch: each internal of it that our code uses, by our file.

After an upgrade the failing rows say what is to be mended, and where.
"""

import re

import pytest

from tests.test_layers import ROOT, modules

ROWS = [(file, name) for file, *names in map(str.split, """
runtime/vllm_plugins/kv_tier.py       cpu._is_amx_tile_supported
runtime/vllm_plugins/worker.py        cpu._init_amx
trainers/checkpointing/save.py        distributed.distributed_c10d._get_default_store
trainers/job/failures/hang_report.py  _C._distributed_c10d _C._distributed_c10d._dump_fr_trace_json
trainers/job/launch.py                _C._distributed_c10d.HashStore _C._distributed_c10d.TCPStore
trainers/models/megatron_fixes.py     _foreach_norm _foreach_mul_
trainers/models/model.py              nn.Module()._modules
trainers/models/transformers_backend/packed_attention.py  ops.torch_attn._varlen_attn
trainers/models/transformers_backend/packed_attention.py  ops.torch_attn._varlen_attn_backward
trainers/models/transformers_backend/parent_files.py      nn.Module()._apply
trainers/models/transformers_backend/passes.py            nn.Module()._modules
trainers/session/resident.py          distributed.distributed_c10d._get_default_store
trainers/session/resident.py          distributed.distributed_c10d._world.pg_names
trainers/session/resident.py          distributed.ProcessGroup._get_sequence_number_for_group
trainers/training/offload.py          UntypedStorage._cdata
trainers/training/parallel_groups.py  distributed.distributed_c10d._get_default_store
""".strip().splitlines()) for name in names]  # fmt: skip


@pytest.mark.parametrize(("file", "name"), ROWS)
def test_torch_has_what_we_use(file: str, name: str) -> None:
    import torch.nn.attention.varlen  # it registers ops

    assert re.search(rf"\b{name.rpartition('.')[2]}\b", (ROOT / file).read_text())
    assert eval(f"torch.{name}", {"torch": torch}) is not None


def test_each_use_has_a_row() -> None:
    said = re.compile(r"(?:\btorch|distributed_c10d)(?:\.\w+)*?[. ](?:import )?(_[a-zA-Z]\w+)")
    found = {(str(file.relative_to(ROOT)), name) for file in modules()
             for name in said.findall(file.read_text())}  # fmt: skip
    listed = {(file, part) for file, name in ROWS for part in name.split(".")}
    assert len(found) > 9 and found <= listed, found - listed
