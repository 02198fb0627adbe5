"""Registration, and the rules for automatic and explicit choice of a backend."""

from types import SimpleNamespace

import pytest
import torch

from hopper_sol.kernels import registry
from hopper_sol.kernels.arch import DeviceFacts
from hopper_sol.kernels.errors import BackendUnavailable, UnknownBackend
from hopper_sol.kernels.registry import Backend
from hopper_sol.kernels.requirements import Requirements

OP = "test_op"
CPU_ONLY = Requirements(device_types=frozenset({"cpu"}))
CALL = SimpleNamespace(device=DeviceFacts("cpu", "cpu"), dtype=torch.bfloat16, head_dim=128)
GPU_CALL = SimpleNamespace(
    device=DeviceFacts("cuda", "NVIDIA H100", (9, 0)), dtype=torch.bfloat16, head_dim=128
)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", {})


def add(name, **options):
    backend = Backend(name, load=lambda: name, **options)
    registry.register(OP, backend)
    return backend


def says(reason):
    return lambda call: reason


def test_register_keeps_order_and_ops_apart():
    for name in ("z", "a", "m"):
        add(name)
    registry.register("other", Backend("z", load=lambda: None))
    assert registry.list_backends(OP) == ("z", "a", "m")
    assert registry.list_backends("other") == ("z",)
    assert registry.list_backends("nothing") == ()


def test_register_rejects_a_second_backend_of_the_same_name():
    first = add("a")
    with pytest.raises(ValueError, match=f"backend 'a' is already registered for {OP}"):
        add("a")
    assert registry.get(OP, "a") is first


def test_get_unknown_names_the_known():
    add("a")
    add("b")
    with pytest.raises(UnknownBackend, match=r"'c': test_op has no such backend; .* a, b") as e:
        registry.get(OP, "c")
    assert e.value.known == ("a", "b")
    assert e.value.__cause__ is None and e.value.__suppress_context__
    with pytest.raises(UnknownBackend):
        registry.get("nothing", "a")


def test_why_not_order_is_requirements_rules_auto_rules():
    backend = Backend(
        "a",
        load=lambda: None,
        requirements=CPU_ONLY,
        rules=(says(None), says("rule 2"), says("rule 3")),
        auto_rules=(says("auto"),),
    )
    assert backend.why_not(GPU_CALL).startswith("needs a cpu device")
    assert backend.why_not(CALL) == backend.why_not(CALL, automatic=True) == "rule 2"


def test_why_not_auto_rules_only_hold_back_auto():
    backend = Backend("a", load=lambda: None, auto_rules=(says(None), says("slow")))
    assert backend.why_not(CALL) is None
    assert backend.why_not(CALL, automatic=True) == "slow"


def test_why_not_stops_at_the_first_reason():
    def never(call):
        raise AssertionError("asked after somebody had declined")

    backend = Backend("a", load=lambda: None, requirements=CPU_ONLY, rules=(never,))
    assert backend.why_not(GPU_CALL) is not None
    second = Backend("b", load=lambda: None, rules=(says("no"), never), auto_rules=(never,))
    assert second.why_not(CALL, automatic=True) == "no"


def test_select_auto_takes_the_first_that_accepts():
    add("a", rules=(says("too short"),))
    add("b", auto_rules=(says("slow"),))
    chosen = add("c")
    add("d")
    assert registry.select(OP, CALL) == (chosen, {"a": "too short", "b": "slow"})


def test_select_auto_raises_with_every_reason():
    add("a", rules=(says("too short"),))
    add("b", auto_rules=(says("slow"),))
    with pytest.raises(BackendUnavailable) as e:
        registry.select(OP, CALL)
    assert e.value.reasons == {"a": "too short", "b": "slow"}
    assert e.value.backend == "auto"
    assert str(e.value) == f"no backend can run {OP}: a: too short; b: slow"


def test_select_explicit_ignores_auto_rules_and_order():
    add("a")
    slow = add("b", auto_rules=(says("slow"),))
    assert registry.select(OP, CALL, "b") == (slow, {})


def test_select_explicit_never_falls_back():
    add("a", rules=(says("too short"),))
    add("b")
    with pytest.raises(BackendUnavailable, match=f"'a' can't run {OP}: too short") as e:
        registry.select(OP, CALL, "a")
    assert e.value.reasons == {"a": "too short"}
    with pytest.raises(UnknownBackend):
        registry.select(OP, CALL, "c")


def test_select_does_not_load():
    def load():
        raise AssertionError("loaded although nobody asked")

    registry.register(OP, Backend("a", load=load))
    backend, _ = registry.select(OP, CALL)
    with pytest.raises(AssertionError, match="nobody asked"):
        registry.loaded(backend)


def test_loaded_imports_once():
    times = []
    backend = Backend("a", load=lambda: times.append(1) or (lambda: "ran"))
    assert registry.loaded(backend) is registry.loaded(backend)
    assert registry.loaded(backend)() == "ran"
    assert len(times) == 1


def test_loaded_tries_again_after_a_failure():
    times = []

    def load():
        times.append(1)
        if len(times) == 1:
            raise ImportError("no compiler yet")
        return len

    backend = Backend("a", load=load)
    with pytest.raises(ImportError, match="no compiler yet"):
        registry.loaded(backend)
    assert registry.loaded(backend) is len


def test_defaults_are_a_function_of_the_call():
    plain = add("a")
    by_dtype = add("b", defaults=lambda call: (("precision", str(call.dtype)),))
    assert plain.defaults(CALL) == ()
    assert by_dtype.defaults(CALL) == (("precision", "torch.bfloat16"),)
