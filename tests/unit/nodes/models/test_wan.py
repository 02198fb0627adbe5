"""The Wan adapter, on a stand-in for ComfyUI's WanModel."""

import copy
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.models import ADAPTERS, family_names, find_adapter
from hopper_sol.nodes.models.wan import WanAdapter


class WanModel(torch.nn.Module):
    """The attributes of ComfyUI's WanModel that tell what it is."""

    def __init__(self, *, dim=1536, heads=12, blocks=30, patch_size=(1, 2, 2)):
        super().__init__()
        self.dim = dim
        self.num_heads = heads
        self.model_type = "t2v"
        self.patch_size = patch_size
        self.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(blocks))
        self.text_embedding = torch.nn.Sequential(torch.nn.Linear(4096, 4, device="meta"))

    def forward_orig(self, x, transformer_options):
        for index, _ in enumerate(self.blocks):
            transformer_options["block_index"] = index
        return x


class OlderWanModel(WanModel):
    """As in ComfyUI of 2025, which publishes no block index."""

    def forward_orig(self, x, transformer_options):
        return x


class VaceWanModel(WanModel):
    """A variant with further attention between its blocks."""


def install(monkeypatch, kind):
    for name in ("comfy", "comfy.ldm", "comfy.ldm.wan", "comfy.ldm.wan.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["comfy.ldm.wan.model"].WanModel = kind


@pytest.fixture(autouse=True)
def comfyui(monkeypatch):
    install(monkeypatch, WanModel)


def patcher(model):
    return SimpleNamespace(get_model_object=lambda name: {"diffusion_model": model}[name])


def test_describe_wan():
    assert WanAdapter.describe(WanModel()) == WanAdapter(
        name="Wan t2v (30 blocks, 12 heads)",
        num_blocks=30,
        num_heads=12,
        head_dim=128,
        text_dim=4096,
        publishes_block_index=True,
        unsupported=None,
        patch_size=(1, 2, 2),
    )


def test_describe_reads_the_model_not_a_table():
    adapter = WanAdapter.describe(WanModel(dim=256, heads=4, blocks=2, patch_size=[2, 4, 8]))
    assert (adapter.num_blocks, adapter.num_heads, adapter.head_dim) == (2, 4, 64)
    assert adapter.patch_size == (2, 4, 8)
    assert adapter.name == "Wan t2v (2 blocks, 4 heads)"


def test_describe_tells_whether_this_comfyui_publishes_a_block_index(monkeypatch):
    install(monkeypatch, OlderWanModel)
    assert WanAdapter.describe(OlderWanModel()).publishes_block_index is False


def test_describe_variant_is_unsupported():
    adapter = WanAdapter.describe(VaceWanModel())
    assert adapter.unsupported == "Wan variant VaceWanModel is not supported yet"
    assert adapter.num_blocks == 30


@pytest.mark.parametrize("model", [torch.nn.Identity(), object(), None])
def test_describe_other_models(model):
    assert WanAdapter.describe(model) is None


def test_adapter_is_plain_frozen_data():
    """It must not keep a module of one clone alive, and has to survive deepcopy."""
    adapter = WanAdapter.describe(WanModel())
    for value in dataclasses.asdict(adapter).values():
        assert isinstance(value, (str, int, bool, tuple, type(None)))
    assert copy.deepcopy(adapter) == adapter
    assert hash(adapter) == hash(copy.deepcopy(adapter))
    with pytest.raises(dataclasses.FrozenInstanceError):
        adapter.num_blocks = 1


@pytest.mark.parametrize(
    ("latent", "grid"),
    [
        ((1, 16, 21, 60, 104), (21, 30, 52)),  # 832 x 480 x 81: 32,760 tokens
        ((1, 16, 21, 90, 160), (21, 45, 80)),  # 1280 x 720 x 81: 75,600
        ((1, 16, 9, 60, 104), (9, 30, 52)),  # 832 x 480 x 33: 14,040
        ((2, 48, 5, 32, 32), (5, 16, 16)),
        ((1, 16, 1, 31, 33), (1, 16, 17)),  # ComfyUI pads odd sizes up to whole patches
        ((1, 16, 3, 1, 1), (3, 1, 1)),
    ],
)
def test_grid(latent, grid):
    assert WanAdapter.describe(WanModel()).grid(latent) == grid


def test_grid_pads_every_axis():
    adapter = WanAdapter.describe(WanModel(patch_size=(2, 4, 8)))
    assert adapter.grid((1, 16, 3, 9, 17)) == (2, 3, 3)


@pytest.mark.parametrize(
    ("blocks", "layers"), [(30, "10-19"), (40, "13-26"), (3, "1-1"), (2, "0-1"), (1, "0-0")]
)
def test_default_fp8_layers_are_the_middle_third(blocks, layers):
    assert WanAdapter.describe(WanModel(blocks=blocks)).default_fp8_layers() == layers


def test_defaults_of_the_family():
    assert WanAdapter.default_estimator == "diag"
    assert WanAdapter.default_smoothing == "none"
    assert WanAdapter.default_token_order == "morton_3d"
    assert WanAdapter.default_dense_layers == "0"
    assert WanAdapter.temporal_stride == 4


def test_find_adapter():
    assert find_adapter(patcher(WanModel(blocks=3))).num_blocks == 3
    assert find_adapter(patcher(torch.nn.Identity())) is None


def test_find_adapter_looks_inside_torch_compile():
    """torch.compile wraps the model; the class outside says nothing about the family."""
    compiled = torch.nn.Module()
    compiled._orig_mod = WanModel(blocks=5)
    adapter = find_adapter(patcher(compiled))
    assert adapter.num_blocks == 5
    assert adapter.unsupported is None
    compiled._orig_mod = VaceWanModel()
    assert "VaceWanModel" in find_adapter(patcher(compiled)).unsupported


def test_family_names():
    assert family_names() == " or ".join(adapter.family for adapter in ADAPTERS)
    assert "Wan" in family_names()
