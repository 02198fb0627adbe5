"""Activations and norms that are put off until an FP8 Linear, or anybody else, looks at them."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hopper_sol.kernels import QuantizedRows, fp8_linear, quantize_norm, quantize_rowwise
from hopper_sol.nodes.patching import linear_deferred, linear_run
from hopper_sol.nodes.patching.linear_deferred import (
    GELU,
    NORM,
    SWIGLU,
    Marked,
    Pending,
    fused_kind,
    mark,
    pending_norm,
)
from hopper_sol.nodes.patching.linear_run import LinearRun, counting, defers_norm
from hopper_sol.nodes.patching.linear_share import share_keys
from hopper_sol.nodes.patching.linear_stored import (
    patched_rows_linear,
    stored_linear,
    widened_linear,
)
from hopper_sol.nodes.patching.linear_weight import weight_function

BF16 = torch.bfloat16
DTYPES = (BF16, torch.float16, torch.float32)
SHAPES = ((20, 48), (2, 17, 48), (1, 33, 48), (2, 3, 5, 48))


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True, params=[torch.inference_mode, torch.no_grad, torch.enable_grad])
def mode(request):
    """ComfyUI computes in inference mode, scripts in any."""
    with request.param():
        yield


@pytest.fixture
def run():
    run = LinearRun()
    with counting(run):
        yield run


def gelu(x):
    return F.gelu(x, approximate="tanh")


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_out_of_place(x):
    gate, up = torch.chunk(x, 2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS = {
    "gelu": (GELU, gelu),
    "gelu module": (GELU, torch.nn.GELU(approximate="tanh")),
    "swiglu": (SWIGLU, swiglu),
    "swiglu out of place": (SWIGLU, swiglu_out_of_place),
}
activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


class Block:
    """A feed-forward whose two Linears are FP8: ``rows`` as kept since loading, or by the node."""

    def __init__(self, kind, columns=48, dtype=torch.float32, rows=False):
        halves = 2 if kind == SWIGLU else 1
        self.kind, self.rows = kind, rows
        self.up = 0.2 * normal(64 * halves, columns, seed=1, dtype=dtype)
        self.down = 0.2 * normal(32, 64, seed=2, dtype=dtype)
        self.bias = normal(64 * halves, seed=3, dtype=dtype)
        self.functions = weight_function(None, "", kind), weight_function(None)

    def first(self, x):
        if self.rows:
            out = stored_linear(x, *quantize_rowwise(self.up), self.bias)
            return linear_run.handed_out(out, self.kind)
        return F.linear(x, self.functions[0](self.up), self.bias)

    def second(self, h):
        if self.rows:
            return stored_linear(h, *quantize_rowwise(self.down))
        return F.linear(h, self.functions[1](self.down))

    def __call__(self, x, act):
        return self.second(act(self.first(x)))


def unfused(compute):
    """``compute()`` with everything apart, and its counts."""
    run = LinearRun()
    run.fuses = False
    with counting(run):
        return compute(), run.seal()


# --- values


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@activation
def test_same_bits_as_apart(run, activation, shape, dtype, rows):
    kind, act = activation
    block, x = Block(kind, dtype=dtype, rows=rows), 2 * normal(*shape, dtype=dtype)
    want, apart = unfused(lambda: block(x, act))
    assert apart["fused"] == {} and apart["fp8_calls"] == 2
    out = block(x, act)
    assert type(out) is torch.Tensor and torch.equal(out, want) and out.dtype == dtype
    sealed = run.seal()
    assert sealed["fused"] == {kind: 1} and sealed["fp8_calls"] == 2 and sealed["unfused"] == {}


@activation
def test_nothing_is_computed_on_the_way(run, activation, monkeypatch):
    """The Linear is given the recipe: no op makes a tensor of the activation's size in floats."""
    kind, act = activation
    block, x = Block(kind), normal(20, 48)
    rows = quantize_rowwise(normal(20, 64))
    monkeypatch.setattr(
        linear_deferred, f"quantize_{kind}", lambda x, backend: QuantizedRows(*rows)
    )

    class Sizes(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.made = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                self.made.append((str(func), tuple(out.shape)))
            return out

    first = block.first(x)
    with Sizes() as sizes:
        h = act(first)
    assert fused_kind(h) == kind and (tuple(h.shape), h.dtype) == ((20, 64), torch.float32)
    assert sizes.made == []
    out = block.second(h)
    assert torch.equal(out, fp8_linear(rows, *quantize_rowwise(block.down)).float())
    assert fused_kind(h) == kind  # and the pending tensor is still one


@activation
def test_a_lora_at_load(run, activation, monkeypatch):
    kind, act = activation
    block, x = Block(kind), normal(20, 48)
    rows = lambda weight, seed: quantize_rowwise(weight)
    monkeypatch.setattr(linear_run, "stochastic_rows", rows)
    out = patched_rows_linear(act(block.first(x)), block.down, None, 7)
    assert torch.equal(out, unfused(lambda: block(x, act))[0])
    assert run.seal()["fused"] == {kind: 1}


# --- whoever else looks


class Hooked:
    """Reads, changes in place or replaces what it is handed, as a forward hook would."""

    def __init__(self, how):
        self.how, self.seen = how, []

    def __call__(self, h):
        if self.how == "pass":
            return h
        if self.how == "read":
            self.seen.append(h.float().mean())
        elif self.how == "write":
            h.mul_(0.5)
        elif self.how == "write a view":
            h[..., :8].add_(3.0)
        elif self.how == "operator":
            h += 1.0
        elif self.how == "replace":
            return h * 2.0
        elif self.how == "clone":
            return h.clone()
        elif self.how == "set":
            h[..., 3] = 0.0
        elif self.how == "data":
            h.data = h.data + 1.0
        elif self.how == "print":
            self.seen.append(repr(h))
        elif self.how == "out":
            torch.add(h, 1.0, out=h)
        elif self.how == "nested":
            self.seen.append(torch.cat([h, h]).sum())
            return torch.stack((h, h))[1]
        return h


HOWS = (
    "pass", "read", "write", "write a view", "operator", "replace", "clone", "set", "data", "print",
    "out", "nested",
)  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("place", ["before", "after"])
@activation
def test_hooks_between(run, activation, place, how):
    """In front of the activation, or behind it: as if nothing was ever put off."""
    kind, act = activation
    block, x = Block(kind), normal(20, 48)

    def forward(hook):
        h = block.first(x)
        h = act(hook(h)) if place == "before" else hook(act(h))
        return block.second(h)

    mine, theirs = Hooked(how), Hooked(how)
    out = forward(mine)
    assert type(out) is torch.Tensor
    assert torch.equal(out, unfused(lambda: forward(theirs))[0])
    assert mine.seen == theirs.seen
    assert run.seal()["fused"] == ({kind: 1} if how == "pass" else {})


@pytest.mark.parametrize("how", HOWS[2:5])
@activation
def test_the_input_is_written_after_the_activation(run, activation, how):
    """Whoever kept the pre-activation, or a view of it, may write there: the result is older."""
    kind, act = activation
    block, x = Block(kind), normal(20, 48)

    def forward(view):
        first = block.first(x)
        kept = first[:5] if view else first
        h = act(first)
        Hooked(how)(kept)
        return block.second(h), first * 1.0

    for view in (False, True):
        got, want = forward(view), unfused(lambda view=view: forward(view))[0]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_halves_are_ordinary_to_others(run):
    block, x = Block(SWIGLU), normal(20, 48)

    def forward(use):
        return use(*block.first(x).chunk(2, dim=-1))

    for use in (
        lambda gate, up: F.silu(up) * gate,
        lambda gate, up: F.silu(gate) + up,
        lambda gate, up: F.silu(gate.clone()).mul_(up),
        lambda gate, up: F.silu(gate).mul_(up.add_(1.0)),
        lambda gate, up: F.silu(gate.add_(1.0)).mul_(up),
        lambda gate, up: F.silu(gate, inplace=True).mul_(up) + gate,
        lambda gate, up: torch.mul(F.silu(gate), up, out=torch.empty(20, 64)),
        lambda gate, up: F.silu(gate).mul_(gate),
        lambda gate, up: F.silu(gate).mul_(2.0),
        lambda gate, up: up.mul(F.silu(gate)),
        lambda gate, up: (F.silu(gate), up.add_(1.0))[0],
        lambda gate, up: gate.copy_(up),
    ):
        out = forward(use)
        assert type(out + 0.0) is torch.Tensor
        assert torch.equal(out + 0.0, unfused(lambda use=use: forward(use))[0] + 0.0)


def test_halves_of_a_tensor_that_somebody_wrote_to(run):
    """Nobody sees what is done to it from then on, so nothing is put off any more."""
    block, x = Block(SWIGLU), normal(20, 48)

    def forward():
        first = block.first(x)
        gate, up = first.chunk(2, dim=-1)
        first.mul_(2.0)
        h = F.silu(gate).mul_(up)
        first.mul_(3.0)
        return block.second(h)

    assert torch.equal(forward(), unfused(forward)[0]) and run.seal()["fused"] == {}


def test_halves_of_two_tensors(run):
    block, x = Block(SWIGLU), normal(20, 48)

    def forward():
        (gate, _), (_, up) = (block.first(t).chunk(2, dim=-1) for t in (x, 2.0 * x))
        return block.second(F.silu(gate).mul_(up))

    assert torch.equal(forward(), unfused(forward)[0]) and run.seal()["fused"] == {}


def test_halves_keep_nothing(run):
    gate, up = Block(SWIGLU).first(normal(20, 48)).chunk(2, dim=-1)
    for half in (gate, up):
        assert type(half + 1.0) is torch.Tensor
        assert type(half) is torch.Tensor and vars(half) == {}


def test_a_product_in_place_is_the_same_tensor(run):
    """Code that goes on with the tensor it multiplied in place, instead of with the result."""
    block, x = Block(SWIGLU), normal(20, 48)

    def forward():
        gate, up = block.first(x).chunk(2, dim=-1)
        h = F.silu(gate)
        h.mul_(up)
        return block.second(h)

    assert torch.equal(forward(), unfused(forward)[0])
    assert run.seal()["fused"] == {SWIGLU: 1}


def test_other_activations_and_chunks(run):
    block, x = Block(GELU), normal(20, 48)
    first = F.linear(x, weight_function(None)(block.up), block.bias)
    for act in (
        F.gelu,
        F.silu,
        F.relu,
        lambda h: F.gelu(h, approximate="none"),
        lambda h: h.chunk(2, dim=-1)[1],
    ):
        out = act(block.first(x))
        assert type(out) is torch.Tensor and torch.equal(out, act(first))
    wide = Block(SWIGLU)
    first = F.linear(x, weight_function(None)(wide.up), wide.bias)
    for chunk in (
        lambda h: h.chunk(2, dim=0),
        lambda h: h.chunk(4, dim=-1),
        lambda h: h.chunk(2),
        lambda h: torch.chunk(input=h, chunks=2, dim=-1),
        lambda h: [gelu(h)],
    ):
        for out, want in zip(chunk(wide.first(x)), chunk(first), strict=True):
            assert type(out) is torch.Tensor and torch.equal(out, want)
    assert run.seal()["fused"] == {}


def pending(kind=GELU, dtype=torch.float32):
    """(a pending tensor, its value)."""
    x = normal(20, 96 if kind == SWIGLU else 48, dtype=dtype)
    if kind == NORM:
        shift, factor = normal(1, 48, seed=1, dtype=dtype), normal(1, 48, seed=2, dtype=dtype)
        norm = torch.nn.LayerNorm(48, elementwise_affine=False)
        value = torch.addcmul(shift, norm(x), factor)
        return torch.addcmul(shift, pending_norm(x, 1e-5, norm), factor), value
    act = gelu if kind == GELU else swiglu
    return act(mark(x.clone(), kind)), act(x.clone())


KINDS = pytest.mark.parametrize("kind", [GELU, SWIGLU, NORM])
USES = {
    "add": lambda h: h + 1.0,
    "radd": lambda h: 1.0 + h,
    "matmul": lambda h: torch.ones(3, 20) @ h,
    "linear": lambda h: F.linear(h, torch.ones(5, 48)),
    "linear by name": lambda h: F.linear(input=h, weight=torch.ones(5, 48)),
    "index": lambda h: h[3:5, ::2],
    "float": lambda h: h.double(),
    "same dtype": lambda h: h.to(h.dtype),
    "device": lambda h: h.to("cpu"),
    "view": lambda h: h.view(-1, 3),
    "reshape": lambda h: h.reshape(h.shape[0], -1),
    "list": lambda h: torch.cat([h, torch.zeros(1, 48)]),
    "nested": lambda h: torch.block_diag(*[h, h]),
    "norm": lambda h: F.layer_norm(h, (48,)),
    "as other": lambda h: torch.ones(20, 48).mul_(h),
    "where": lambda h: torch.where(h > 0, h, 0.0),
    "detach": lambda h: h.detach(),
    "contiguous": lambda h: h.contiguous(),
    "dropout": lambda h: F.dropout(h, 0.0),
    "numpy": lambda h: torch.from_numpy(h.detach().numpy().copy()),
    "tolist": lambda h: torch.tensor(h.tolist()),
    "like": lambda h: torch.zeros_like(h),
    "deepcopy": copy.deepcopy,
    "pickle": lambda h: pickle.loads(pickle.dumps(h)),
    "iterate": lambda h: torch.stack(list(h)),
    "c++": lambda h: _below(lambda: h * 2.0),
    "c++ linear": lambda h: _below(lambda: F.linear(h, torch.ones(5, 48))),
    "custom op": lambda h: widened_linear(h, *quantize_rowwise(torch.ones(5, 48))),
    "rowwise": lambda h: quantize_rowwise(h).scale,
}


def _below(use):
    """``use()`` as compiled code would: past __torch_function__."""
    with torch._C.DisableTorchFunctionSubclass():
        return use()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@KINDS
def test_every_use_of_a_pending_tensor_has_it_computed(kind, use):
    h, value = pending(kind)
    out = use(h)
    assert type(out) is torch.Tensor and torch.equal(out, use(value))
    assert torch.equal(h, value)  # and again


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_marked_tensor_takes_the_mark(use):
    x = normal(20, 48)
    marked = mark(x.clone(), GELU)
    out = use(marked)
    assert type(out) is torch.Tensor and torch.equal(out, use(x))
    if use not in (USES["c++"], USES["c++ linear"]):  # they only read
        assert type(marked) is torch.Tensor and vars(marked) == {}


def test_saved_and_printed():
    for h, value in (pending(), (mark(normal(20, 48), GELU), normal(20, 48))):
        assert repr(h) == repr(value) and f"{h}" == f"{value}"
        file = io.BytesIO()
        torch.save({"h": h}, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True)["h"], value)


@KINDS
def test_looking_at_the_outside_computes_nothing(kind):
    h, value = pending(kind)
    for look in (
        lambda t: (t.shape, t.size(), t.size(-1), t.dim(), t.ndim, len(t), t.numel(), t.nelement()),
        lambda t: (t.dtype, t.device, t.layout, t.is_cuda, t.is_floating_point(), t.element_size()),
        lambda t: (t.stride(), t.is_contiguous(), t.requires_grad, t.is_inference(), t.grad_fn),
        lambda t: (torch.is_floating_point(t), torch.numel(t), torch.is_tensor(t), t.get_device()),
        lambda t: isinstance(t, torch.Tensor),
    ):
        assert look(h) == look(value)
    assert fused_kind(h) == kind


@pytest.mark.parametrize("change", [lambda h: h.unsqueeze_(0), lambda h: h.resize_(3, 48)])
@KINDS
def test_another_shape_in_place(kind, change):
    h, value = pending(kind)
    change(h), change(value)
    assert h.shape == value.shape and torch.equal(h, value)


def test_computed_once():
    calls = []

    def norm(x):
        calls.append(1)
        return F.layer_norm(x, (48,))

    h = pending_norm(normal(20, 48), 1e-5, norm)
    assert torch.equal(h + 0, h * 1) and h.data_ptr() == h.data_ptr() and len(calls) == 1


# --- what is kept


@activation
def test_nothing_is_kept_behind_the_second_linear(run, activation):
    kind, act = activation
    block = Block(kind)
    first = block.first(normal(20, 48))
    inner = weakref.ref(first.source.x)
    h = act(first)
    del first
    gc.collect()
    assert inner() is not None  # the recipe needs it
    out = block.second(h)
    del h
    assert inner() is None and out.shape == (20, 32)  # without a garbage collection


@activation
def test_a_value_replaces_what_it_was_made_of(run, activation):
    kind, act = activation
    first = Block(kind).first(normal(20, 48))
    inner = weakref.ref(first.source.x)
    h = act(first)
    del first
    assert (h + 1).shape == (20, 64) and inner() is None


# --- when nothing is put off


@pytest.mark.parametrize("why", ["no run", "switch", "fused off in the run"])
def test_not_marked(why, monkeypatch):
    if why == "switch":
        monkeypatch.setenv("HOPPER_SOL_FUSED", "0")
    run = LinearRun()
    if why == "fused off in the run":
        run.fuses = False
    block, x = Block(GELU), normal(20, 48)
    with counting(None if why == "no run" else run):
        assert type(block.first(x)) is torch.Tensor
        assert not defers_norm(x)


def test_autocast(run):
    """It gives a norm in FP32, whatever comes in."""
    block, x = Block(GELU, dtype=BF16), normal(20, 48, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert type(block.first(x)) is torch.Tensor and not defers_norm(x)
        assert torch.equal(block(x, gelu), unfused(lambda: block(x, gelu))[0])
    assert run.seal()["fused"] == {}


@pytest.mark.parametrize("value", ["1", "", "yes"])
def test_switch(monkeypatch, value):
    monkeypatch.setenv("HOPPER_SOL_FUSED", value)
    assert LinearRun().fuses


def test_training(run):
    """With gradients the model's own Linears run, and its own operations."""
    if torch.is_inference_mode_enabled():
        pytest.skip("nothing trains in inference mode")
    block = Block(GELU)
    x = normal(20, 48).requires_grad_()
    with torch.enable_grad():
        first = block.first(x)
        assert type(first) is torch.Tensor and not defers_norm(x)
        block.second(gelu(first)).sum().backward()
    assert x.grad is not None
    # What is put off where nothing asks for a gradient can meet a weight that trains.
    h, value = pending()
    weight = normal(5, 48, seed=4).requires_grad_()
    with torch.enable_grad():
        F.linear(h, weight).sum().backward()
    torch.testing.assert_close(weight.grad, value.sum(0).expand(5, 48))
    # ... and one of ours that trains, such as a LoRA's.
    (h, value), weight = pending(), normal(5, 48, seed=4).requires_grad_()
    with torch.enable_grad():
        F.linear(h, weight_function(None)(weight)).sum().backward()
    torch.testing.assert_close(weight.grad, value.sum(0).expand(5, 48))


def test_few_rows_and_other_dtypes(run):
    block = Block(GELU)
    for x in (normal(4, 48), normal(48)):
        assert torch.equal(block(x, gelu), unfused(lambda x=x: block(x, gelu))[0])
    double, (h, value) = block.down.double()[:, :48], pending(dtype=torch.float64)
    assert torch.equal(F.linear(h, weight_function(None)(double)), F.linear(value, double))
    sealed = run.seal()
    assert sealed["fused"] == {} and sealed["fallbacks"] == {"fewer than 16 rows": 4}


def test_rows_that_are_few_in_the_end(run):
    """What counts is the tensor that somebody made smaller, not the one that was put off."""
    block, x = Block(GELU), normal(20, 48)

    def forward():
        h = gelu(block.first(x))
        h.resize_(4, 64)
        return block.second(h)

    assert torch.equal(forward(), unfused(forward)[0])
    assert run.seal()["fallbacks"] == {"fewer than 16 rows": 1}


def test_no_backend(run, monkeypatch):
    def none(call, exclude):
        raise linear_run.BackendUnavailable("fp8_linear", "auto", {"torch": "too old"})

    monkeypatch.setattr(linear_run, "choose_linear_backend", none)
    block, x = Block(GELU), normal(20, 48)
    assert torch.equal(
        block(x, gelu), F.linear(gelu(F.linear(x, block.up, block.bias)), block.down)
    )
    assert run.seal()["fallbacks"] == {"torch: too old": 2}


def test_a_marked_tensor_at_a_linear(run):
    """No activation in between."""
    block, x = Block(GELU), normal(20, 48)
    for rows in (False, True):
        block.rows = rows
        out = block.second(block.first(x))
        assert torch.equal(out, unfused(lambda: block.second(block.first(x)))[0])
    assert run.seal()["fused"] == {} and run.fp8_calls == 4


@pytest.mark.parametrize("rows", [False, True])
def test_a_failing_kernel_is_computed_apart(run, rows, monkeypatch, caplog):
    calls = []

    def broken(x, backend):
        calls.append(backend)
        raise RuntimeError("no such instruction\nsecond line")

    monkeypatch.setattr(linear_deferred, "quantize_gelu", broken)
    block, x = Block(GELU, rows=rows), normal(20, 48)
    want, _ = unfused(lambda: block(x, gelu))
    for _ in range(3):
        assert torch.equal(block(x, gelu), want)
    assert calls == ["torch"]
    sealed = run.seal()
    assert sealed["fused"] == {} and sealed["unfused"] == {"gelu failed": 3}
    assert sealed["fp8_calls"] == 6 and sealed["fallbacks"] == {}
    assert sealed["notes"] == [
        "gelu along with rounding failed in backend 'torch', and is computed apart since: "
        "RuntimeError: no such instruction"
    ]
    assert "FP8 Linear: backend 'torch gelu' failed" in caplog.text
    # The other one is not affected.
    wide = Block(SWIGLU, rows=rows)
    wide(x, swiglu)
    assert run.seal()["fused"] == {SWIGLU: 1}


def test_cancel_is_no_failure(run, interrupt, monkeypatch):
    def cancelled(x, backend):
        raise interrupt()

    monkeypatch.setattr(linear_deferred, "quantize_gelu", cancelled)
    block = Block(GELU)
    h = gelu(block.first(normal(20, 48)))
    with pytest.raises(interrupt):
        block.second(h)
    assert run.seal()["unfused"] == {} and run.seal()["notes"] == []


# --- norms


EPS = 1e-2  # large enough to be seen in a code


def norm_of(x):
    return F.layer_norm(x, (x.shape[-1],), None, None, EPS)


def modulated(x, shift, factor, norm=None):
    norm = pending_norm(x, EPS, norm_of) if norm is None else norm
    return torch.addcmul(shift, norm, factor)


@pytest.fixture
def fuses_norms(monkeypatch):
    monkeypatch.setattr(linear_run, "NORM_BACKENDS", frozenset({"torch"}))


TABLES = {
    "one for all": ((2, 6, 48), (1, 1, 48)),
    "one a batch": ((2, 6, 48), (2, 1, 48)),
    "one a token": ((2, 6, 48), (2, 6, 48)),
    "one batch": ((1, 12, 48), (1, 12, 48)),
    "rows": ((20, 48), (20, 48)),
}


def table(*shape, seed, dtype=torch.float32):
    """As a chunk of a larger table, as a model has it."""
    return 0.3 * normal(*shape[:-1], 6, shape[-1], seed=seed, dtype=dtype).unbind(-2)[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "given"), TABLES.values(), ids=TABLES)
def test_norm_and_modulation(run, fuses_norms, shape, given, dtype, monkeypatch):
    """The op gets the tensors themselves, and the model's own sum 1 + scale."""
    monkeypatch.setattr(linear_run, "MIN_ROWS", 1)
    x, weight = normal(*shape, dtype=dtype), 0.2 * normal(32, 48, seed=1, dtype=dtype)
    shift, scale = table(*given, seed=2, dtype=dtype), table(*given, seed=3, dtype=dtype)
    h = modulated(x, shift, 1 + scale)
    assert fused_kind(h) == NORM and h.shape == x.shape and h.dtype == dtype
    out = F.linear(h, weight_function(None)(weight))
    rows = quantize_norm(x, eps=EPS, scale=scale, shift=shift, backend="torch")
    assert torch.equal(out, fp8_linear(rows, *quantize_rowwise(weight)).to(dtype))
    assert run.seal()["fused"] == {NORM: 1}
    assert torch.equal(h, torch.addcmul(shift, norm_of(x), 1 + scale))


def test_a_transposed_stream(run, fuses_norms):
    """ComfyUI of 2025 keeps tokens apart and channels together in memory, until a norm needs them."""
    x, weight = normal(2, 48, 20).transpose(1, 2), 0.2 * normal(32, 48, seed=1)
    shift, factor = table(2, 1, 48, seed=2), table(2, 1, 48, seed=3)
    h = modulated(x, shift, factor)
    out, rows = F.linear(h, weight_function(None)(weight)), modulated(x.contiguous(), shift, factor)
    assert torch.equal(out, F.linear(rows, weight_function(None)(weight)))
    assert run.seal()["fused"] == {NORM: 2}
    want = torch.addcmul(shift, norm_of(x), factor)
    assert h.stride() == want.stride() and torch.equal(h, want) and h.stride() == want.stride()


NO_TABLES = {
    "by position in time": (1, 6, 48),  # the same for both batches
    "no leading": (48,),
    "more": (1, 2, 6, 48),
}


@pytest.mark.parametrize("given", NO_TABLES.values(), ids=NO_TABLES)
def test_modulations_that_the_kernel_does_not_know(given):
    x, shift, factor = normal(2, 6, 48), table(*given, seed=2), table(*given, seed=3)
    h = modulated(x, shift, factor)
    assert type(h) is torch.Tensor
    assert torch.equal(h, torch.addcmul(shift, norm_of(x), factor))


@pytest.mark.parametrize(
    "change",
    [
        lambda s, f: (s.double(), f),
        lambda s, f: (s, f.double()),
        lambda s, f: (s.double(), f.double()),
        lambda s, f: (s[:1], f),
        lambda s, f: (s, f[..., :1]),
        lambda s, f: (s.transpose(0, 1).contiguous().transpose(0, 1).expand(2, 6, 48), f),
        lambda s, f: (s, f.repeat(1, 1, 2)[..., ::2]),
        lambda s, f: (s.repeat_interleave(7, 1)[:, :6], f.repeat_interleave(7, 1)[:, :6]),
    ],
    ids=["shift", "factor", "both", "rows", "columns", "expanded", "strided", "cut"],
)
def test_other_modulations_are_computed(change):
    """Another dtype promotes, and what can't be read in place would be copied."""
    x, shift, factor = normal(2, 6, 48), table(2, 1, 48, seed=2), table(2, 1, 48, seed=3)
    shift, factor = change(shift, factor)
    h, want = modulated(x, shift, factor), torch.addcmul(shift, norm_of(x), factor)
    assert type(h) is torch.Tensor and h.dtype == want.dtype and torch.equal(h, want)


def test_other_uses_of_a_norm():
    x, shift, factor = normal(2, 6, 48), table(2, 1, 48, seed=2), table(2, 1, 48, seed=3)
    for use in (
        lambda n: n * factor + shift,
        lambda n: torch.addcmul(shift, n, factor, value=2.0),
        lambda n: torch.addcmul(shift, factor, n),
        lambda n: torch.addcmul(shift, n, n),
        lambda n: torch.addcmul(n, factor, factor),
        lambda n: torch.addcmul(input=shift, tensor1=n, tensor2=factor),
        lambda n: torch.addcmul(shift, n.float(), factor),
        lambda n: n,
    ):
        out, want = use(pending_norm(x, EPS, norm_of)), use(norm_of(x))
        assert fused_kind(out) == "" and torch.equal(out, want)


def test_q_k_and_v_share_the_rounding(run, fuses_norms, monkeypatch):
    x, shift, factor = normal(2, 20, 48), table(2, 1, 48, seed=2), table(2, 1, 48, seed=3)
    names = [f"blocks.0.self_attn.{n}" for n in "qkv"]
    keys = share_keys(names)
    functions = [weight_function(None, keys[name]) for name in names]
    weights = [0.2 * normal(32, 48, seed=seed) for seed in range(3)]
    calls = []
    monkeypatch.setattr(
        linear_deferred,
        "quantize_norm",
        lambda *args, **options: calls.append(options) or quantize_norm(*args, **options),
    )
    h = modulated(x, shift, factor)
    pairs = list(zip(functions, weights, strict=True))
    outs = [F.linear(h, function(weight)) for function, weight in pairs]
    assert len(calls) == 1 and calls[0]["shift"] is shift and calls[0]["scale"] is factor
    rows = quantize_norm(x, eps=EPS, scale=factor, shift=shift, scale_has_one=True)
    for out, weight in zip(outs, weights, strict=True):
        assert torch.equal(out, fp8_linear(rows, *quantize_rowwise(weight)).float())
    assert run.seal()["fused"] == {NORM: 3}
    assert run._shared._slots == {}
    # Written to in between: those that follow round what they are given.
    h = modulated(x, shift, factor)
    value = modulated(x, shift, factor) + 0.0
    first = F.linear(h, functions[0](weights[0]))
    h.mul_(2.0)
    second = F.linear(h, functions[1](weights[1]))
    assert torch.equal(first, outs[0])
    assert torch.equal(second, fp8_linear(2.0 * value, *quantize_rowwise(weights[1])))


def test_q_k_and_v_share_the_rounding_of_a_computed_norm(run, monkeypatch):
    """Backends that gain nothing from a norm: computed by the first, and shared as ever."""
    x, shift, factor = normal(2, 20, 48), table(2, 1, 48, seed=2), table(2, 1, 48, seed=3)
    names = [f"blocks.0.self_attn.{n}" for n in "qkv"]
    keys, weights = share_keys(names), [0.2 * normal(32, 48, seed=seed) for seed in range(3)]
    rounded = []
    monkeypatch.setattr(
        linear_run,
        "quantize_rowwise",
        lambda t, **options: rounded.append(t.shape) or quantize_rowwise(t, **options),
    )

    def forward(norm):
        h = modulated(x, shift, factor, norm)
        return [
            F.linear(h, weight_function(None, keys[name])(weight))
            for name, weight in zip(names, weights, strict=True)
        ]

    got = forward(None)
    assert rounded.count(x.shape) == 1
    want, _ = unfused(lambda: forward(norm_of(x)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert run.seal()["fused"] == {} and run.seal()["unfused"] == {}


# --- torch.compile


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", [GELU, SWIGLU])
def test_compiled_in_one_graph(run, kind, rows):
    if not torch.is_inference_mode_enabled():
        pytest.skip("tracing takes its time")
    block, act = Block(kind, rows=rows), gelu if kind == GELU else swiglu
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: block(x, act), fullgraph=True, backend=backend)
    x = normal(20, 48)
    want, _ = unfused(lambda: block(x, act))
    assert all(torch.equal(compiled(x), want) for _ in range(3)) and len(graphs) == 1
    assert run.seal()["fp8_calls"] == 6 and run.seal()["fused"] == {}
    torch._dynamo.reset()


@KINDS
def test_compiled_code_behind_us(kind):
    """A graph of somebody else's that is handed what we have put off."""
    if not torch.is_inference_mode_enabled():
        pytest.skip("tracing takes its time")
    torch._dynamo.reset()
    compiled = torch.compile(lambda h: h * 2.0 + h.shape[-1], backend="eager")
    for _ in range(2):
        h, value = pending(kind)
        assert torch.equal(compiled(h), value * 2.0 + 48)
    x = normal(20, 48)
    marked = mark(x.clone(), GELU)
    assert torch.equal(torch.compile(gelu, backend="eager")(marked) + 0.0, gelu(x))
    torch._dynamo.reset()


def test_classes_are_what_they_say():
    assert type(mark(normal(2, 48), GELU)) is Marked and type(pending()[0]) is Pending
