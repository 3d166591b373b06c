"""A window cut along its tokens over two processes trains as a whole one does.

torch's ring attention has kernels for GPUs alone, so here another attention takes its place: it gathers keys and values
and masks them by where they stood in the window. All else is what runs on GPUs: the cut of tokens, labels and
positions, the scale by each position, the sharded backbone, the sum of the loss over the pieces.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from processes import EXTEND, SHARDED, assert_same_run, in_two

from ropex import attach, make_spec
from ropex.errors import OptionError, RopexError, UnsupportedError
from ropex.seam import rope_of_model
from ropex.train import devices
from ropex.train.devices import Devices, check_pieces
from ropex.train.extend import extend
from ropex.train.settings import Settings

CUT = SHARDED | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
ON_THE_CPU = (
    """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import ParallelismConfig
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.tensor.experimental._context_parallel import _attention
import sys
from ropex.train.extend import extend
plain = F.scaled_dot_product_attention

def gathering(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    assert attn_mask is None and is_causal
    piece, rank, size = q.shape[2] // 2, dist.get_rank(), dist.get_world_size()
    pieces = torch.arange(2 * size * piece).split(piece)
    here = [torch.cat((pieces[i], pieces[-1 - i])) for i in range(size)]
    parts = ([all_gather_single_autograd(x.contiguous(), 0, dist.group.WORLD).chunk(size) for x in (k, v)])
    keys, values = (torch.cat(part, 2) for part in parts)
    mask = here[rank][:, None] >= torch.cat(here)
    return plain(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)

def replace(attention):
    F.scaled_dot_product_attention = attention

_attention._enable_context_parallel_dispatcher_impl = lambda seq_dim, mesh: replace(gathering)
_attention._disable_context_parallel_dispatcher_impl = lambda: replace(plain)
ParallelismConfig._validate_accelerator = lambda self, accelerator: None
sys.modules["ropex.train.extend"].check_pieces = lambda *given: None
"""
    + EXTEND
)


def test_losses_and_weights_are_those_of_whole_windows(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    asked = {
        "target": 256, "window": 64, "plain_skip": True, "data": [str(text)], "steps_warmup": 3, "steps_joint": 3,
        "save_steps": 2, "lr_lora": 1e-4, "dtype": "float32", "batch_size": 2, "accumulation": 2,
    }  # fmt: skip
    extend(checkpoint, tmp_path / "one", **asked)
    said = in_two(checkpoint, tmp_path / "two", asked, ON_THE_CPU, **CUT)
    assert "2 processes, the backbone in shards (FSDP2), a window over 2 of them" in said
    assert "shifting manually" not in said
    # the order of the sums differs, and Adam divides by a gradient's size, however small: hence the small lr_lora
    assert_same_run(tmp_path / "two", tmp_path / "one", rtol=1e-3, atol=1e-5, loss=1e-6, norm=1e-5)


@pytest.fixture
def check(tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """check_pieces on a tiny model over two processes, with changes to what would pass."""

    def call(
        device: str = "cuda",
        length: Any = "position",
        attn: str = "sdpa",
        window: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        pack: bool = False,
        **more: Any,
    ) -> None:
        settings = Settings(256, window=window, pack=pack)
        model = tiny_llama(**more).to(dtype)
        attach(model, make_spec("adarope", rope_of_model(model), target=256, length=length))
        model.config._attn_implementation = attn
        monkeypatch.setattr(devices, "PartialState", lambda: SimpleNamespace(device=torch.device(device)))
        check_pieces(model, settings, Devices(True, ParallelismConfig(cp_size=2)))

    return call


def test_a_window_that_can_be_cut_is(check: Callable) -> None:
    check()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"device": "cpu"}, UnsupportedError, "no kernel for the CPU"),
        ({"attn": "flash_attention_2"}, OptionError, "--attn sdpa"),
        ({"dtype": torch.float32}, OptionError, "--dtype bfloat16"),
        ({"pack": True, "window": 256}, OptionError, "leave --pack out"),
        ({"length": "sequence"}, UnsupportedError, "whole length"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, UnsupportedError, "sliding_attention"),
        ({"window": 62}, OptionError, "give a multiple of 4"),
    ],
)
def test_what_ring_attention_would_get_wrong_is_refused(
    check: Callable, changes: dict[str, Any], error: type[RopexError], said: str
) -> None:
    with pytest.raises(error, match=said):
        check(**changes)
