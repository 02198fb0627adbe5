"""Which steps of a sampler run are dense.

A step is a place in the schedule, never a count of model calls: samplers such as heun call the
model twice a step and some evaluate between two sigmas. An evaluation belongs to the step whose noise
level it has; heun's second one has that of the next step.
"""

import math
from dataclasses import dataclass

DENSE_STEP = "dense step"
DENSE_LAST_STEP = "dense last step"
OUTSIDE_WINDOW = "outside start/end percent"
# A run that begins in this first part of the model's noise schedule begins from noise. Not exactly
# at its top: some schedulers (ddim_uniform) leave out the first of their few steps.
FROM_NOISE_PERCENT = 0.1
SLACK = 1e-6  # sigmas this close are equal


def automatic_dense_steps(total: int) -> int:
    """20 % of the steps, rounded up, at least 1: 4 -> 1, 8 -> 2, 20 -> 4, 50 -> 10.

    Layout and motion are settled in the first steps from noise. A run that begins later (the
    low-noise model of two, image to image) gets none: they are settled in what it was given.
    """
    return max(1, -(-total // 5))


@dataclass(frozen=True)
class StepPolicy:
    """Dense steps of one sampler run.

    Attributes:
        sigmas: schedule of this run, one more than its steps, from high to low.
        dense_first, dense_last: steps at both ends that stay dense.
        sigma_start, sigma_end: sparse only while sigma_end <= sigma <= sigma_start.
        continues: automatic dense steps were asked for and are 0, as the run begins below noise.
    """

    sigmas: tuple[float, ...]
    dense_first: int
    dense_last: int
    sigma_start: float = math.inf
    sigma_end: float = 0.0
    continues: bool = False

    @classmethod
    def resolve(
        cls,
        sigmas,
        *,
        dense_steps: int,
        dense_last_steps: int,
        sigma_start: float,
        sigma_end: float,
        sigma_noise: float = 0.0,
    ) -> "StepPolicy":
        """Policy for a schedule.

        Args:
            dense_steps: -1 means automatic.
            sigma_noise: a run that begins at or above it begins from noise.
        """
        sigmas = tuple(float(s) for s in sigmas)
        total = max(0, len(sigmas) - 1)
        continues = dense_steps < 0 and total > 0 and sigmas[0] < sigma_noise - SLACK
        if continues:
            first = 0
        else:
            first = automatic_dense_steps(total) if dense_steps < 0 else dense_steps
        first, last = min(first, total), min(dense_last_steps, total)
        return cls(sigmas, first, last, sigma_start, sigma_end, continues)

    @property
    def total(self) -> int:
        """Steps of this run."""
        return max(0, len(self.sigmas) - 1)

    def index(self, sigma: float) -> int:
        """0-based step that ``sigma`` belongs to: the last one that starts at or above it."""
        started = sum(1 for start in self.sigmas[:-1] if start >= sigma - SLACK)
        return min(max(started - 1, 0), max(self.total - 1, 0))

    def why_dense(self, sigma: float) -> str | None:
        """Why an evaluation at ``sigma`` stays dense, or None."""
        step = self.index(sigma)
        if step < self.dense_first:
            return DENSE_STEP
        if step >= self.total - self.dense_last:
            return DENSE_LAST_STEP
        # Sigmas are FP32 and the ends are not: a step that begins just there belongs to the window.
        if not self.sigma_end - SLACK <= sigma <= self.sigma_start + SLACK:
            return OUTSIDE_WINDOW
        return None

    def describe(self) -> str:
        """What will run, in words, counting steps from 1: "steps 1-2 dense, 3-8 sparse"."""
        if self.total == 0:
            return "no steps"
        parts: list[list] = []
        for step, sigma in enumerate(self.sigmas[:-1]):
            kind = "dense" if self.why_dense(sigma) else "sparse"
            if parts and parts[-1][0] == kind:
                parts[-1][2] = step + 1
            else:
                parts.append([kind, step + 1, step + 1])
        spans = [f"{a if a == b else f'{a}-{b}'} {kind}" for kind, a, b in parts]
        return ("step " if self.total == 1 else "steps ") + ", ".join(spans)
