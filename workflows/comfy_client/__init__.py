"""Talk to a ComfyUI server: queue prompts, follow them, fetch what they made.

Standard library only, for any Python from 3.10 on: it runs where nothing is installed.

    errors       what can go wrong, one class a kind
    address      where a server is and how to reach it: base path, headers, TLS
    client       HTTP: queue, history, files
    websocket    RFC 6455, the client's half
    graphs       prompt files, settings, sweeps, and what identifies a run
    preflight    what a server lacks for a graph, before it is queued
    runner       one run after the other through drops, restarts and busy queues
    outputs      files of a run, under names that stay in their folder
    records      JSON lines, and which runs they hold already
    progress     one line that says how far it is
    warmup       a graph at given sizes, few steps
    arguments    the command line of queue_prompt.py
"""

from . import (
    address,
    arguments,
    graphs,
    outputs,
    preflight,
    progress,
    records,
    runner,
    warmup,
    websocket,
)
from .client import Client
from .errors import (
    ComfyError,
    HttpError,
    NoAnswer,
    PromptFailed,
    PromptInterrupted,
    PromptLost,
    PromptRejected,
    PromptTimeout,
    ServerError,
)

__all__ = [
    "Client",
    "ComfyError",
    "HttpError",
    "NoAnswer",
    "PromptFailed",
    "PromptInterrupted",
    "PromptLost",
    "PromptRejected",
    "PromptTimeout",
    "ServerError",
    "address",
    "arguments",
    "graphs",
    "outputs",
    "preflight",
    "progress",
    "records",
    "runner",
    "warmup",
    "websocket",
]
