"""Which SM90 kernel a call needs: everything that changes generated code, and its memory plan."""

from dataclasses import asdict, dataclass

# Shared memory that a thread block may have on SM90, in bytes.
SHARED_BYTES = 232_448

CONSUMERS = 3  # warpgroups of 64 query rows that share every K and V tile

# Routing inside: 32-bit words of shared memory of one warp, which stages 16 rows of the results at
# other times. Two buffers of 64 sums, and bits of exact blocks of one item.
STAGED_SUMS = 128
WORDS_INSIDE = 16 * 128 // 2 - STAGED_SUMS


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. All sizes, strides, tau and ranges are run-time values.

    Attributes:
        precision: "bf16" or "fp8".
        source: where the bits of exact blocks come from: "words" reads packed bits, "scores" decides
            in the kernel by thresholds, "all" takes every block exactly and reads no summary.
        keeps_words: "scores" only: also stores the bits that were decided.
        with_lse: also stores the log-sum-exp.
        ordered: stores row i of the operands at row order[i].
        with_offset: adds a vector of 128 channels per head to the output.
        traced: an order of reads and writes in shared memory that racecheck can follow; 3 to 5 %
            slower, and the same results.
    """

    precision: str
    source: str = "words"
    with_lse: bool = False
    ordered: bool = False
    with_offset: bool = False
    traced: bool = False
    keeps_words: bool = False

    @property
    def fp8(self) -> bool:
        return self.precision == "fp8"

    @property
    def stages(self) -> int:
        """Pairs of a K and a V tile in flight."""
        return 7 if self.fp8 else 4

    @property
    def pairs(self) -> bool:
        """Take exact blocks two at a time: one addition to the output for both."""
        return self.fp8 and self.source == "all"

    @property
    def q_buffers(self) -> int:
        """Query tiles in shared memory: with two, the next tile's queries load early."""
        return 2 if self.fp8 and self.source == "all" else 1

    @property
    def name(self) -> str:
        """File name of its compiled object: letters, digits and underscores."""
        flags = [name for name, on in asdict(self).items() if on is True]
        return "_".join(["sol_attn", self.precision, self.source, *flags])
