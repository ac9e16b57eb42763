"""Settings: precedence, unknown keys, impossible values, sizes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from gpuslice import config
from gpuslice.errors import ConfigError


def environ(tmp_path: Path, toml: str = "", **variables: str) -> dict[str, str]:
    path = tmp_path / "config.toml"
    path.write_text(toml, encoding="utf-8")
    return {"GPUSLICE_CONFIG": str(path)} | variables


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    toml = 'device = "cpu:1"\nroute = "tensor"\ncpu_slots = 2\n'
    env = environ(tmp_path, toml, GPUSLICE_ROUTE="vmm", GPUSLICE_CPU_SLOTS="3")
    settings = config.load(env, cpu_slots=4)
    assert (settings.device, settings.route, settings.cpu_slots, settings.job) == ("cpu:1", "vmm", 4, "")


def test_flags_that_were_not_given_change_nothing(tmp_path: Path) -> None:
    assert config.load(environ(tmp_path), device=None, route=None) == config.Settings()


@pytest.mark.parametrize(
    ("toml", "variables", "named"),
    [
        ("devise = 'cpu'", {}, "devise"),
        ("device = [1]", {}, "device"),
        ("device = ", {}, "config.toml"),
        ("", {"GPUSLICE_ROUTE": "fast"}, "route"),
        ("", {"GPUSLICE_SUSPEND_EVERY": "often"}, "suspend_every"),
        ("", {"GPUSLICE_SUSPEND_EVERY": "-1"}, "suspend_every"),
        ("", {"GPUSLICE_SUSPEND_AT": "3,x"}, "3,x"),
        ("", {"GPUSLICE_SUSPEND_AT": "0"}, "boundary 0"),
        ("", {"GPUSLICE_RAMDISK_LIMIT": "4 potatoes"}, "4 potatoes"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, toml: str, variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(environ(tmp_path, toml, **variables))
    assert named in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        config.load({"GPUSLICE_CONFIG": str(tmp_path / "absent.toml")})


def test_settings_travel_through_the_environment(tmp_path: Path) -> None:
    settings = config.Settings(device="cpu:1", suspend_at="3,17", cpu_slots=2, ramdisk_limit="4G")
    handed_down = settings.environ()
    assert config.load(environ(tmp_path) | handed_down) == settings


def test_settings_handed_down_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("suspend_every = 3", encoding="utf-8")
    handed_down = config.Settings(suspend_every=0).environ()
    assert config.load({"GPUSLICE_CONFIG": str(file)} | handed_down).suspend_every == 0


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1000", 1000),
        ("4G", 4 * 10**9),
        ("1.5k", 1500),
        ("512MiB", 512 * 2**20),
        ("2Gi", 2**31),
        ("7b", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert config.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "4Q", "4 G B", "9" * 400, "²", "2000000T"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError):
        config.parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**60, "1048576.00 TiB"),
    ],
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert config.format_size(nbytes) == text


def test_the_state_directory_is_the_option_the_variable_or_xdgs() -> None:
    env = {"HOME": "/h"}
    assert config.state_directory(environ=env) == Path("/h/.local/state/gpuslice")
    env["XDG_STATE_HOME"] = "/x"
    assert config.state_directory(environ=env) == Path("/x/gpuslice")
    env["GPUSLICE_STATE_DIR"] = "/v"
    assert config.state_directory(environ=env) == Path("/v")
    assert config.state_directory("/o", env) == Path("/o")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2.0), ("500ms", 0.5), ("1.5m", 90.0), ("2h", 7200.0), ("7d", 604800.0), ("3", 3.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert config.parse_duration(text) == seconds


def test_a_time_may_be_zero_where_that_means_something() -> None:
    assert config.parse_duration("0s", may_be_zero=True) == 0.0
    with pytest.raises(ConfigError, match="is not a time"):
        config.parse_duration("soon", may_be_zero=True)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0", "1 day", "²s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time"):
        config.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "then"),
    [("20:00", (2026, 3, 28, 20, 0)), ("9:30", (2026, 3, 29, 9, 30)), ("12:00", (2026, 3, 29, 12, 0))],
)
def test_a_local_time_is_the_next_such_moment(text: str, then: tuple[int, int, int, int, int]) -> None:
    noon = datetime(2026, 3, 28, 12, 0).timestamp()
    assert config.parse_moment(text, noon) == datetime(*then).timestamp()
    assert config.parse_moment("90m", noon) == noon + 5400.0


@pytest.mark.parametrize("text", ["24:00", "9:60", "noon", "9:5", "-2h"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(ConfigError, match="is no moment"):
        config.parse_moment(text, 0.0)


@pytest.mark.parametrize("text", ["1" + "0" * 320, "300000h"])
def test_what_is_too_long_a_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="is too long a time"):
        config.parse_duration(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPUSLICE_CPU_SLOTS", "-1"),
        ("GPUSLICE_CHECKPOINT_EVERY", "9" * 30),
        ("GPUSLICE_SUSPEND_AT", "9" * 5000),
        ("GPUSLICE_SUSPEND_AT", "9" * 20),
        ("GPUSLICE_SUSPEND_AT", "²"),
        ("GPUSLICE_REPORT", "caf\udce9"),
        ("GPUSLICE_RAMDISK_LIMIT", "9" * 400),
    ],
)
def test_what_no_setting_can_be(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        config.load({name: value, "HOME": "/nowhere"})
