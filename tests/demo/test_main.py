"""The demonstration as a user runs it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from gpuslice.cli import main
from gpuslice.client.client import Client
from gpuslice.demo import main as demo
from gpuslice.demo.report import JobResult, Result, Totals, headline
from gpuslice.demo.training import SCRIPTS, TRAININGS
from gpuslice.launch import command

from ..patience import PATIENCE_S

MARK = "DEMO_TEST_MARK"


class Running:
    """``gpuslice demo``, as Python's arguments say it, in a process with everything it starts marked."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = directory
        self.temporary = Path(tempfile.mkdtemp())  # a scheduler's socket needs a short path
        self.shm_before = on_ramdisk()
        environ = {**os.environ, MARK: self.mark, "HOME": str(directory), "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=directory,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def marked(self) -> list[psutil.Process]:
        """The processes it started that still live."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            ours = process.pid != self.process.pid and process.environ().get(MARK) == self.mark
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def read_until(self, *words: str) -> None:
        """Until it has written a line with all of ``words``."""
        assert self.process.stdout is not None
        written = ""
        for line in self.process.stdout:
            written += line
            if all(word in line for word in words):
                return
        raise AssertionError(f"it never wrote a line with {words}, only:\n{written}")

    def scheduler(self) -> Client:
        """The one of the jobs that share."""
        (directory,) = self.temporary.glob("gpuslice-*")
        return Client(directory)

    def wait(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output

    def left_over(self) -> list[object]:
        """Processes, RAM disk and temporary files that outlived it."""
        return [
            *map(_told, self.marked()),
            *(on_ramdisk() - self.shm_before),
            *self.temporary.glob("gpuslice*"),
        ]


def _told(process: psutil.Process) -> str:
    """The process as somebody who looks for it needs it described."""
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.Error as error:
        return str(error)


def on_ramdisk() -> set[Path]:
    return set(Path("/dev/shm").glob("gpuslice-demo-*"))


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    found = Running(tmp_path, *request.param)
    yield found
    found.process.kill()
    found.process.communicate()
    for process in found.marked():
        with suppress(psutil.NoSuchProcess):  # it has ended since
            process.kill()
    shutil.rmtree(found.temporary)


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """The demonstration in this process takes the signal over."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


DEMO = ("-m", "gpuslice", "demo")
SHORT = ("--steps", "16", "--quantum", "0.1")
UNENDING = ("--steps", "1000000", "--quantum", "0.1")
#: The demonstration from where the jobs begin to share: it compares with nothing.
AFTER_UNDISTURBED = (
    "-c",
    "import gpuslice.demo.main as demo, gpuslice.cli as cli, sys\n"
    "demo.run_undisturbed = lambda trainings, *_: {one.name: '' for one in trainings}\n"
    "cli.main(['demo', *sys.argv[1:]])",
)


@pytest.mark.slow
@pytest.mark.parametrize("running", [(*DEMO, *SHORT, "--json", "r.json")], indirect=True)
def test_the_shared_models_equal_the_undisturbed_ones(running: Running) -> None:
    running.read_until("wine", "begins")
    with running.scheduler() as client:  # the others may have ended by then: nobody else makes it wait
        client.suspend("wine")
        running.read_until("wine", "suspended in")
        client.resume("wine")
    code, output = running.wait()
    assert code == 0, output
    assert "3 of 3 finished models are bit-identical" in output
    result = json.loads((running.directory / "r.json").read_text())
    assert result["ok"]
    assert [job["equal"] for job in result["jobs"]] == [True] * 3
    assert len({job["digest"] for job in result["jobs"]}) == 3
    assert sum(job["suspends"] for job in result["jobs"]) > 0, "nothing was put to the test"
    assert result["totals"]["switches"] == len(result["switches"]) > 0
    report = running.directory / "demo-report"
    trace = json.loads((report / "trace.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert tracks == {"cpu:0", "chars", "digits", "wine"}
    assert {event["cat"] for event in trace if event["ph"] == "X"} >= {"slice", "suspend", "resume"}
    assert "<svg" in (report / "index.html").read_text()
    picture = ElementTree.parse(report / "timeline.svg").getroot()
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    # Of a slice or a switch "chars #2: ...", of memory "chars: ...".
    assert {title.split(" ")[0].rstrip(":") for title in titles} == {"chars", "digits", "wine"}
    assert str(report / "index.html") in output
    assert running.left_over() == []


@pytest.mark.parametrize("running", [DEMO], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_it_early_leaves_nothing_behind(running: Running, number: signal.Signals) -> None:
    running.read_until("on its own")
    ends_s = time.monotonic() + PATIENCE_S
    while len(running.marked()) < 3:
        assert running.process.poll() is None
        assert time.monotonic() < ends_s
    running.process.send_signal(number)
    code, output = running.wait()
    assert code == 128 + number, output
    assert "Traceback" not in output
    assert running.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("running", [(*AFTER_UNDISTURBED, *UNENDING)], indirect=True)
def test_ctrl_c_while_jobs_share_leaves_nothing_behind(running: Running) -> None:
    running.read_until("suspended in")
    running.process.send_signal(signal.SIGINT)
    code, output = running.wait()
    assert code == 130, output
    assert running.left_over() == []


def test_what_scripts_wrote_in_a_former_demonstration_is_not_taken_for_their_output(tmp_path: Path) -> None:
    for training in TRAININGS:
        for run in ("undisturbed", "shared"):
            output = tmp_path / "logs" / run / f"{training.name}.out"
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(f"digest {'0' * 64}\n", encoding="utf-8")
    (tmp_path / "logs" / "mine").mkdir()
    others = {tmp_path / "logs" / "shared" / "notes.txt", tmp_path / "logs" / "mine" / "wine.out"}
    for path in others:
        path.touch()
    demo._make_logs(tmp_path, TRAININGS)
    assert {path for path in (tmp_path / "logs").rglob("*") if path.is_file()} == others


def job(name: str, **changes: object) -> JobResult:
    values: dict[str, object] = {
        "name": name,
        "about": "",
        "steps": 1,
        "exit_code": 0,
        "digest": "d" * 64,
        "undisturbed_digest": "d" * 64,
        "equal": True,
        "last_loss": None,
        "slices": 1,
        "suspends": 0,
        "suspend_mean_s": 0.0,
        "resume_mean_s": 0.0,
    }
    return JobResult(**{**values, **changes})  # type: ignore[arg-type]


def test_a_model_that_differs_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    totals = Totals(
        wall_s=1.0, busy_s=1.0, switches=0, blackout_mean_s=0.0, blackout_max_s=0.0, share_lost=0.0
    )
    found = Result(
        ok=False,
        device="cpu:0",
        quantum_s=1.0,
        jobs=(job("same"), job("other", digest="e" * 64, equal=False)),
        switches=(),
        totals=totals,
        page=str(tmp_path / "index.html"),
        picture=str(tmp_path / "timeline.svg"),
        trace=str(tmp_path / "trace.json"),
    )
    monkeypatch.setattr(demo, "run", lambda *_: found)
    with pytest.raises(SystemExit) as ended:
        main(["demo"])
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert "not as undisturbed: other" in captured.err
    assert headline(found) == "2 jobs shared cpu:0 at 1.00 of its speed; 1 of 2 results differs"
    assert "NO" in captured.out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--device", "tpu:0"], "tpu:0"),
        (["--quantum", "0"], "quantum"),
        (["--steps", "0"], "0 is not a number of steps"),
        (["--json", "no/such/directory/r.json"], "no/such"),
        (["--json", "/proc/r.json"], "/proc/r.json cannot be written"),
        (["--report-dir", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    options: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *options])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_a_device_that_is_not_here_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_has_nvidia_driver", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--device", "cuda:0", "--report-dir", str(tmp_path)])
    assert ended.value.code == 3
    assert "cuda:0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_directory_too_deep_for_a_socket_is_exit_code_3_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(SystemExit, match="3"):
        main(["demo", "--report-dir", str(tmp_path / "report")])
    captured = capsys.readouterr()
    assert "is too long for a socket" in captured.err
    assert captured.out == ""
    assert not list(deep.iterdir())


@pytest.mark.parametrize("name", [training.name for training in TRAININGS])
def test_the_scripts_know_nothing_of_gpuslice(name: str) -> None:
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    imported = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert "torch" in imported
    assert not [module for module in imported if module.startswith("gpuslice")]
