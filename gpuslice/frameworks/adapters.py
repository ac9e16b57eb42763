"""The adapters, by the module whose import installs them, and the versions that were tested.

``sitecustomize`` calls `install` when a script has imported such a module, in a process of a named job.
"""

from __future__ import annotations

import importlib
import sys

#: Module with the trainer's class: package, tested versions up to their second number, the adapter's module.
#: ``./x test-frameworks`` tests them; docs/training-scripts.md has the results.
ADAPTERS = {
    "transformers.trainer": ("transformers", ("4.57", "5.24"), "transformers_trainer"),
    "lightning.pytorch.trainer.trainer": ("lightning", ("2.5", "2.6"), "lightning_trainer"),
    "pytorch_lightning.trainer.trainer": ("pytorch_lightning", ("2.5", "2.6"), "lightning_trainer"),
}


def install(module: str) -> None:
    """Install the adapter of the trainer in ``module``, which has just been imported."""
    package, _, adapter = ADAPTERS[module]
    importlib.import_module(f"gpuslice.frameworks.{adapter}").install(sys.modules[module], package)


def why_not(package: str, given: str) -> str:
    """Return why a trainer of a package is left alone; empty if it can be restarted.

    ``given`` is what the script has its trainer resume from.
    """
    if given:
        return f"the script gives {given} itself"
    if not is_known(package):
        return f"restarts were tested with {package} {tested(package)}, and this is {version_of(package)}"
    return ""


def version_of(package: str) -> str:
    """Return the version of an imported package; empty if it does not say."""
    return str(getattr(sys.modules.get(package), "__version__", ""))


def is_known(package: str) -> bool:
    """Return True if restarts with the package's version were tested."""
    short = ".".join(version_of(package).split(".")[:2])
    return any(name == package and short in versions for name, versions, _ in ADAPTERS.values())


def tested(package: str) -> str:
    """Return the tested versions of a package as text."""
    found = (versions for name, versions, _ in ADAPTERS.values() if name == package)
    return ", ".join(next(found, ()))
