"""Online softmax of the SM90 Sol-Attn kernel, on WGMMA accumulators in registers.

A 64-row accumulator of N columns is spread over the 128 threads of a warpgroup. Thread t of a warp
holds rows g = t / 4 and g + 8 of the warp's 16 and, in every 8 columns j, the pair 2 (t % 4) + e:
register e + 2 h + 4 j is row g + 8 h, column 8 j + 2 (t % 4) + e.

The running maximum only has to keep probabilities in range, so it stays where it is until one leaves
it: for E4M3 a byte that says 448, for BF16 a row sum beyond 2^60. Testing for that costs a third of
taking the maximum of every tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

PROBABILITY_BITS = 8.0  # E4M3 probabilities are cast at 2^8
BF16_SUM_LIMIT = 2.0**60
# How far a logit may lie above the maximum: 2^8 2^0.75 = 430, which still rounds below 448.
SLACK_BITS = 0.75
# The maximum of a row without any column yet. Finite, so that -inf - -inf never comes up; the first
# real logit leaves the range of probabilities and moves it.
NO_MAXIMUM = -1e30
# Added to four bytes of 0 .. 0x7F, it sets the top bit of those that are 448 (0x7E) or NaN (0x7F).
_SATURATED = 0x02020202
_TOP_BITS = 0x80808080


class SoftmaxMixin:
    """Needs ``self.fp8``."""

    @property
    def probability_bits(self) -> float:
        return PROBABILITY_BITS if self.fp8 else 0.0

    @cute.jit
    def exponentials(self, scores, factor, offset, state, packed):
        """Pack P = 2^(scores factor + offset - maximum) and tell whether it stayed in range.

        Returns:
            Int32: not 0 if this thread saw a probability out of range. ``state.tile_sum`` holds this
            thread's part of the row sums in BF16.
        """
        p = cute.make_rmem_tensor(32, Float32)
        for i in cutlass.range_constexpr(32):
            row = const_expr((i // 2) % 2)
            p[i] = cute.arch.exp2(scores[i] * factor + (state.bias[row] + offset))
        if const_expr(not self.fp8):
            for row in cutlass.range_constexpr(2):
                chains = cute.make_rmem_tensor(2, Float32)
                for e in cutlass.range_constexpr(2):
                    chains[e] = p[e + 2 * row]
                    for j in cutlass.range_constexpr(1, 8):
                        chains[e] = chains[e] + p[e + 2 * row + 4 * j]
                state.tile_sum[row] = chains[0] + chains[1]
        self.pack(p, packed)
        if const_expr(self.fp8):
            words = cute.make_tensor(
                cute.recast_ptr(packed.iterator, dtype=Uint32), cute.make_layout(8)
            )
            marks = Uint32(0)
            for i in cutlass.range_constexpr(8):
                marks = marks | (words[i] + Uint32(_SATURATED))
            out_of_range = Int32(marks & Uint32(_TOP_BITS))
        else:
            out_of_range = Int32(0)
            for row in cutlass.range_constexpr(2):
                # Not "greater": NaN has to be looked at as well.
                if not (state.tile_sum[row] <= BF16_SUM_LIMIT):
                    out_of_range = Int32(1)
        return out_of_range

    @cute.jit
    def peaks(self, scores, factor, offset, high):
        """Raise ``high`` to the largest log2 logit of this thread's part of each of its two rows."""
        chains = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            chains[i] = scores[i]
        for i in cutlass.range_constexpr(4, 32):
            chains[i % 4] = cute.arch.fmax(chains[i % 4], scores[i])
        for row in cutlass.range_constexpr(2):
            peak = cute.arch.fmax(chains[2 * row], chains[2 * row + 1])
            high[row] = cute.arch.fmax(high[row], peak * factor + offset)

    @cute.jit
    def move_maximum(self, high, state, acc):
        """Raise the running maximum to ``high``; rescale what was summed."""
        rescale = cute.make_rmem_tensor(2, Float32)
        for row in cutlass.range_constexpr(2):
            peak = high[row]
            for lane in cutlass.range_constexpr(1, 3):
                peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, lane))
            old = state.row_max[row]
            # A whole number: rescaling is exact then, and rounding to E4M3 does not depend on it.
            new = cute.arch.fmax(old, cute.math.ceil(peak))
            rescale[row] = cute.arch.exp2(old - new)
            state.row_max[row] = new
            state.bias[row] = self.probability_bits - new
            state.row_sum[row] = state.row_sum[row] * rescale[row]
        for i in cutlass.range_constexpr(64):
            acc[i] = acc[i] * rescale[const_expr((i // 2) % 2)]

    @cute.jit
    def softmax_of_summaries(self, scores, factor, offset, state, acc, packed):
        """As ``softmax``, for tiles of which many move the maximum: looks at it first."""
        high = cute.make_rmem_tensor(2, Float32)
        high.fill(NO_MAXIMUM)
        self.peaks(scores, factor, offset, high)
        moves = Int32(0)
        for row in cutlass.range_constexpr(2):
            if high[row] > state.row_max[row] + SLACK_BITS:
                moves = Int32(1)
        if cute.arch.vote_any_sync(moves != 0):
            self.move_maximum(high, state, acc)
        self.exponentials(scores, factor, offset, state, packed)
        if const_expr(not self.fp8):
            for row in cutlass.range_constexpr(2):
                state.row_sum[row] = state.row_sum[row] + state.tile_sum[row]

    @cute.jit
    def softmax(self, tiles, state, acc):
        """Probabilities of one tile, or of two; moves the maximum first where it has to.

        Args:
            tiles: one or two, the second product possibly still in the works. (scores, factor, packed): 32 FP32 registers, -inf where masked, with log2 logit =
                scores factor; and where the probabilities go.
        """
        hit = Int32(0)
        for i in cutlass.range_constexpr(len(tiles)):
            scores, factor, packed = tiles[i]
            if const_expr(i == 1):
                warpgroup.wait_group(0)
            hit = hit | self.exponentials(scores, factor, Float32(0.0), state, packed)
        if cute.arch.vote_any_sync(hit != 0):
            high = cute.make_rmem_tensor(2, Float32)
            high.fill(NO_MAXIMUM)
            for i in cutlass.range_constexpr(len(tiles)):
                scores, factor, packed = tiles[i]
                self.peaks(scores, factor, Float32(0.0), high)
            self.move_maximum(high, state, acc)
            for i in cutlass.range_constexpr(len(tiles)):
                scores, factor, packed = tiles[i]
                self.exponentials(scores, factor, Float32(0.0), state, packed)
        if const_expr(not self.fp8):
            for row in cutlass.range_constexpr(2):
                state.row_sum[row] = state.row_sum[row] + state.tile_sum[row]

    @cute.jit
    def pack(self, p, packed):
        """32 FP32 probabilities to the A operand of the next WGMMA.

        BF16: the registers already are in its order. E4M3: A wants, in every 32 columns, the order
        that ``prepare.SLOT_OF_TOKEN`` gives V's tokens; four registers make a word.
        """
        if const_expr(self.fp8):
            source = cute.make_tensor(
                p.iterator, cute.make_layout((2, 2, 2, 4), stride=(1, 4, 2, 8))
            )
            target = cute.make_tensor(packed.iterator, cute.make_layout((2, 2, 2, 4)))
            target.store(source.load().to(cutlass.Float8E4M3FN))
        else:
            target = cute.make_tensor(packed.iterator, cute.make_layout(32))
            target.store(p.load().to(cutlass.BFloat16))
