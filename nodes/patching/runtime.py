"""What our nodes have put on one model, and the records of its sampler runs.

Every sampler run goes through here once (OUTER_SAMPLE), whichever of our nodes are on the model,
and leaves one record.
"""

import logging
from contextlib import contextmanager

from ..models import ModelAdapter
from .failures import is_interrupt
from .history import RunHistory
from .latent_mark import mark_of
from .linear import LinearSettings, sort_weight_functions
from .linear_run import LinearRun, counting
from .override import installed
from .plan import KEY
from .record import RunRecorder, linear_words
from .resolve import AttentionSettings
from .run import SolAttentionRun, executing

log = logging.getLogger("hopper_sol")
BYPASSED = (
    "no converted Linear was called: the sampler had no steps, or another patch computes these "
    "layers by itself"
)


class AccelerationRuntime:
    """Settings and run records of one model; shared by every clone of it.

    attention and linear: what Sol Attention and FP8 Linear do, None without such a node.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        attention: AttentionSettings | None = None,
        linear: LinearSettings | None = None,
    ):
        self.adapter = adapter
        self.attention = attention
        self.linear = linear
        self.history = RunHistory()
        self._active: list[SolAttentionRun] = []

    def __deepcopy__(self, memo):
        # ComfyUI of 2025 deep-copies model options; a copy would split the records.
        return self

    def outer_sample(self, executor, *args, **kwargs):
        """OUTER_SAMPLE wrapper: one sampler run."""
        guider = executor.class_obj
        noise = kwargs.get("noise", args[0] if args else None)
        sigmas = kwargs.get("sigmas", args[3] if len(args) > 3 else None)
        # Of a newer ComfyUI: what it carries in one row, such as video and audio.
        shapes = kwargs.get("latent_shapes", args[8] if len(args) > 8 else None)
        run = None
        if self.attention is not None:
            run = SolAttentionRun(self.attention, self.adapter, guider, noise, sigmas, shapes)
        linear = None if self.linear is None else LinearRun()
        record = run or self._plain_record(sigmas)
        status, error, mark = "failed", None, None
        try:
            with self._attending(run, guider), counting(linear):
                result = executor(*args, **kwargs)
            status, mark = "finished", mark_of(result, shapes)
            return result
        except BaseException as exception:
            error = f"{type(exception).__name__}: {exception}".strip(": ")
            if is_interrupt(exception):
                status, error = "interrupted", None
            raise
        finally:
            sealed = record.seal(status, error)
            sealed["linear"] = None if linear is None else self._seal_linear(linear, status)
            self.history.add(sealed, mark)

    @contextmanager
    def _attending(self, run: SolAttentionRun | None, guider):
        """Context in which ``run``, if there is one, gets this run's attention calls."""
        if run is None:
            yield
            return
        self._active.append(run)
        try:
            with installed(run, guider.model_options):
                yield
        finally:
            self._active.remove(run)

    def prepare_state(self, patcher, timestep, *rest):
        """ON_PREPARE_STATE callback: the sigma of the coming evaluation, fetched once."""
        if self._active:
            self._active[-1].sigma = float(timestep.flatten()[0])

    def apply_model(self, executor, *args, **kwargs):
        """APPLY_MODEL wrapper: publish what holds for this forward."""
        options = kwargs.get("transformer_options", args[5] if len(args) > 5 else None)
        if self._active and options is not None and args:
            # What is positional up to transformer_options: c_concat and c_crossattn matter here.
            inputs = {**dict(zip(("c_concat", "c_crossattn"), args[2:4], strict=False)), **kwargs}
            options[KEY] = self._active[-1].begin_forward(args[0], inputs)
        return executor(*args, **kwargs)

    def weights_loaded(self, patcher, *rest):
        """ON_LOAD and ON_PRE_RUN callback: ComfyUI has put its functions on the weights."""
        sort_weight_functions(patcher, self.linear)

    def _plain_record(self, sigmas) -> RunRecorder:
        """The record of a run without Sol Attention."""
        prompt_id, node_id = executing()
        header = {
            "prompt_id": prompt_id,
            "node_id": node_id,
            "model": self.adapter.name,
            "plan": None,
            "settings": None,
        }
        return RunRecorder(
            num_steps=max(1, len(sigmas if sigmas is not None else ()) - 1),
            num_blocks=self.adapter.num_blocks,
            check_finite=False,
            header=header,
        )

    def _seal_linear(self, linear: LinearRun, status: str) -> dict:
        counts = linear.seal()
        notes = [*self.linear.notes, *counts["notes"]]
        if status == "finished" and not counts["calls"]:
            notes.append(BYPASSED)
        section = {**self.linear.section(), **counts, "notes": notes}
        log.info("FP8 Linear: %s", linear_words(section))
        return section
