"""The last sampler runs of a model, and which of them a latent came from."""

from collections import deque
from dataclasses import dataclass

from .latent_mark import LatentMark

KEPT_RUNS = 64

THIS_PROMPT = "this_prompt"
EARLIER_PROMPT = "earlier_prompt"
UNRELATED = "unrelated"


@dataclass(frozen=True)
class Selection:
    """What a report is about.

    Attributes:
        runs: copies of sealed records, oldest first, each with ``made_this_latent``.
        source: "this_prompt", "earlier_prompt" (the runs end with the one that made the latent) or
            "unrelated" (none did; these are the last prompt's that sampled the model).
        dropped: earlier runs of the same prompt that are no longer kept.
    """

    runs: list[dict]
    source: str = THIS_PROMPT
    dropped: int = 0


class RunHistory:
    """Sealed records with a mark of what each run made; no tensors."""

    def __init__(self):
        self._kept: deque[tuple[dict, LatentMark | None]] = deque()
        self._last_dropped: tuple[str | None, int] = (None, 0)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def records(self) -> list[dict]:
        """Sealed records, oldest first."""
        return [record for record, _ in self._kept]

    def add(self, record: dict, mark: LatentMark | None) -> None:
        """Keep a run; ``mark`` is None if it made nothing."""
        self._kept.append((record, mark))
        if len(self._kept) > KEPT_RUNS:
            prompt = self._kept.popleft()[0]["prompt_id"]
            # Runs go in the order of their prompts, so only the last one's count can matter.
            last, count = self._last_dropped
            self._last_dropped = (prompt, count + 1 if prompt == last else 1)

    def select(self, latent: LatentMark | None, prompt_id: str | None) -> Selection:
        """Runs to report for a latent while ``prompt_id`` executes (None where ComfyUI does not tell).

        Those of the executing prompt; without any, the run that made the latent and those of its
        prompt before it; without that, the last prompt's, as unrelated.
        """
        made = [latent is not None and latent.matches(mark) for _, mark in self._kept]
        runs = [
            {**record, "made_this_latent": m}
            for (record, _), m in zip(self._kept, made, strict=True)
        ]
        if not runs:
            return Selection([])
        if prompt_id is None:
            return Selection(runs[-1:])
        if any(run["prompt_id"] == prompt_id for run in runs):
            return self._of_prompt(runs, prompt_id, THIS_PROMPT)
        if any(made):
            runs = runs[: len(made) - made[::-1].index(True)]
            return self._of_prompt(runs, runs[-1]["prompt_id"], EARLIER_PROMPT)
        return self._of_prompt(runs, runs[-1]["prompt_id"], UNRELATED)

    def _of_prompt(self, runs: list[dict], prompt_id: str | None, source: str) -> Selection:
        dropped_prompt, count = self._last_dropped
        own = [run for run in runs if run["prompt_id"] == prompt_id]
        return Selection(own, source, count if dropped_prompt == prompt_id else 0)
