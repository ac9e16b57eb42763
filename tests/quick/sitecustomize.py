"""For the Pythons that tests start: they collect garbage rarely, and none as they end, and load no compiler.

Torch's import, and that of what an optimizer needs, make half a million objects. To look through them again
and again, and once more at the end, would be 40 % of the processor time of a short script.

What an optimizer needs, and DDP and FSDP, too, is ``torch._dynamo``: a second of processor time, though they
only tell it to stay out. Deterministic algorithms only set an option of ``torch._inductor``. Here both are
loaded as soon as anybody asks them for more than that. What torch imports to trace and export models, half a
second more, is loaded when it is asked for anything; tensors on the device ``meta`` do not ask it.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType


class Part:
    """A module of a deferred package that is asked for one function although nothing is compiled."""

    def __init__(self, name: str, **functions: object) -> None:
        self._name = name
        vars(self).update(functions)

    def __getattr__(self, name: str) -> object:
        return getattr(import_module(self._name), name)


class Deferred(ModuleType):
    """A package before it is loaded."""

    def __getattr__(self, name: str) -> object:
        """Load it. Whoever imports a module of it asks for its ``__path__``."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        spec = self.__spec__
        assert spec is not None
        assert isinstance(spec.loader, OptionsLoader)
        if self.__name__ in WITH_OPTIONS:
            load_registrations()  # first, as without us
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__loader__ = spec.loader = spec.loader.loader
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        if self.__name__ == "torch._decomp":  # it imports the other one for what that registers
            import_module("torch._meta_registrations").activate_meta  # noqa: B018
        return getattr(self, name)


def let_generators_be_made() -> None:
    """Tell torch what generators derive from, as ``torch._prims.rng_prims`` does since torch 2.11."""
    native = sys.modules["torch._C"]
    if hasattr(native, "_set_generator_metaclass"):
        native._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


def load_registrations() -> None:
    """Load what fake tensors need, which do not import it by name."""
    import_module("torch._decomp").decomposition_table  # noqa: B018


class Dynamo(Deferred):
    """``torch._dynamo``: nothing is compiled yet, so nothing need be kept from it."""

    utils = Part("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = Part("torch._dynamo.trace_rules", clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break() -> None:
        pass

    @staticmethod
    def disable(function, *arguments, **options):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            dynamo = sys.modules["torch._dynamo"]
            if isinstance(dynamo, Dynamo):
                return function(*args, **kwargs)
            return dynamo.disable(function, *arguments, **options)(*args, **kwargs)

        return call


DEFERRED = {
    "torch._dynamo": Dynamo,
    "torch._inductor": Deferred,
    "torch._decomp": Deferred,
    "torch._meta_registrations": Deferred,
    "torch.export": Deferred,
}
#: Their ``config`` needs nothing of the rest.
WITH_OPTIONS = ("torch._dynamo", "torch._inductor")


class OptionsLoader:
    """Loads a package's ``config``, if it is of `WITH_OPTIONS`, and leaves the rest to `Deferred`."""

    def __init__(self, loader) -> None:  # type: ignore[no-untyped-def]
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = DEFERRED[spec.name](spec.name)
        module.__path__ = spec.submodule_search_locations or []
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in WITH_OPTIONS:
            spec = PathFinder.find_spec(f"{module.__name__}.config", module.__path__)
            assert spec is not None
            assert spec.loader is not None
            module.config = sys.modules[spec.name] = module_from_spec(spec)  # type: ignore[attr-defined]
            spec.loader.exec_module(module.config)
        elif module.__name__ == "torch._meta_registrations":
            let_generators_be_made()
        del module.__path__


class DeferredFinder:
    """Finds these packages where the path finder does, before which it stands."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torch.distributed.tensor":  # computes shapes with fake tensors
            load_registrations()
        if name not in DEFERRED:
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.loader is not None
        spec.loader = OptionsLoader(spec.loader)  # type: ignore[assignment]
        return spec


gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)  # before all others, so it is called after them
sys.meta_path.insert(sys.meta_path.index(PathFinder), DeferredFinder)  # type: ignore[arg-type]
