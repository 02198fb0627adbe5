"""The PyTorch twin of preparation, by value: what every field stands for."""

import math

import pytest
import torch

from hopper_sol.kernels.sol_attn.emulation import sol_attention_fp8_emulation
from hopper_sol.kernels.sol_attn.prepare import (
    TOKEN_OF_SLOT,
    in_natural_order,
    prepare_reference,
)
from hopper_sol.kernels.sol_attn.reference import sol_attention_reference

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
E4M3_RMS = 0.0265  # error of a 3-bit mantissa over a uniform log scale
PER_MAX = torch.tensor(1 / 448)
TOKENS = [1, 63, 64, 65, 130, 4171]
ALL_SMOOTHING = [
    {},
    {"k_smoothing": "mean"},
    {"k_smoothing": "block"},
    {"v_smoothing": "mean"},
    {"v_smoothing": "mean", "v_bias_correction": True},
    {"k_smoothing": "block", "v_smoothing": "mean", "v_bias_correction": True},
]


def blocks_of(x):
    """Tokens of every block of x (B, T, H, D), as a list of (B, L, H, D)."""
    return x.split(64, 1)


def near_code(got, x, scale):
    """got = E4M3 code times scale of x: off by half a step of 1/8 at 1 + 1/16, 1/17 of the value,
    or by half of the smallest step of 2^-9; FP32 steps on top."""
    allowed = torch.maximum(x.abs() * (1 / 17 + 1e-6), scale * (2.0**-10 * 1.00001))
    return ((got - x).abs() <= allowed).all()


@pytest.mark.parametrize("tokens", TOKENS)
def test_bf16_operands_are_the_inputs_and_their_means(make_qkv, tokens):
    q, k, v = make_qkv(tokens, heads=2, dtype=BF16)
    got = prepare_reference(q, k, v, precision="bf16", k_smoothing="mean", v_smoothing="mean")
    assert got.q is q and got.k is k and got.v is v and got.tokens == tokens
    assert got.precision == "bf16" and not got.k_residual
    for name in ("q_scale", "k_scale", "mean_k_scale", "v_scale", "k_offset", "out_offset"):
        assert getattr(got, name) is None, name
    count = -(-tokens // 64)
    padded = -(-count // 64) * 64
    assert got.q_mean.shape == got.k_mean.shape == (1, 2, count, 128)
    assert got.mean_k.shape == got.mean_v.shape == (1, 2, padded, 128)
    assert got.mean_k.dtype == got.mean_v.dtype == BF16
    for x, mean in ((q, got.q_mean), (k, got.k_mean), (k, got.mean_k), (v, got.mean_v)):
        unit = 2.0**-22 if mean.dtype == torch.float32 else 2.0**-8
        for j, block in enumerate(blocks_of(x.double())):
            want, size = block.mean(1), block.abs().mean(1)
            assert ((mean[:, :, j] - want).abs() <= unit * size).all()
    assert (got.mean_k[:, :, count:] == 0).all() and (got.mean_v[:, :, count:] == 0).all()
    for value, x in zip(got.dequant(), (q, k, v), strict=True):
        assert value.dtype == torch.float32 and torch.equal(value, x.float())
    assert torch.equal(got.dequant_mean_k(), got.mean_k[:, :, :count].float())


@pytest.mark.parametrize("tokens", TOKENS)
def test_fp8_operands(make_qkv, tokens):
    q, k, v = make_qkv(tokens, batch=2, heads=2, dtype=BF16)
    got = prepare_reference(q, k, v, precision="fp8")
    count = -(-tokens // 64)
    groups = -(-count // 64)
    assert got.precision == "fp8" and got.k_offset is None and got.out_offset is None
    assert got.q.shape == got.k.shape == (2, 2, 64 * count, 128)
    assert got.v.shape == (2, 2, 128, 64 * count) and got.mean_v.shape == (2, 2, 128, 64 * groups)
    assert got.mean_k.shape == (2, 2, 64 * groups, 128)
    assert got.q_scale.shape == got.k_scale.shape == (2, 2, count)
    assert got.mean_k_scale.shape == (2, 2, groups) and got.v_scale.shape == (2, 2, 128)
    for name in ("q", "k", "v", "mean_k", "mean_v"):
        assert getattr(got, name).dtype == E4M3 and getattr(got, name).is_contiguous(), name
    for name in ("q_scale", "k_scale", "mean_k_scale", "v_scale", "q_mean", "k_mean"):
        assert getattr(got, name).dtype == torch.float32 and getattr(got, name).is_contiguous()

    # Q and K: one scale per block, real tokens only, zeros behind.
    for x, codes, scales in ((q, got.q, got.q_scale), (k, got.k, got.k_scale)):
        for j, block in enumerate(blocks_of(x.float())):
            scale = block.abs().amax((1, 3)) * PER_MAX
            assert torch.equal(scales[:, :, j], scale)
            rows = codes[:, :, 64 * j : 64 * j + block.shape[1]].float() * scale[..., None, None]
            assert near_code(rows, block.transpose(1, 2), scale[..., None, None])
        assert (codes[:, :, tokens:].float() == 0).all()
        assert (codes.float().abs().amax((2, 3)) == 448).all()
    # V: one scale per channel, tokens last.
    v32 = v.float().permute(0, 2, 3, 1)
    assert torch.equal(got.v_scale, v32.abs().amax(-1) * PER_MAX)
    v_codes = got.v.float()
    assert near_code(v_codes[..., :tokens] * got.v_scale[..., None], v32, got.v_scale[..., None])
    assert (v_codes[..., tokens:] == 0).all()
    # Mean keys: one scale per 64 of them, from the unrounded keys.
    for g in range(groups):
        means = got.k_mean[:, :, 64 * g : 64 * g + 64]
        scale = means.abs().amax((2, 3)) * PER_MAX
        assert torch.equal(got.mean_k_scale[:, :, g], scale)
        rows = got.mean_k[:, :, 64 * g : 64 * g + means.shape[2]].float() * scale[..., None, None]
        assert near_code(rows, means, scale[..., None, None])
        assert torch.equal(got.dequant_mean_k()[:, :, 64 * g : 64 * g + 64], rows)
    assert (got.mean_k[:, :, count:].float() == 0).all()
    # Mean values: of the rounded V in units of its scale; sums of 64 codes are exact.
    for j in range(count):
        mean = v_codes[..., 64 * j : min(64 * j + 64, tokens)].double().mean(-1)
        assert near_code(got.mean_v[..., j].float(), mean, torch.tensor(1.0))
    assert (got.mean_v[..., count:].float() == 0).all()


def test_partial_block_divides_by_its_tokens(make_qkv):
    q, k, v = (torch.full((1, 70, 1, 128), value, dtype=BF16) for value in (1.0, -2.0, 3.0))
    for precision in ("bf16", "fp8"):
        got = prepare_reference(q, k, v, precision=precision)
        assert (got.q_mean == 1).all() and (got.k_mean == -2).all()
        mean_v = got.mean_v.float()
        if precision == "fp8":
            mean_v = (mean_v * got.v_scale[..., None]).transpose(2, 3)
        # Scales are FP32(1 / 448) of 2 and 3: the product with 448 may miss by an FP32 step.
        assert (got.dequant_mean_k() + 2).abs().max() <= 2.0**-22
        assert (mean_v[:, :, :2] - 3).abs().max() <= 2.0**-22


@pytest.mark.parametrize("tokens", [1, 65, 330])
def test_sequence_offsets(make_qkv, tokens):
    q, k, v = make_qkv(tokens, heads=2, dtype=BF16)
    k, v = k + 2.0, v - 1.0
    got = prepare_reference(q, k, v, precision="fp8", k_smoothing="mean", v_smoothing="mean")
    plain = prepare_reference(q, k, v, precision="fp8")
    for x, offset in ((k, got.k_offset), (v, got.out_offset)):
        assert offset.dtype == torch.float32 and offset.shape == (1, 2, 128)
        size = x.double().abs().mean(1)
        assert ((offset - x.double().mean(1)).abs() <= tokens * 2.0**-24 * size).all()
    assert torch.equal(got.q.float(), plain.q.float()) and torch.equal(got.q_mean, plain.q_mean)
    # The means lose the offset, too: FP32 sums of 64 values below 8.
    want = plain.k_mean - got.k_offset.unsqueeze(2)
    assert (got.k_mean - want).abs().max() <= 64 * 2.0**-24 * 8
    if tokens > 1:
        assert got.k_scale.mean() < 0.8 * plain.k_scale.mean()
    # dequant gives the offsets back.
    _, k_back, v_back = got.dequant()
    per_token = got.k_scale.repeat_interleave(64, 2)[:, :, :tokens].transpose(1, 2)[..., None]
    moved = k.float() - got.k_offset.unsqueeze(1)
    assert near_code(k_back - got.k_offset.unsqueeze(1), moved, per_token + 1e-5)
    moved = v.float() - got.out_offset.unsqueeze(1)
    assert near_code(v_back - got.out_offset.unsqueeze(1), moved, got.v_scale.unsqueeze(1) + 1e-5)


def test_bias_correction_restores_the_mean(make_qkv):
    # Most tokens on one value, so that its rounding error does not average out.
    q, k, v = make_qkv(300, dtype=BF16)
    v[:, :200] = 0.3
    options = {"precision": "fp8", "v_smoothing": "mean"}
    plain = prepare_reference(q, k, v, **options)
    corrected = prepare_reference(q, k, v, **options, v_bias_correction=True)
    assert torch.equal(plain.v.float(), corrected.v.float())
    mean = v.double().mean(1)
    lost, left = (x.dequant()[2].double().mean(1) - mean for x in (plain, corrected))
    # FP32 sums of 300 values below 3, in the mean of the codes and in that of V.
    slack = 2 * 300 * 2.0**-24 * v.double().abs().mean(1)
    assert (left.abs() <= slack).all()
    assert lost.abs().max() > 20 * slack.max()


@pytest.mark.parametrize("tokens", [1, 65, 330])
def test_block_residual(make_qkv, tokens):
    """K holds what is left of each key after the rounded mean of its block."""
    q, k, v = make_qkv(tokens, heads=2, dtype=BF16)
    generator = torch.Generator().manual_seed(1)
    count = -(-tokens // 64)
    shift = 4 * torch.randn(1, count, 2, 128, generator=generator)
    k = (k.float() + shift.repeat_interleave(64, 1)[:, :tokens]).to(BF16)
    got = prepare_reference(q, k, v, precision="fp8", k_smoothing="block")
    plain = prepare_reference(q, k, v, precision="fp8")
    assert got.k_residual and not plain.k_residual and got.k_offset is None
    for name in ("q", "v", "mean_k", "mean_v", "q_scale", "v_scale", "mean_k_scale", "k_mean"):
        assert torch.equal(getattr(got, name).float(), getattr(plain, name).float()), name
    for j, block in enumerate(blocks_of(k.float())):
        residual = block - got.dequant_mean_k()[:, :, j].unsqueeze(1)
        scale = residual.abs().amax((1, 3)).clamp(min=1e-6) * PER_MAX
        assert torch.equal(got.k_scale[:, :, j], scale)
        rows = got.k[:, :, 64 * j : 64 * j + block.shape[1]].float() * scale[..., None, None]
        assert near_code(rows, residual.transpose(1, 2), scale[..., None, None])
    assert (got.k[:, :, tokens:].float() == 0).all()
    error, plain_error = (x.dequant()[1] - k.float() for x in (got, plain))
    if tokens > 64:
        # Residuals are a quarter as large as the keys, and so are their errors.
        assert error.norm() < 0.5 * plain_error.norm()


@pytest.mark.parametrize("options", ALL_SMOOTHING, ids=str)
@pytest.mark.parametrize("tokens", [1, 130])
def test_dequant_is_close_to_the_inputs(make_qkv, rel_l2, tokens, options):
    inputs = make_qkv(tokens, batch=2, heads=2, dtype=BF16)
    got = prepare_reference(*inputs, precision="fp8", **options)
    for value, x in zip(got.dequant(), inputs, strict=True):
        assert value.shape == x.shape and value.dtype == torch.float32
        # Every value errs by 2.65 % rms of itself, or of a mean that it lost and got back.
        assert rel_l2(value, x) <= 1.3 * E4M3_RMS
    if options.get("k_smoothing") is None and options.get("v_smoothing") is None:
        for value, x in zip(got.dequant(), inputs, strict=True):
            assert rel_l2(value, x) >= 0.7 * E4M3_RMS or tokens == 1


@pytest.mark.parametrize("options", ALL_SMOOTHING, ids=str)
def test_attention_over_dequantised_operands_is_the_emulation_without_p(make_qkv, rel_l2, options):
    """What is left between the emulation and FP32 attention over ``dequant()`` is P's rounding."""
    q, k, v = make_qkv(330, heads=2, dtype=BF16, spread=0.3)
    k, v = k + 0.5, v + 0.25
    operands = prepare_reference(q, k, v, precision="fp8", **options)
    mask = torch.ones(1, 2, 6, 6, dtype=torch.bool)
    want = sol_attention_reference(*operands.dequant(), exact_mask=mask)
    got = sol_attention_fp8_emulation(q, k, v, exact_mask=mask, **options)
    # With everything exact: E4M3 errors of P, which average over a row no worse than one of them,
    # and the BF16 output.
    assert rel_l2(got.out, want.out) <= math.hypot(1.3 * E4M3_RMS, 2.0**-8)
    lse = want.lse
    if operands.k_offset is not None:
        # The subtracted logit comes back with the unrounded Q.
        lost = q.float() - operands.dequant()[0]
        lse = lse + torch.einsum("bthd,bhd->bht", lost, operands.k_offset) * 128**-0.5
    # FP32 logits of size 10 over keys that are put together in another order.
    assert (got.lse - lse).abs().max() <= 5e-5


def test_zero_blocks_and_channels(make_qkv):
    q, k, v = make_qkv(130, dtype=BF16)
    q[:, 64:128], k[:, :64], v[..., 7] = 0, 0, 0
    got = prepare_reference(q, k, v, precision="fp8")
    floor = torch.tensor(1e-6) * PER_MAX
    assert got.q_scale[0, 0, 1] == floor and got.k_scale[0, 0, 0] == floor
    assert got.v_scale[0, 0, 7] == floor
    q_back, k_back, v_back = got.dequant()
    assert (q_back[:, 64:128] == 0).all() and (k_back[:, :64] == 0).all()
    assert (v_back[..., 7] == 0).all()


def test_strided_views_give_the_same_operands(make_qkv):
    packed = make_qkv(130, batch=2, heads=2, dtype=BF16)
    views = torch.cat(packed, -1).split(128, -1)
    for precision in ("bf16", "fp8"):
        one, two = (prepare_reference(*x, precision=precision) for x in (packed, views))
        for name, value in vars(one).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.float(), getattr(two, name).float()), name


def test_order_for_warpgroups(make_qkv):
    """Each thread's accumulator registers, four in a row, are four slots of V.

    From the fragments of m64nNk32 in the PTX manual: in the accumulator, thread t of a quad holds
    columns 8 j + 2 t + e; in the operand, columns 16 s + 4 t .. + 3 of a k32 step.
    """
    assert sorted(TOKEN_OF_SLOT) == list(range(32))
    for t in range(4):  # thread of a quad
        for s in range(2):  # half of the 32 columns of one k32 step
            slots = [16 * s + 4 * t + i for i in range(4)]
            columns = [8 * (2 * s + b) + 2 * t + e for b in range(2) for e in range(2)]
            assert [TOKEN_OF_SLOT[slot] for slot in slots] == columns


@pytest.mark.parametrize("tokens", [1, 130, 4171])
def test_v_in_order_for_warpgroups(make_qkv, tokens):
    q, k, v = make_qkv(tokens, dtype=BF16)
    plain = prepare_reference(q, k, v, precision="fp8")
    ordered = prepare_reference(q, k, v, precision="fp8", v_order="k32")
    assert ordered.v_order == "k32"
    assert torch.equal(in_natural_order(ordered.v.float(), "k32"), plain.v.float())
    assert torch.equal(ordered.v.float()[..., 2], plain.v.float()[..., 8])
    assert torch.equal(in_natural_order(ordered.mean_v.float(), "k32"), plain.mean_v.float())
    assert all(map(torch.equal, ordered.dequant(), plain.dequant()))
