"""Inputs and measures shared by kernel tests and the bench. Imports torch only.

Random normal q and k say little about a block-sparse kernel: their softmax is nearly uniform and
neighbouring query blocks choose unrelated key blocks. ``structured_qkv`` makes inputs that share
what is known of video models: objects and smooth fields seen by every head, RMS-normalised q and k
under a 3-D rotary embedding, a few attention sinks, heavy channels and heavy tokens, and a mean in
K and V. They are synthetic: good for speed and rounding, no statement about the quality of a video.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from .sol_attn.reference import (
    block_mean,
    block_scores,
    forced_blocks,
    route_mask,
    route_threshold,
)

HEAD_DIM = 128
ROTARY_SPLIT = (44, 42, 42)  # channels that turn with t, h, w; Wan's split of 128
ROTARY_BASE = 10_000.0
TAU_SEARCH = (-16.0, 8.0)  # standard deviations; below it everything is exact anyway

Shape = tuple[int, int, int, int]
Grid = tuple[int, int, int]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def iid_qkv(shape: Shape, seed: int = 0, device: torch.device | str = "cpu") -> QKV:
    """Standard normal q, k, v.

    Args:
        shape: (B, T, H, 128).
        seed: equal seeds give equal values on devices of one type. A head's values depend on the
            seed, its batch item and its index, not on B or H.
        device: where they are made.

    Returns:
        Three (B, T, H, 128) bfloat16, contiguous.
    """
    _check_shape(shape)
    out = _empty_qkv(shape, device)
    for item, head in _heads(shape):
        generator = _generator(device, seed, item, head)
        for x in out:
            normal = torch.randn(shape[1], HEAD_DIM, generator=generator, device=device)
            x[item, :, head] = normal
    return out


def structured_qkv(
    shape: Shape,
    grid: Grid,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    prefix: int = 0,
    order: torch.Tensor | None = None,
    objects: int = 24,
    sharpness: float = 1.0,
    sinks: int = 4,
    heavy_channels: int = 2,
    heavy_tokens: float = 0.002,
) -> QKV:
    """Synthetic q, k, v with the structure of a video model's self-attention.

    Args:
        shape: (B, T, H, 128) with T = prefix + t * h * w.
        grid: (t, h, w) of the video tokens, which are made t-major, then h, then w.
        seed, device: as in ``iid_qkv``; all heads of a batch item see the same scene.
        prefix: tokens in front of the video (text, conditioning). They have content of their own
            and sit on the diagonal in front of the grid's origin.
        order: (T,) int64, result[:, i] = made[:, order[i]], such as a Morton order; None for raster.
        objects: drifting objects of the scene.
        sharpness: multiplies the logits; 1 puts 90 % of a query block's attention mass into about
            a third to a half of the key blocks.
        sinks: first tokens of the sequence, whose keys draw every query and whose values are small.
        heavy_channels: rotary pairs of q and k that are several times larger than the others.
        heavy_tokens: fraction of tokens with a few spiking channels in V.

    Returns:
        Three (B, T, H, 128) bfloat16, contiguous and finite.

    Raises:
        ValueError: T, grid, prefix and order do not fit together.
    """
    _check_shape(shape)
    batch, tokens, _, _ = shape
    if tokens != prefix + math.prod(grid):
        raise ValueError(
            f"shape: got {tokens} tokens, need prefix {prefix} + grid {grid} = "
            f"{prefix + math.prod(grid)}"
        )
    if order is not None and (order.dtype != torch.int64 or order.shape != (tokens,)):
        raise ValueError(
            f"order: got {order.dtype} of shape {tuple(order.shape)}, need int64 ({tokens},)"
        )
    position = _positions(grid, prefix, device)
    cos, sin = _rotary_table(position)
    order = None if order is None else order.to(device)
    out = _empty_qkv(shape, device)
    for item in range(batch):
        content = _scene(position, grid, prefix, objects, _generator(device, seed, item, -1))
        for head in range(shape[2]):
            draw = _Draw(_generator(device, seed, item, head), device)
            made = _head(draw, content, cos, sin, sharpness, sinks, heavy_channels, heavy_tokens)
            for x, values in zip(out, made, strict=True):
                x[item, :, head] = values if order is None else values[order]
    return out


class _Draw:
    """Random numbers of one head, from one generator in a fixed order."""

    def __init__(self, generator: torch.Generator, device):
        self.generator, self.device = generator, device

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)


def _head(draw, content, cos, sin, sharpness, sinks, heavy_channels, heavy_tokens):
    """q, k, v (T, 128) FP32 of one head that looks at ``content`` (T, C), unit variance."""
    tokens, width = content.shape
    query_map = draw.normal(width, HEAD_DIM) / width**0.5
    # Keys see partly what queries see: attention follows content, but is not a similarity.
    key_map = 0.7 * query_map + 0.7 * draw.normal(width, HEAD_DIM) / width**0.5
    # No content in it: the rotation makes it locality, and in slow channels it is the mean key.
    common = draw.normal(HEAD_DIM)
    gain = torch.ones(HEAD_DIM // 2, device=draw.device)
    slow = _slow_pairs(draw.device)
    heavy = slow[torch.argsort(draw.uniform(len(slow)), stable=True)[:heavy_channels]]
    gain[heavy] = 4.0
    gain = gain.repeat_interleave(2)

    normalised = []
    for weights, share in ((query_map, 0.8), (key_map, 1.0)):
        x = content @ weights + share * common + 0.4 * draw.normal(tokens, HEAD_DIM)
        x = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * gain
        normalised.append(_rotate(x, cos, sin))
    q, k = normalised
    q *= sharpness
    v = 0.5 * content @ draw.normal(width, HEAD_DIM) / width**0.5
    v += 0.8 * draw.normal(tokens, HEAD_DIM) + 0.6 * draw.normal(HEAD_DIM)

    spiking = torch.argsort(draw.uniform(tokens), stable=True)[: math.ceil(heavy_tokens * tokens)]
    channels = torch.argsort(draw.uniform(HEAD_DIM), stable=True)[:6]
    v[spiking.unsqueeze(1), channels] += 8.0 * draw.normal(len(spiking), 6).sign()
    if sinks:
        mean_query = q.mean(0)
        k[:sinks] = mean_query * (16.0 / mean_query.norm())
        v[:sinks] *= 0.1
    return q, k, v


def _scene(position, grid, prefix, objects, generator) -> torch.Tensor:
    """(T, 128) FP32 of unit variance: who is at a token (64 channels), where it is smooth (64)."""
    device = position.device
    draw = _Draw(generator, device)
    size = torch.tensor(grid, dtype=torch.float32, device=device)
    where = position / size  # 0 .. 1 over the grid
    # Objects are the cells of moving centres: the one at the smallest weighted distance owns
    # the token. Some are larger than others.
    start, drift = draw.uniform(objects, 2), 0.3 * draw.normal(objects, 2)
    weight = 0.05 * draw.uniform(objects)
    centres = start + where[:, :1].unsqueeze(1) * drift  # (T, objects, 2)
    distance = (where[:, 1:].unsqueeze(1) - centres).square().sum(-1) - weight
    owner = distance.argmin(-1)
    prototypes = draw.normal(objects, 64)
    # A smooth field as a sum of slow plane waves; at most a few periods over the picture.
    waves = draw.normal(3, 48) * torch.tensor([[0.7], [1.5], [1.5]], device=device)
    phase = (where @ waves + draw.uniform(48)) * (2 * math.pi)
    smooth = phase.cos() @ draw.normal(48, 64) * (2 / 48) ** 0.5
    content = torch.cat([prototypes[owner], smooth], 1)
    content[:prefix] = draw.normal(prefix, content.shape[1])
    return content


def _positions(grid: Grid, prefix: int, device) -> torch.Tensor:
    """(T, 3) FP32 positions in tokens."""
    axes = [torch.arange(n, dtype=torch.float32, device=device) for n in grid]
    video = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    front = torch.arange(-prefix, 0, dtype=torch.float32, device=device)
    return torch.cat([front.unsqueeze(1).expand(-1, 3), video])


def _frequencies(device) -> list[torch.Tensor]:
    """Radians a token of every rotary pair, one tensor an axis."""
    return [
        ROTARY_BASE ** (-torch.arange(0, channels, 2, device=device) / channels)
        for channels in ROTARY_SPLIT
    ]


def _slow_pairs(device) -> torch.Tensor:
    """Rotary pairs that turn by less than a radian over 100 tokens: where heavy channels live."""
    return (torch.cat(_frequencies(device)) < 0.01).nonzero().squeeze(1)


def _rotary_table(position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (T, 64) FP32."""
    angle = torch.cat(
        [position[:, i : i + 1] * f for i, f in enumerate(_frequencies(position.device))], 1
    )
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channel pairs (2 i, 2 i + 1) of x (T, 128)."""
    even, odd = x[:, 0::2], x[:, 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(1)


def _check_shape(shape: Shape) -> None:
    if len(shape) != 4 or shape[3] != HEAD_DIM or min(shape) < 1:
        raise ValueError(f"shape: got {tuple(shape)}, need (B, T, H, {HEAD_DIM}), none of them 0")


def _empty_qkv(shape: Shape, device) -> QKV:
    return tuple(torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(3))


def _heads(shape: Shape) -> Iterator[tuple[int, int]]:
    return ((item, head) for item in range(shape[0]) for head in range(shape[2]))


def _generator(device, seed: int, item: int, head: int) -> torch.Generator:
    """One stream for every head; head -1 is what a batch item shares."""
    if seed < 0:
        raise ValueError(f"seed: got {seed}, need 0 or more")
    return torch.Generator(device).manual_seed((seed * 8192 + item) * 8192 + head + 1)


# -- routing -----------------------------------------------------------------------------------


def union_ratio(mask: torch.Tensor, n: int) -> float:
    """Mean over groups of n neighbouring query blocks of |union of their key blocks| / mean size.

    What a kernel that loads the union once for n query blocks pays, compared with one that could
    load for every block apart: 1 where neighbours agree, n where they have nothing in common.

    Args:
        mask: (B, H, NT, NT) bool, [query, key]; every query block has at least one key block.
        n: query blocks of a group, 1 .. NT. A last group of fewer is left out.
    """
    blocks = mask.shape[2]
    if not 1 <= n <= blocks:
        raise ValueError(f"n: got {n}, need 1 .. {blocks} query blocks")
    groups = mask[:, :, : blocks // n * n].unflatten(2, (-1, n))
    union = groups.any(3).sum(-1)
    size = groups.sum(-1).float().mean(3)
    return (union / size).double().mean().item()


def tau_for_density(
    q: torch.Tensor,
    k: torch.Tensor,
    density: float,
    *,
    estimator: str = "diag",
    scale: float | None = None,
    sink_kv: Sequence[tuple[int, int]] = (),
    dense_q: Sequence[tuple[int, int]] = (),
    tolerance: float = 0.002,
) -> tuple[float, float]:
    """The tau whose routing makes ``density`` of all blocks exact, by bisection.

    Args:
        q, k: (B, T, H, 128), any float dtype.
        density: exact blocks / all blocks in (0, 1], forced blocks included.
        estimator, scale, sink_kv, dense_q: as in ``sol_attention_reference``.
        tolerance: largest distance from ``density`` that ends the search.

    Returns:
        (tau, density it gives): within ``tolerance``, or the nearest that can be reached (forced
        blocks are a floor, equal scores a step). tau is -1000 for a density of 1.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density: got {density}, need more than 0, at most 1")
    if density == 1:
        return -1000.0, 1.0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_mean, k_mean = _block_means(q), _block_means(k)
    scores = block_scores(q_mean, k_mean, scale)
    forced = forced_blocks(q.shape[1], sink_kv, dense_q, q.device)

    def reached(tau: float) -> float:
        threshold = route_threshold(q_mean, k_mean, tau=tau, estimator=estimator, scale=scale)
        exact = (scores > threshold.unsqueeze(-1)) | forced
        return exact.sum(-1).double().mean().item() / exact.shape[-1]

    low, high = TAU_SEARCH
    found = [(tau, reached(tau)) for tau in TAU_SEARCH]
    for _ in range(40):
        best = min(found, key=lambda pair: abs(pair[1] - density))
        if abs(best[1] - density) <= tolerance / 2:
            break
        middle = (low + high) / 2
        found.append((middle, reached(middle)))
        low, high = (middle, high) if found[-1][1] > density else (low, middle)
    return min(found, key=lambda pair: abs(pair[1] - density))


def routing(
    q: torch.Tensor,
    k: torch.Tensor,
    tau: float,
    *,
    estimator: str = "diag",
    scale: float | None = None,
    sink_kv: Sequence[tuple[int, int]] = (),
    dense_q: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """(B, H, NT, NT) bool: the reference's routing of q and k, without FP32 copies of either.

    Arguments as in ``tau_for_density``; tau -1000 or less makes everything exact.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return route_mask(
        _block_means(q),
        _block_means(k),
        tau=tau if tau > -1000 else -math.inf,
        estimator=estimator,
        scale=scale,
        forced=forced_blocks(q.shape[1], sink_kv, dense_q, q.device),
    )


def _block_means(x: torch.Tensor) -> torch.Tensor:
    """(B, NT, H, 128) FP32, one head at a time: no FP32 copy of the whole tensor."""
    return torch.cat([block_mean(x[:, :, h : h + 1].float()) for h in range(x.shape[2])], 2)


# -- poison ------------------------------------------------------------------------------------


def fused_qkv_views(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    per_head: bool = False,
    gap: int = HEAD_DIM,
    tail: int = 64,
    poison: float = math.nan,
) -> QKV:
    """The same values as strided views of one buffer in which everything else is poison.

    Models hand over slices of one fused projection; a kernel that ignores strides or reads past
    the last token meets the poison.

    Args:
        q, k, v: (B, T, H, D), one shape and dtype.
        per_head: a token's row is (H, 3, D), as MiniMax H3 has it; else (3, H, D).
        gap: poisoned elements between the rows of two tokens.
        tail: poisoned rows in front of the first and behind the last token of every batch item.
        poison: what they hold.

    Returns:
        Three (B, T, H, D) views with stride(-1) == 1.
    """
    batch, tokens, heads, dim = q.shape
    width = 3 * heads * dim
    fused = q.new_full((batch, tail + tokens + tail, width + gap), poison)
    rows = fused[:, tail : tail + tokens, :width]
    parts = rows.unflatten(2, (heads, 3, dim) if per_head else (3, heads, dim))
    views = parts.unbind(3 if per_head else 2)
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x)
    return views


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside it, uninitialised memory is NaN (integers: their largest value).

    An output element that a kernel forgets shows as NaN instead of a lucky old value.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
