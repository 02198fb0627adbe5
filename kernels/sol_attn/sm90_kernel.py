"""SM90 Sol-Attn kernel: FP8 or BF16, warp-specialised, in CuTe DSL.

A thread block is one producer warp, which issues TMA loads, and three consumer warpgroups with one
query block of 64 rows each; they share every K and V tile. Blocks are persistent: each takes work
items (three query blocks of one head, one split of the keys) until there are none.

For each item a stream of slots runs through a ring in shared memory: first the summaries of 64
blocks each, from the last group to the first, then every exact block that at least one of the three
query blocks wants, from the last to the first, then a mark for the end. A consumer passes over tiles
that are not its own.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .config import BLOCK_SIZE, HEAD_DIM
from .sm90_consumer import ConsumerMixin
from .sm90_producer import ProducerMixin
from .sm90_route import RouteMixin
from .sm90_softmax import SoftmaxMixin
from .sm90_variant import CONSUMERS, Variant

# Registers of a thread: the producer gives up what the consumers need.
PRODUCER_REGISTERS = 32
CONSUMER_REGISTERS = 160
WARPGROUP = 128


class SolAttnSm90(ProducerMixin, ConsumerMixin, RouteMixin, SoftmaxMixin):
    """Launches the kernel of one ``Variant``.

    Call arguments, all of one device; NT blocks, NG groups of 64 blocks, NW = 2 NG words:
        q, k: (T or 64 NT, 128, H, B) BF16, or E4M3 as bytes, channels contiguous.
        v: (128, T, H, B) BF16, channels contiguous; or E4M3 as bytes, tokens contiguous and in
            every 32 in the order of ``prepare.SLOT_OF_TOKEN``.
        mean_k: (64 NG, 128, H, B); mean_v: (128, 64 NG, H, B); as k and v.
        q_scale, k_scale: (NT, B H) FP32; mean_k_scale: (NG, B H); v_scale, out_offset: (128, B H).
        words: (NW, NT, B H) int32; bit c of word w: block 32 w + c is exact; set past NT. For source
            "scores" those that are exact whatever the scores say; ``keeps_words`` puts all in place.
        thresholds: (NT, B H) FP32; "scores": a block is exact if the mean logit of the query block
            to its mean key, log2, is above. Or a dummy.
        order: (T,) int64 or a dummy.
        counts: (NT, B H S) int32, filled with the exact blocks of every query block.
        next_item: (1,) int32, 0.
        out: (128, H, T, B S) BF16; lse: (T, B H S) FP32 natural log, or a dummy.
        scale_log2: softmax scale times log2(e); tail_bits: log2 of the last block's tokens.
        tokens, splits: T, S. first_tile: row tiles (3 query blocks) in front that are left out.
        ctas: thread blocks to launch.
    BF16 ignores the scales.
    """

    def __init__(self, variant: Variant):
        self.variant = variant
        self.fp8 = variant.fp8
        self.stages = variant.stages
        self.q_buffers = variant.q_buffers
        self.dtype = cutlass.Float8E4M3FN if self.fp8 else cutlass.BFloat16
        # FP8: eight more rows of V^T hold ones, and make the row sums of P.
        self.v_rows = HEAD_DIM + (8 if self.fp8 else 0)
        self.threads = WARPGROUP * (1 + CONSUMERS)

    # A tiled MMA keeps its accumulate flag as a value of the program; one made anew at every place
    # of use can't leak it out of a loop.
    def qk_mma(self):
        return hopper.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32),
            *((1, 1, 1), (BLOCK_SIZE, BLOCK_SIZE), OperandSource.SMEM),
        )

    def pv_mma(self):
        v_major = OperandMajorMode.K if self.fp8 else OperandMajorMode.MN
        return hopper.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, OperandMajorMode.K, v_major, Float32),
            *((1, 1, 1), (BLOCK_SIZE, self.v_rows), OperandSource.RMEM),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        mean_k: cute.Tensor,
        mean_v: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        mean_k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        out_offset: cute.Tensor,
        words: cute.Tensor,
        thresholds: cute.Tensor,
        order: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        counts: cute.Tensor,
        next_item: cute.Tensor,
        scale_log2: Float32,
        tail_bits: Float32,
        tokens: Int32,
        splits: Int32,
        first_tile: Int32,
        ctas: Int32,
        stream,
    ):
        if const_expr(self.fp8):  # bytes: every torch can hand those over
            q, k, v, mean_k, mean_v = (
                cute.make_tensor(cute.recast_ptr(x.iterator, dtype=self.dtype), x.layout)
                for x in (q, k, v, mean_k, mean_v)
            )
        tile_k, tile_v = (BLOCK_SIZE, HEAD_DIM), (HEAD_DIM, BLOCK_SIZE)
        v_order = LayoutEnum.ROW_MAJOR if const_expr(self.fp8) else LayoutEnum.COL_MAJOR
        mnk = (BLOCK_SIZE, BLOCK_SIZE, HEAD_DIM)
        layout_q = hopper.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, mnk, self.dtype, CONSUMERS * self.q_buffers
        )
        layout_k = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, mnk, self.dtype, self.stages)
        layout_v = hopper.make_smem_layout_b(
            v_order, (BLOCK_SIZE, self.v_rows, BLOCK_SIZE), self.dtype, self.stages
        )
        loaded_v = layout_v
        if const_expr(self.fp8):  # TMA fills all rows but those of ones
            loaded_v = cute.make_composed_layout(
                layout_v.inner,
                0,
                cute.make_layout(
                    ((8, HEAD_DIM // 8), (BLOCK_SIZE, 1), (1, self.stages)),
                    stride=((BLOCK_SIZE, 8 * BLOCK_SIZE), (1, 0), (0, self.v_rows * BLOCK_SIZE)),
                ),
            )
        load = cpasync.CopyBulkTensorTileG2SOp()

        def one(layout):
            return cute.slice_(layout, (None, None, 0))

        atom_q, q = cpasync.make_tiled_tma_atom(load, q, one(layout_q), tile_k)
        atom_k, k = cpasync.make_tiled_tma_atom(load, k, one(layout_k), tile_k)
        atom_mk, mean_k = cpasync.make_tiled_tma_atom(load, mean_k, one(layout_k), tile_k)
        atom_v, v = cpasync.make_tiled_tma_atom(load, v, one(loaded_v), tile_v)
        atom_mv, mean_v = cpasync.make_tiled_tma_atom(load, mean_v, one(loaded_v), tile_v)
        self.q_bytes = cute.size_in_bytes(self.dtype, one(layout_q))
        self.slot_bytes = cute.size_in_bytes(self.dtype, one(layout_k)) + cute.size_in_bytes(
            self.dtype, one(loaded_v)
        )
        barrier_count = 2 * self.stages + 2 * self.q_buffers

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, barrier_count]
            # per slot: block and owners, and the scale of the keys; one more that means nothing
            label: cute.struct.Align[cute.struct.MemRange[Int32, 2 * (self.stages + 1)], 16]
            item_of: cute.struct.MemRange[Int32, 2]  # per query buffer
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            out: cute.struct.Align[
                cute.struct.MemRange[cutlass.BFloat16, CONSUMERS * BLOCK_SIZE * HEAD_DIM], 1024
            ]

        self.Storage = Storage
        self.kernel(
            *(atom_q, q, atom_k, k, atom_mk, mean_k, atom_v, v, atom_mv, mean_v),
            *(q_scale, k_scale, mean_k_scale, v_scale, out_offset, words),
            *(thresholds, order, out, lse),
            *(counts, next_item, scale_log2, tail_bits, tokens, splits, first_tile),
            *(layout_q, layout_k, layout_v, loaded_v),
        ).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        atom_q: cute.CopyAtom,
        q: cute.Tensor,
        atom_k: cute.CopyAtom,
        k: cute.Tensor,
        atom_mk: cute.CopyAtom,
        mean_k: cute.Tensor,
        atom_v: cute.CopyAtom,
        v: cute.Tensor,
        atom_mv: cute.CopyAtom,
        mean_v: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        mean_k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        out_offset: cute.Tensor,
        words: cute.Tensor,
        thresholds: cute.Tensor,
        order: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        counts: cute.Tensor,
        next_item: cute.Tensor,
        scale_log2: Float32,
        tail_bits: Float32,
        tokens: Int32,
        splits: Int32,
        first_tile: Int32,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        loaded_v: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.Storage)
        full = storage.barriers.data_ptr()
        empty = full + self.stages
        q_full = empty + self.stages
        q_empty = q_full + self.q_buffers
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4 * CONSUMERS)
                for i in cutlass.range_constexpr(self.q_buffers):
                    cute.arch.mbarrier_init(q_full + i, 1)
                    cute.arch.mbarrier_init(q_empty + i, 4 * CONSUMERS)
            for atom in (atom_q, atom_k, atom_mk, atom_v, atom_mv):
                cpasync.prefetch_descriptor(atom)
        label = storage.label.get_tensor(cute.make_layout((2, self.stages + 1)))
        if thread < 2:
            label[thread, self.stages] = Int32(0)
        if const_expr(self.fp8):
            size = const_expr(8 * BLOCK_SIZE * self.dtype.width // 32)  # 8 rows, in words
            pitch = const_expr(size * self.v_rows // 8)
            rows_of_ones = cute.make_tensor(
                cute.recast_ptr(storage.v.data_ptr(), dtype=Int32) + (pitch - size),
                cute.make_layout((size, self.stages), stride=(1, pitch)),
            )
            for i in cutlass.range(thread, size * self.stages, self.threads, unroll=1):
                rows_of_ones[i] = Int32(0x38383838)
            cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        s_q = storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        s_k = storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        s_v = storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        s_loaded_v = storage.v.get_tensor(loaded_v.outer, swizzle=loaded_v.inner)
        item_of = storage.item_of.get_tensor(cute.make_layout(2))

        warpgroup = warp // 4
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(
                    *(atom_q, q, atom_k, k, atom_mk, mean_k, atom_v, v, atom_mv, mean_v),
                    *(k_scale, mean_k_scale, words, counts, next_item, tokens, splits, first_tile),
                    *(s_q, s_k, s_loaded_v, storage.out),
                    *(label, item_of, full, empty, q_full, q_empty),
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                *(q_scale, v_scale, out_offset, words, thresholds, order, out, lse),
                *(scale_log2, tail_bits, tokens, splits, first_tile),
                *(s_q, s_k, s_v, storage.out, label, item_of, full, empty, q_full, q_empty),
                *(warpgroup - 1, thread - WARPGROUP),
            )

    @cute.jit
    def work_items(self, tokens, heads, splits, first_tile):
        """(blocks, groups, row tiles, items): an item is a row tile of a head and a split."""
        blocks = (tokens + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        groups = (blocks + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        row_tiles = (blocks + (CONSUMERS - 1)) // CONSUMERS - first_tile
        return blocks, groups, row_tiles, row_tiles * heads * splits

    @cute.jit
    def work_item(self, item, row_tiles, heads, groups, splits, first_tile):
        """(row tile, head, split, first group, one past the last) of an item."""
        row_tile = first_tile + item % row_tiles
        rest = item // row_tiles
        head = rest % heads
        split = rest // heads
        per_split = (groups + splits - 1) // splits
        first = split * per_split
        last = first + per_split
        if last > groups:
            last = groups
        if first > groups:
            first = groups
        return row_tile, head, split, first, last
