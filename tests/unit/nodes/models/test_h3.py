"""The MiniMax-H3 adapter, on stand-ins for ComfyUI's model and its packed layout."""

import copy
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hopper_sol.nodes.models import ADAPTERS, TokenSequence, find_adapter
from hopper_sol.nodes.models.h3 import H3Adapter, count_rows, segments_of, sequence_of


def linear(out_features, in_features):
    return torch.nn.Linear(in_features, out_features, bias=False, device="meta")


class Block(torch.nn.Module):
    """A block's Linears and what tells its attention's size."""

    def __init__(self, heads=56):
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.heads, self.attn.head_dim = heads, 128
        self.attn.qkv_proj, self.attn.out_proj = linear(8, 4), linear(4, 8)
        self.mlp = torch.nn.Module()
        self.mlp.fc1, self.mlp.fc2 = linear(8, 4), linear(4, 8)
        self.adaln_proj = torch.nn.Module()
        self.adaln_proj.linear = linear(72, 2)


class MiniMaxH3Model(torch.nn.Module):
    """The attributes of ComfyUI's MiniMaxH3Model that tell what it is."""

    def __init__(self, blocks=50, heads=56, curves=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(heads) for _ in range(blocks))
        self.condition_proj = linear(5376, 5120)
        self.use_adaln_curves = curves

    def _forward(self, x, transformer_options):
        return x


class NewerModel(MiniMaxH3Model):
    """Of a ComfyUI that publishes the block index."""

    def _forward(self, x, transformer_options):
        transformer_options["block_index"] = 0
        return x


class MiniMaxH4Model(MiniMaxH3Model):
    """A variant that nobody has looked at."""


NewerModel.__name__ = "MiniMaxH3Model"


def install(monkeypatch, kind):
    for name in ("comfy", "comfy.ldm", "comfy.ldm.minimax", "comfy.ldm.minimax.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if kind is not None:
        sys.modules["comfy.ldm.minimax.model"].MiniMaxH3Model = kind
    wan = ModuleType("comfy.ldm.wan.model")
    wan.WanModel = type("WanModel", (), {})
    monkeypatch.setitem(sys.modules, "comfy.ldm.wan", ModuleType("comfy.ldm.wan"))
    monkeypatch.setitem(sys.modules, "comfy.ldm.wan.model", wan)


@pytest.fixture(autouse=True)
def comfyui(monkeypatch):
    install(monkeypatch, MiniMaxH3Model)


@pytest.fixture
def adapter():
    return H3Adapter.describe(MiniMaxH3Model(blocks=2))


def test_describe():
    adapter = H3Adapter.describe(MiniMaxH3Model())
    assert adapter.name == "MiniMax-H3 (50 blocks, 56 heads)"
    assert (adapter.num_blocks, adapter.num_heads, adapter.head_dim) == (50, 56, 128)
    assert adapter.text_dim == 5120
    assert adapter.unsupported is None and adapter.publishes_block_index is False
    assert adapter.nested_blocks is False


def test_describe_tells_whether_this_comfyui_publishes_a_block_index():
    assert H3Adapter.describe(NewerModel()).publishes_block_index is True


def test_describe_a_variant_leaves_it_dense():
    reason = H3Adapter.describe(MiniMaxH4Model()).unsupported
    assert reason == "MiniMax-H3 variant MiniMaxH4Model is not supported yet"


@pytest.mark.parametrize("model", [torch.nn.Identity(), None])
def test_describe_other_models(model):
    assert H3Adapter.describe(model) is None


def test_describe_in_a_comfyui_without_the_model(monkeypatch):
    install(monkeypatch, None)
    assert H3Adapter.describe(MiniMaxH3Model()) is None
    monkeypatch.setitem(sys.modules, "comfy.ldm.minimax", None)
    monkeypatch.delitem(sys.modules, "comfy.ldm.minimax.model")
    assert H3Adapter.describe(MiniMaxH3Model()) is None


def test_find_adapter_has_the_family():
    patcher = SimpleNamespace(get_model_object=lambda name: MiniMaxH3Model(blocks=3))
    assert isinstance(find_adapter(patcher), H3Adapter)
    assert H3Adapter in ADAPTERS


def test_adapter_is_plain_frozen_data(adapter):
    for value in dataclasses.asdict(adapter).values():
        assert isinstance(value, (str, int, bool, tuple, type(None)))
    assert copy.deepcopy(adapter) == adapter and hash(adapter) == hash(copy.deepcopy(adapter))


def test_defaults_of_the_family(adapter):
    assert adapter.default_estimator == "exact"
    assert adapter.default_smoothing == "kv"
    assert adapter.default_token_order == "none"
    assert adapter.default_dense_layers == "0-1"
    assert adapter.default_sinks == "kv_and_rows"
    assert adapter.default_fp8_layers() == "all"


def test_linears_and_what_is_only_stored(adapter):
    parts = {
        "attn.qkv_proj": "attention",
        "attn.out_proj": "attention",
        "mlp.fc1": "ffn",
        "mlp.fc2": "ffn",
    }
    assert [(x.name, x.block, x.role) for x in adapter.linears] == [
        (f"blocks.{block}.{part}", block, role)
        for block in range(2)
        for part, role in parts.items()
    ]
    assert [(x.name, x.block, x.role) for x in adapter.stored] == [
        (f"blocks.{block}.adaln_proj.linear", block, "adaln") for block in range(2)
    ]


def test_curves_are_not_stored():
    """Over curve points modulation is FP32 and 8 columns wide."""
    adapter = H3Adapter.describe(MiniMaxH3Model(blocks=2, curves=True))
    assert adapter.stored == () and len(adapter.linears) == 8


# -- where tokens lie ----------------------------------------------------------------------------

VIDEO, SOUND = (1, 24, 37, 48, 84), (1, 32, 2, 207)  # 1344 x 768, 124 frames
SHAPES = [VIDEO, SOUND]


def latent(*shape):
    return torch.zeros(shape, device="meta")


def inputs(text=951, shapes=SHAPES, **payload):
    return {
        "c_crossattn": latent(1, text, 5376),
        "latent_shapes": shapes,
        "minimax_payload": payload,
    }


def test_video_shape_of_what_is_carried_in_one_row(adapter):
    flat = (1, 1, 10**7)
    assert adapter.video_shape(flat, {"latent_shapes": SHAPES}) == VIDEO
    assert adapter.video_shape(flat, {"latent_shapes": None}) is None
    assert adapter.video_shape(flat, {}) is None
    assert adapter.video_shape(VIDEO, {}) == VIDEO


@pytest.mark.parametrize(("latent", "frames"), [(1, 1), (2, 5), (7, 22), (12, 39), (37, 124)])
def test_video_frames(adapter, latent, frames):
    """17k + 5 frames are 5k + 2 of the latent."""
    repeats = adapter.video_frames(latent)
    assert len(repeats) == latent and sum(repeats) == frames


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        (VIDEO, (37, 24, 42)),  # 37,296 tokens
        ((1, 24, 2, 12, 12), (2, 6, 6)),
        ((1, 24, 7, 11, 13), (7, 6, 7)),  # ComfyUI pads odd sizes up to whole patches
    ],
)
def test_grid(adapter, shape, grid):
    assert adapter.grid(shape) == grid


def test_sequence_of_text_to_video(adapter):
    sequence = adapter.sequence(VIDEO, inputs())
    assert sequence == TokenSequence(
        (37, 24, 42), 951 + 414, audio=(951, 1365), parts=(("text", 951), ("audio", 414))
    )
    assert sequence.video == (1365, 1365 + 37_296) and sequence.tokens == 38_661
    assert sequence.conditioning == ((0, 1365),)


def test_sequence_with_keyframes_and_their_sound(adapter):
    keyframes = [
        {"resolved_frame_index": 0, "latent": latent(1, 24, 1, 48, 84)},
        {
            "resolved_frame_index": 9,
            "latent": latent(1, 24, 2, 48, 84),
            "audio_latent": latent(3, 9),
        },
        {"resolved_frame_index": 9, "audio_latent": latent(1, 32, 2, 4)},
    ]
    sequence = adapter.sequence(VIDEO, inputs(keyframes=keyframes))
    assert sequence.parts == (
        ("text", 951), ("keyframe", 3 * 24 * 42), ("keyframe audio", 2 * 9 + 2 * 4), ("audio", 414),
    )  # fmt: skip
    assert sequence.audio == (sequence.before - 414, sequence.before)


def test_sequence_with_references(adapter):
    refs = [
        {"kind": "image", "latent_h": 10, "latent_w": 7, "latent": None},
        {"kind": "video_audio", "latent_t": 2, "latent_h": 8, "latent_w": 8, "ref_audio_t": 9},
        {"kind": "video", "latent_t": 3, "latent_h": 6, "latent_w": 8, "ref_audio_t": 0},
        {"kind": "audio", "ref_audio_t": 11},
        {"kind": "audio", "ref_audio_t": 0},
    ]
    sequence = adapter.sequence(VIDEO, inputs(refs=refs))
    assert sequence.parts == (
        ("text", 951), ("reference", 5 * 3 + 2 * 16 + 3 * 12), ("reference audio", 18 + 22),
        ("audio", 414),
    )  # fmt: skip


def test_rows_of_a_reference_video_follow_those_of_its_sound():
    rows = count_rows(
        (1, 1, 1), 1, 1,
        {"refs": [{"kind": "video", "latent_t": 2, "latent_h": 4, "latent_w": 4, "ref_audio_t": 3}]},
    )  # fmt: skip
    assert rows == [("text", 1), ("ref_audio", 6), ("ref_img", 8), ("audio", 2), ("video", 1)]
    assert segments_of(rows)[1:3] == [(1, 7, "ref_audio"), (7, 15, "ref_img")]


def test_sequence_without_audio_or_text(adapter):
    sequence = adapter.sequence(VIDEO, inputs(shapes=[VIDEO, (1, 32, 2, 0)]))
    assert sequence.audio is None and sequence.before == 951
    bare = adapter.sequence(VIDEO, {})
    assert (bare.before, bare.tokens) == (0, 37_296) and bare.conditioning == ()


def layout(signature, segments):
    return SimpleNamespace(signature=signature, segments=segments)


PACKED = [(0, 100, "text"), (100, 130, "novel"), (130, 544, "audio"), (544, 37_840, "video")]


def test_sequence_takes_the_prepared_layout_if_it_is_of_this_size(adapter):
    """What it holds need not be what we can count."""
    packed = layout((100, 37, 48, 84, 207), PACKED)
    sequence = adapter.sequence(VIDEO, inputs(100, layout=packed))
    assert sequence.parts == (("text", 100), ("novel", 30), ("audio", 414))
    assert sequence.audio == (130, 544) and sequence.tokens == 37_840


@pytest.mark.parametrize(
    "signature",
    [(99, 37, 48, 84, 207), (100, 36, 48, 84, 207), (100, 37, 48, 82, 207), (100, 37, 48, 84, 206)],
)
def test_sequence_counts_where_the_prepared_layout_is_of_another_size(adapter, signature):
    """ComfyUI packs anew then, as in the windows of a long video."""
    packed = layout(signature, PACKED)
    sequence = adapter.sequence(VIDEO, inputs(100, layout=packed))
    assert sequence.parts == (("text", 100), ("audio", 414))


def test_sequence_of_an_odd_size_matches_the_padded_signature(adapter):
    segments = [(0, 7, "text"), (7, 10, "novel"), (10, 12, "audio"), (12, 12 + 42, "video")]
    packed = layout((7, 1, 12, 14, 1), segments)
    shape = (1, 24, 1, 11, 13)
    sequence = adapter.sequence(shape, inputs(7, [shape, (1, 32, 2, 1)], layout=packed))
    assert sequence.tokens == 54 and ("novel", 3) in sequence.parts


def test_published_layout(adapter):
    packed = layout((100, 37, 48, 84, 207), PACKED)
    sequence = adapter.published({"minimax_h3_layout": packed})
    assert sequence == adapter.sequence(VIDEO, inputs(100, layout=packed))
    assert adapter.published({}) is None


def test_what_follows_the_video_or_is_shorter_gives_another_length():
    """Such a sequence is not ours to cut up: its length must not come out right."""
    segments = [(0, 10, "text"), (10, 34, "video"), (34, 40, "audio")]
    assert sequence_of((2, 3, 4), segments).tokens == 34 != 40
    assert sequence_of((2, 3, 5), segments[:2]).tokens == 40 != 34
