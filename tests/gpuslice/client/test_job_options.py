"""A request is spelled once: options, keywords, a ``job.toml`` and the message are made of its fields."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice import Client, verbs
from gpuslice.cli import application, fast_parser, submit
from gpuslice.cli.declare import parameters, with_options
from gpuslice.client.job_options import from_command_line, from_file, job_options
from gpuslice.errors import UsageError
from gpuslice.job_request import ArrayRequest, JobRequest, Option
from gpuslice.types import Count, Seconds

from ...ranges import _BY_NAME

PAGE = Path(__file__).resolve().parents[3] / "docs" / "submit.md"
#: Fields that only programs set.
KEYWORDS_ONLY = {"environ", "directory"}
SECONDS = st.integers(1, 10**6).map(float)
BYTES = st.integers(1, 10**15)
TEXT = st.text("abz 0_.é-", min_size=1, max_size=9).filter(
    lambda text: text[0].isalpha() and text == text.strip()
)
COUNTS = st.integers(0, 10**6)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields of a request."""
    least, most = sorted(draw(st.tuples(st.integers(1, 99), st.integers(1, 99))))
    least_bytes, most_bytes = sorted(draw(st.tuples(BYTES, BYTES)))
    sometimes: dict[str, st.SearchStrategy[Any]] = {
        "name": st.from_regex(r"\A[a-z][a-z0-9_.-]{0,9}\Z"),
        "tenant": TEXT,
        "app": TEXT,
        "weight": st.integers(1, 10**6).map(lambda n: n / 1000),
        "priority": st.integers(0, 9),
        "steps": COUNTS,
        "max_steps": COUNTS,
        "expected_s": SECONDS,
        "deadline_s": SECONDS,
        "time_limit_s": SECONDS,
        "guaranteed": st.just(True),
        "trial": st.just(True),
        "trial_batches": COUNTS,
        "hold": st.just(True),
        "after": st.lists(st.sampled_from(["a", "b:ok", "c-1:any", "d:failed"]), min_size=1).map(tuple),
        "max_restarts": COUNTS,
        "boundary_timeout_s": SECONDS | st.just(0.0),
        "on_boundary_timeout": st.sampled_from(["leave", "kill"]),
        "grace_s": SECONDS,
        "wait_for_node_s": SECONDS,
        "checkpoint_every": COUNTS,
        "route": st.sampled_from(["auto", "tensor", "vmm", "driver"]),
        "array": st.sampled_from(["0-9", "3-3", "0-99%8"]),
        "grid": st.dictionaries(st.sampled_from(["lr", "b"]), TEXT, min_size=1),
        "at_once": COUNTS,
        "env": st.dictionaries(st.sampled_from(["LR", "B"]), TEXT, min_size=1),
    }
    fields = {name: draw(values) for name, values in sometimes.items() if draw(st.booleans())}
    devices = draw(st.sampled_from([{}, {"devices": least}, {"devices": least, "most_devices": most}]))
    memory = draw(
        st.sampled_from(
            [
                {},
                {"device_memory_bytes": least_bytes},
                {"device_memory_bytes": least_bytes, "most_device_memory_bytes": most_bytes},
            ]
        )
    )
    return {**fields, **devices, **memory}


def written(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as people write them: texts, True, or a table of texts, by key."""
    found: dict[str, Any] = {}
    for key, option in job_options(ArrayRequest).items():
        name, most = option.field.name, option.option.most
        if name in fields:
            value = fields[name]
            if not option.is_switch and not option.is_table and not option.is_list:
                value = "never" if name == "boundary_timeout_s" and not value else str(value)
            found[key] = f"{value}:{fields[most]}" if most in fields else value
    return found


def words_of(values: dict[str, Any]) -> list[str]:
    """A command line of ``values``."""
    words = []
    for key, value in values.items():
        flag = job_options(ArrayRequest)[key].flag
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple):
            words += [f"{flag}={text}" for text in value]
        elif isinstance(value, dict):
            words += [f"{flag}={name}={text}" for name, text in value.items()]
        else:
            words += [f"{flag}={value}"]
    return words


def toml_of(values: dict[str, Any], typed: bool) -> str:
    """A file of ``values``: with numbers as numbers, or as texts where these are allowed."""
    lines, tables = [], []
    for key, value in values.items():
        option = job_options(ArrayRequest)[key]
        if isinstance(value, dict):
            tables += [f"[{key}]", *(f'{name} = "{text}"' for name, text in value.items())]
        elif isinstance(value, tuple):
            lines.append(f"{key} = {list(value)!r}")
        elif value is True:
            lines.append(f"{key} = true")
        elif str not in option.kind.types or (typed and value.replace(".", "", 1).isdigit()):
            lines.append(f'{key} = "{value}"' if ":" in value else f"{key} = {value}")
        else:
            lines.append(f'{key} = "{value}"')
    return "\n".join([*lines, *tables])


@settings(max_examples=20, deadline=None)
@given(fields=requests(), typed=st.booleans())
def test_a_request_is_the_same_by_flags_by_a_file_by_keywords_and_on_the_wire(
    fields: dict[str, Any], typed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    request = ArrayRequest(**fields)
    taken = fast_parser.read(parameters(submit.command), words_of(written(fields)))
    assert taken is not None
    assert ArrayRequest(**from_command_line(taken, ArrayRequest)) == request
    path = tmp_path_factory.getbasetemp() / "job.toml"
    path.write_text(toml_of(written(fields), typed), encoding="utf-8")
    assert ArrayRequest(**from_file(path, ArrayRequest)[1]) == request
    message = verbs.SubmitArray(stem="x", argv=(), directory="/", environ={}, **fields)
    (sent,) = [verbs.decode_request(verbs.encode(message))]
    assert isinstance(sent, verbs.SubmitArray)
    assert {name: getattr(sent, name) for name in fields} == fields


def test_a_moment_is_a_local_time_or_so_long_from_now(tmp_path: Path) -> None:
    before = time.time()
    (begins,) = from_command_line({"begin": "2h"}).values()
    assert before + 7200.0 <= begins <= time.time() + 7200.0
    path = tmp_path / "job.toml"
    path.write_text('begin = "20:05"\n')
    (begins,) = from_file(path)[1].values()
    assert time.strftime("%H:%M:%S", time.localtime(begins)) == "20:05:00"
    path.write_text('begin = "25:00"\n')
    with pytest.raises(UsageError, match="line 1: begin: '25:00' is no moment"):
        from_file(path)
    with pytest.raises(UsageError, match="--after: 'a:never' has to be a job's id, alone or with :ok"):
        from_command_line({"after": ["b", "a:never"]})
    with pytest.raises(UsageError, match="--hold, --begin and --after, or --guaranteed"):
        JobRequest(guaranteed=True, deadline_s=5.0, steps=5, after=("a",)).check()


def test_every_field_can_be_set_in_every_way_but_two_that_only_programs_set() -> None:
    by_option = {option.field.name for option in job_options(ArrayRequest).values()}
    by_option |= {option.option.most for option in job_options(ArrayRequest).values() if option.option.most}
    names = set(ArrayRequest.__struct_fields__)
    assert by_option == names - KEYWORDS_ONLY
    assert {*inspect.signature(Client.submit_array).parameters} == names | {"self", "words"}
    own = set(JobRequest.__struct_fields__)
    assert {*inspect.signature(Client.submit).parameters} == own | {"self", "words"}
    assert set(job_options(ArrayRequest)) | {"words", "file", "as_json", "state_dir"} == set(
        parameters(submit.command)
    )
    documented = f"{inspect.getdoc(JobRequest)}{inspect.getdoc(ArrayRequest)}"
    assert [name for name in names if name not in documented] == []
    assert names <= set(_BY_NAME)


def test_the_help_has_the_options_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert application.run({"submit": "gpuslice.cli.submit"}, ["submit", "--help"]) == 0
    shown = capsys.readouterr().out
    for one in job_options(ArrayRequest).values():
        group = shown.partition(f"\n{one.option.group}:\n")[2].partition("\n\n")[0]
        assert f"\n  {one.flag} " in f"\n{group}", one.flag


class WithOneMore(JobRequest, frozen=True, kw_only=True):
    """A request with a new option: the line that a new option is."""

    at_most_s: Annotated[Seconds, Option("Steps and times", "2h", "End it then.")] = 60.0
    stop_when_flat: Annotated[Count, Option("Steps and times", "N", "Stop without progress.")] = 0


def test_a_new_option_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = submit.declared(WithOneMore)
    asked: list[dict[str, Any]] = []

    @with_options(options)
    def command(**given: Any) -> None:
        asked.append(from_command_line(given, WithOneMore))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(application._typed(command))
    app(["--at-most", "2m", "--stop-when-flat=3"], standalone_mode=False)
    assert asked == [{"at_most_s": 120.0, "stop_when_flat": 3}]
    app(["--help"], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "--at-most 2h End it then. Default: 60s." in shown
    path = tmp_path / "job.toml"
    path.write_text('at_most = "2m"\n')
    assert from_file(path, WithOneMore) == ([], {"at_most_s": 120.0})
    path.write_text("\nstop_when_flat = -1\n")
    with pytest.raises(UsageError, match="line 2: stop_when_flat has to be a whole number >= 0"):
        from_file(path, WithOneMore)
    message = msgspec.msgpack.encode(WithOneMore(at_most_s=-1.0))
    with pytest.raises(msgspec.ValidationError, match="at_most_s"):
        msgspec.msgpack.decode(message, type=WithOneMore)


@pytest.mark.parametrize(
    ("line", "why", "remedy"),
    [
        ("max_restart = 1", "line 2: max_restart is not a key of a job", "did you mean 'max_restarts'?"),
        ("deadline_s = 5", "line 2: deadline_s is not a key of a job", "did you mean 'deadline'?"),
        ("memory_bytes = 5", "line 2: memory_bytes is not a key", "did you mean 'memory'?"),
        ('steps = "5"', "line 2: steps has to be a whole number, not '5'", "--help"),
        ("steps = 5.5", "line 2: steps has to be a whole number, not 5.5", "--help"),
        ("steps = true", "line 2: steps has to be a whole number, not True", "--help"),
        ("devices = 0", "line 2: devices has to be a whole number >= 1", "--help"),
        ('devices = "2:x"', "line 2: devices has to be a whole number, not 'x'", "--help"),
        ("weight = nan", "line 2: weight has to be a number", "--help"),
        ('trial = "yes"', "line 2: trial has to be true or false, not 'yes'", "--help"),
        ('deadline = "soon"', "line 2: deadline: 'soon' is not a time", "2s"),
        ('memory = "3 apples"', "line 2: memory: '3 apples' is not a size", "4G"),
        ("tenant = 5", "line 2: tenant has to be a text, not 5", "--help"),
        ('route = "teleport"', "line 2: route has to be one of auto, tensor, vmm, driver", "--help"),
        ('command = "train.py"', "line 2: command has to be a list of words", "command = ["),
        ("[env]\nLR = 0.1", 'line 2: env.LR has to be a text in "quotes", not 0.1', "--help"),
        ("devices =", "cannot read .*line 2", "example"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(
    line: str, why: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"# a job\n{line}\n")
    with pytest.raises(UsageError, match=why) as error:
        from_file(path)
    assert remedy in error.value.remedy


@pytest.mark.parametrize("text", ["", "x", "1:", ":2", "1:2:3", "-1", "0", "1.5", "²", "9" * 12])
def test_what_is_no_number_of_devices_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--devices has to be"):
        from_command_line({"devices": text})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"steps": "two"}, "--steps has to be a whole number, not 'two'"),
        ({"memory": "3G:"}, "--memory: '' is not a size"),
        ({"on_boundary_timeout": "sleep"}, "--on-boundary-timeout has to be one of leave, kill, not 'sleep'"),
        ({"env": ["A"]}, "--env A is not KEY=VALUE"),
        ({"env": ["=b"]}, "--env =b is not KEY=VALUE"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        from_command_line(given)


def test_an_option_takes_the_place_of_both_numbers_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('devices = "1:4"\nmemory = "3G:6G"\n')
    fields = from_file(path)[1] | from_command_line({"devices": "2", "memory": "4G"})
    assert JobRequest(**fields) == JobRequest(devices=2, device_memory_bytes=4 * 10**9)


def test_the_table_of_the_page_has_every_key() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## A job in a file")[2].partition("\n## ")[0]
    keys = {
        key
        for row in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    assert keys == {"command", *job_options(ArrayRequest)}


def test_not_to_wait_for_a_node_is_a_time() -> None:
    option = job_options()["wait_for_node"]
    assert option.from_words("0s") == option.from_toml(0, "x.toml:1") == {"wait_for_node_s": 0.0}
