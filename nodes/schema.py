"""Node schemas that every supported ComfyUI accepts.

Newer ComfyUI knows more keyword arguments of inputs and schemas than older ones, which raise on
them; what the running one does not know is only presentation, so it is left out.
"""

import inspect

from comfy_api.latest import io

CATEGORY = "Hopper-Sol"


def known(function, **kwargs):
    """Call ``function`` with those of ``kwargs`` that it has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return function(**kwargs)
    return function(**{name: value for name, value in kwargs.items() if name in parameters})


def schema(**kwargs) -> io.Schema:
    """An io.Schema in our category."""
    return known(io.Schema, **{"category": CATEGORY, **kwargs})
