"""A sampler run without ComfyUI: fakes that call our code the way ComfyUI does."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from hopper_sol.nodes.models import ModelAdapter
from hopper_sol.nodes.patching import run as run_module
from hopper_sol.nodes.patching.plan import SolAttentionRequest
from hopper_sol.nodes.patching.resolve import resolve
from hopper_sol.nodes.patching.runtime import AccelerationRuntime

OVERRIDE = "optimized_attention_override"
GRID = (5, 7, 9)  # 315 tokens: four whole blocks and a ragged one
HEADS, DIM = 2, 128


@dataclass(frozen=True)
class FakeAdapter(ModelAdapter):
    """A model family whose latent cells are its tokens."""

    family: ClassVar[str] = "Fake"
    default_estimator: ClassVar[str] = "exact"
    default_smoothing: ClassVar[str] = "k"
    default_token_order: ClassVar[str] = "morton_2d"
    default_dense_layers: ClassVar[str] = "0,-1"

    @classmethod
    def describe(cls, diffusion_model):
        return None

    def grid(self, latent_shape):
        return tuple(latent_shape[-3:])

    def default_fp8_layers(self):
        return "1-2"


class FakePatcher:
    """The parts of a ModelPatcher that a run looks at."""

    load_device = torch.device("cpu")

    def __init__(self):
        self.object_patches = {}
        self.model = SimpleNamespace(manual_cast_dtype=None, get_dtype=lambda: torch.float32)

    def get_model_object(self, name):
        assert name == "model_sampling"
        return self

    def percent_to_sigma(self, percent):
        if percent <= 0.0:
            return 999999999.9
        return 0.0 if percent >= 1.0 else 1.0 - percent


class FakeExecutor:
    """ComfyUI's WrapperExecutor with nothing left in its chain but ``function``."""

    def __init__(self, function, class_obj):
        self.function = function
        self.class_obj = class_obj
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


class Spy:
    """Records calls as (args, kwargs, result) and passes them on to ``function``."""

    def __init__(self, function):
        self.function = function
        self.calls = []

    def __call__(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        self.calls.append((args, kwargs, result))
        return result


def _sdpa(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
    **kwargs,
):
    """ComfyUI's attention_pytorch."""
    if not skip_reshape:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=kwargs.get("scale")
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Sampler:
    """A model patched by one Sol Attention node.

    ``run`` is a sampler run, ``forward`` an evaluation of the diffusion model inside it, and
    ``attend`` an attention call inside that.
    """

    def __init__(self, request, adapter, sigmas, grid, batch, model_options):
        self.adapter = adapter
        self.runtime = AccelerationRuntime(adapter, resolve(request, adapter))
        self.patcher = FakePatcher()
        self.guider = SimpleNamespace(model_patcher=self.patcher, model_options=model_options)
        self.sigmas = sigmas
        self.latent = torch.zeros(batch, 4, *grid)
        self.func = Spy(_sdpa)

    def run(self, body=None, sigmas=None, noise=None):
        """OUTER_SAMPLE. ``body()`` stands for the sampler; without one, Euler over the schedule.

        Returns what ``body`` returns.
        """
        sigmas = self.sigmas if sigmas is None else sigmas
        noise = self.latent if noise is None else noise
        executor = FakeExecutor(lambda *args, **kwargs: (body or self.euler)(), self.guider)
        return self.runtime.outer_sample(
            executor, noise, noise, "sampler", torch.tensor(sigmas), None, None, True, 0
        )

    def euler(self):
        for sigma in self.sigmas[:-1]:
            self.forward(sigma)

    def forward(self, sigma, inside=None, latent=None):
        """ON_PREPARE_STATE and APPLY_MODEL. ``inside(options)`` stands for the model; without
        one, every block calls its self-attention and a cross-attention of 77 text tokens."""
        latent = self.latent if latent is None else latent
        timestep = torch.full((latent.shape[0],), float(sigma))
        self.runtime.prepare_state(self.patcher, timestep, self.guider.model_options)
        # Merged afresh for every evaluation, as in ComfyUI.
        options = dict(self.guider.model_options.get("transformer_options", {}))
        options.update(sigmas=timestep, sample_sigmas=torch.tensor(self.sigmas))
        model = FakeExecutor(lambda *a, **kw: (inside or self.blocks)(options), None)
        return self.runtime.apply_model(model, latent, timestep, None, None, None, options)

    def blocks(self, options):
        tokens = self.latent[0, 0].numel()
        q = make_qkv(tokens, batch=self.latent.shape[0])[0].flatten(2)
        text = q[:, :77]
        outputs = []
        for index in range(self.adapter.num_blocks):

            def block(options):
                outputs.append(self.attend(q, q, q, HEADS, transformer_options=options))
                self.attend(q, text, text, heads=HEADS, transformer_options=options)

            self.block(options, index, block)
        return outputs

    def block(self, options, index, function):
        """Block ``index``, which calls ``function(options)``, as Wan's forward_orig runs it."""
        if self.adapter.publishes_block_index:
            options["block_index"] = index
        patches = options.get("patches_replace", {}).get("dit", {})
        if ("double_block", index) in patches:
            args = {"img": None, "transformer_options": options}
            extra = {"original_block": lambda args: function(args["transformer_options"])}
            return patches["double_block", index](args, extra)
        return function(options)

    def attend(self, *args, **kwargs):
        """optimized_attention: ComfyUI's wrap_attn around its attention function."""
        options = kwargs.get("transformer_options") or {}
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            if OVERRIDE in options:
                return options[OVERRIDE](self.func, *args, **kwargs)
        return self.func(*args, **kwargs)

    def once(self, inside, sigma=None, block=1, latent=None):
        """A run of one evaluation; ``inside(options)`` runs in block ``block``, None for none."""
        sigma = self.sigmas[-2] if sigma is None else sigma
        if block is not None:
            function = inside
            inside = lambda options: self.block(options, block, function)
        return self.run(lambda: self.forward(sigma, inside, latent))

    @property
    def report(self):
        """The sealed record of the last run."""
        return self.runtime.history.records[-1]


def make_qkv(tokens, *, batch=1, heads=HEADS, dim=DIM, dtype=torch.float32, seed=0):
    """Seeded (B, T, H, D) q, k, v whose 64-token blocks differ, so that routing finds something."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // 64)
    q, k, v = (torch.randn(batch, tokens, heads, dim, generator=generator) for _ in range(3))
    for x in (q, k):
        offset = 1.5 * torch.randn(batch, blocks, heads, dim, generator=generator)
        x += offset.repeat_interleave(64, 1)[:, :tokens]
    return tuple(x.to(dtype) for x in (q, k, v))


@pytest.fixture(autouse=True)
def one_thread():
    """These tensors are too small to share; waiting for other threads costs more than the sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def qkv():
    """Factory of seeded (B, T, H, D) q, k, v."""
    return make_qkv


@pytest.fixture(scope="session")
def sdpa():
    """ComfyUI's attention_pytorch."""
    return _sdpa


@pytest.fixture(scope="session")
def spy():
    """The class of call recorders."""
    return Spy


@pytest.fixture(scope="session")
def executor():
    """The class of fake WrapperExecutors."""
    return FakeExecutor


@pytest.fixture
def make_adapter():
    """Factory of adapters of a family that exists in no ComfyUI."""

    def make(**changes):
        facts = {
            "name": "Fake t2v (4 blocks, 2 heads)",
            "num_blocks": 4,
            "num_heads": HEADS,
            "head_dim": DIM,
            "text_dim": 32,
            "publishes_block_index": True,
            "unsupported": None,
        }
        return FakeAdapter(**{**facts, **changes})

    return make


@pytest.fixture
def make_sampler(make_adapter):
    """Factory of samplers; the default request is sparse in every layer and step, in FP32."""

    sparse = SolAttentionRequest(
        dense_steps=0, dense_layers="none", precision="bf16", smoothing="none", min_tokens=0
    )

    def make(
        *,
        adapter=None,
        sigmas=(1.0, 0.75, 0.5, 0.25, 0.0),
        grid=GRID,
        batch=1,
        options=None,
        **changes,
    ):
        adapter = make_adapter() if adapter is None else adapter
        options = {"transformer_options": {}} if options is None else options
        return Sampler(replace(sparse, **changes), adapter, sigmas, grid, batch, options)

    return make


@pytest.fixture
def kernel(monkeypatch):
    """Spy on the public op as the patches call it."""
    spy = Spy(run_module.sol_attention)
    monkeypatch.setattr(run_module, "sol_attention", spy)
    return spy


class InterruptProcessingException(Exception):
    """What ComfyUI raises when a person presses Cancel; recognised by its name."""


@pytest.fixture(scope="session")
def interrupt():
    """ComfyUI's interrupt exception class."""
    return InterruptProcessingException
