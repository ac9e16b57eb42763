"""Errors: abstract bases stay abstract, exit codes are the documented ones, messages carry the remedy."""

from __future__ import annotations

import pytest

from gpuslice import errors

CONCRETE = {
    errors.UsageError: 2,
    errors.ConfigError: 2,
    errors.SuspendedStateError: 2,
    errors.EnvironmentUnusableError: 3,
    errors.AddressSpaceError: 3,
    errors.SuspendRefusedError: 3,
    errors.DeviceMemoryError: 3,
    errors.RollbackError: 3,
    errors.LocalProtocolError: 3,
    errors.RemoteProtocolError: 3,
    errors.CorruptSnapshotError: 4,
    errors.RefusedSnapshotError: 4,
    errors.RamDiskFullError: 5,
}


@pytest.mark.parametrize("base", [errors.GpusliceError, errors.SnapshotError, errors.ProtocolError])
def test_bases_cannot_be_raised(base: type[errors.GpusliceError]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base("anything")


@pytest.mark.parametrize(("kind", "code"), CONCRETE.items())
def test_exit_codes(kind: type[errors.GpusliceError], code: int) -> None:
    assert kind("what", "remedy").exit_code == code


def test_the_remedy_is_part_of_the_text() -> None:
    assert str(errors.UsageError("no file a.py", "give a script")) == "no file a.py (give a script)"
    assert str(errors.UsageError("no file a.py")) == "no file a.py"
