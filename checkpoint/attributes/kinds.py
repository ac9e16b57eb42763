"""Kinds of Python objects, as the walk through attributes of attached objects distinguishes them."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import sys
import sysconfig
import threading
import types
import uuid
import weakref
from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gpuslice.checkpoint.named.describe import is_stateful
from gpuslice.checkpoint.named.generators import Generator
from gpuslice.checkpoint.named.plain_objects import hides_nothing


class Kind(Enum):
    """How the walk through attached objects treats an object.

    Attributes
    ----------
    LEAF
        An immutable value, compared by value.
    TENSOR, ARRAY, GENERATOR
        State of its own.
    MODULE, OPTIMIZER, STATEFUL
        Saved as if it had been attached, too; the first two are also looked into.
    CONTAINER, OBJECT, FUNCTION, CLASS
        Looked into; of a class of the script's own, the values that it keeps itself.
    OPAQUE
        State that cannot be read: an iterator, a file, an object of another language.
    IGNORED
        No state of a training.
    """

    LEAF = auto()
    TENSOR = auto()
    ARRAY = auto()
    GENERATOR = auto()
    MODULE = auto()
    OPTIMIZER = auto()
    STATEFUL = auto()
    CONTAINER = auto()
    OBJECT = auto()
    FUNCTION = auto()
    CLASS = auto()
    OPAQUE = auto()
    IGNORED = auto()


#: Exact types of immutable values.
LEAVES: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, type(None), range, slice, type(...), type(NotImplemented)}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone}
    | {decimal.Decimal, fractions.Fraction, uuid.UUID, re.Pattern}
)
_LEAF_BASES = (enum.Enum, np.generic, np.dtype, pathlib.PurePath)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_WITHOUT_STATE = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.MethodWrapperType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(weakref.ref, weakref.ProxyType, functools._lru_cache_wrapper, property, staticmethod, classmethod),
)
#: Packages whose objects synchronize, report, or read data, and gpuslice.
_PACKAGES_WITHOUT_STATE = frozenset(
    {"logging", "threading", "_thread", "weakref", "_weakref", "_weakrefset", "asyncio", "concurrent"}
    | {"multiprocessing", "typing", "types", "abc", "_abc", "inspect", "importlib", "warnings", "contextvars"}
    | {"tqdm", "wandb", "tensorboard", "tensorboardX", "mlflow", "rich", "pynvml", "triton", "gpuslice"}
    | {"torchdata", "h5py", "lmdb", "PIL", "pyarrow", "tokenizers", "sentencepiece"}
)
#: Modules of torch whose objects are looked into. Other objects of torch are internal to it.
_TORCH_LOOKED_INTO = ("torch.nn.modules.", "torch.optim.", "torch.utils.data.", "torch.distributions.")


def kind_of(item: Any) -> Kind:
    """Return the kind of an object."""
    kind = type(item)
    if kind in LEAVES or isinstance(item, _LEAF_BASES):
        return Kind.LEAF
    for state, its in _STATE:
        if isinstance(item, state):
            return its
    if isinstance(item, CONTAINERS):
        return Kind.CONTAINER
    if isinstance(item, FUNCTIONS):
        return Kind.IGNORED if _is_of_a_library(item) else Kind.FUNCTION
    if isinstance(item, types.BuiltinMethodType) and not isinstance(item.__self__, _NO_OWNER):
        return Kind.FUNCTION
    if isinstance(item, type):
        return Kind.CLASS if is_scripts_own(item) else Kind.IGNORED
    if isinstance(item, _SEEN_THROUGH):
        return Kind.OBJECT
    if _is_shared_memory(item) or isinstance(item, _WEAK):
        return Kind.OPAQUE
    if isinstance(item, _WITHOUT_STATE) or package(kind) in _PACKAGES_WITHOUT_STATE:
        return Kind.IGNORED
    if kind is object:
        return Kind.IGNORED
    if package(kind) == "torch" and not is_looked_into(kind):
        if isinstance(item, Iterator):
            return Kind.OPAQUE
        return Kind.STATEFUL if is_stateful(item) else Kind.IGNORED
    return Kind.OBJECT if hides_nothing(item) else Kind.OPAQUE


#: Owners of built-in functions that are no methods.
_NO_OWNER = (types.ModuleType, type, type(None))
#: Classes of another language that keep nothing but attributes.
_SEEN_THROUGH = (types.SimpleNamespace, threading.local)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_STATE: tuple[tuple[Any, Kind], ...] = (
    (torch.Tensor, Kind.TENSOR),
    (np.ndarray, Kind.ARRAY),
    (torch.nn.Module, Kind.MODULE),
    (torch.optim.Optimizer, Kind.OPTIMIZER),
    (Generator, Kind.GENERATOR),
)


def package(kind: type) -> str:
    """Return the top-level package of a class."""
    return str(kind.__module__).partition(".")[0]


def is_looked_into(kind: type) -> bool:
    """Return True if the attributes of the class's objects may hold state of a training."""
    name = f"{kind.__module__}."
    return package(kind) != "torch" or name.startswith(_TORCH_LOOKED_INTO)


def is_scripts_own(kind: type) -> bool:
    """Return True if a class is of the script or a module of its own, and not of an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if isinstance(kind, enum.EnumMeta) or package(kind) == "gpuslice":
        return False
    if file is None:  # a module that is part of the interpreter has none; nor has a notebook
        return kind.__module__ == "__main__"
    return not file.startswith((*_LIBRARIES, "<frozen"))


def is_data(owner: object, name: str, value: object) -> bool:
    """Return True if an attribute holds data that a training reads. It may be large and seldom changes."""
    if isinstance(value, Dataset):
        return True
    if isinstance(owner, DataLoader):
        return name == "dataset"
    return isinstance(owner, torch.utils.data.Sampler) and name == "data_source"


def _is_shared_memory(item: object) -> bool:
    """Return True for values that another process may change: of ``ctypes`` and of ``multiprocessing``."""
    return type(item).__mro__[-2].__module__ == "_ctypes" or is_shared_value(item) or is_proxy(item)


def is_shared_value(item: object) -> bool:
    """Return True for ``multiprocessing.Value`` and ``Array``."""
    return type(item).__module__ == "multiprocessing.sharedctypes" and hasattr(item, "get_obj")


def is_proxy(item: object) -> bool:
    """Return True for containers and values of a ``multiprocessing.Manager``."""
    names = ("DictProxy", "ListProxy", "ValueProxy", "ArrayProxy", "NamespaceProxy")
    return type(item).__module__ == "multiprocessing.managers" and type(item).__name__ in names


def _is_of_a_library(function: Any) -> bool:
    """Return True for functions of torch and NumPy, whose closures belong to the library."""
    while isinstance(function, functools.partial):
        if function.args or function.keywords:
            return False
        function = function.func
    if isinstance(function, types.MethodType):
        return False
    module = str(getattr(function, "__globals__", {}).get("__name__", ""))
    return module.partition(".")[0] in ("torch", "numpy", *_PACKAGES_WITHOUT_STATE)
