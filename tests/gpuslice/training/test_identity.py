"""Which training a process is about to attach, however it was started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpuslice.config import Settings
from gpuslice.errors import RefusedSnapshotError
from gpuslice.training.identity import Claim, Training

from ..conftest import Workshop

#: Prints what tells a training from others.
SCRIPT = """
import sys
from gpuslice.training.identity import Training
from gpuslice.runtime.runtime import Runtime
training = Training.present(sys.argv, 1, "")
print(training.script, training.digest, *training.arguments)
"""

HERE = Training(
    script="train.py", digest="d", arguments=("--fold", "0"), attach=1, torch="2.9.0", command="c"
)
ALONE = Settings(job="k")
SCHEDULED = Settings(job="k", socket="ipc:///somewhere/socket")
ANYWAY = Settings(job="k", continue_anyway=True)


@pytest.mark.parametrize(
    ("changes", "alone", "scheduled", "anyway"),
    [
        ({}, Claim.OWN, Claim.OWN, Claim.OWN),
        ({"command": "other"}, Claim.OWN, Claim.OWN, Claim.OWN),
        ({"attach": 2}, Claim.OTHERS, Claim.OTHERS, Claim.OTHERS),
        # Another process of the same command.
        ({"arguments": ("--fold", "1")}, Claim.OTHERS, Claim.OTHERS, Claim.OWN),
        ({"script": "other.py"}, Claim.OTHERS, Claim.OTHERS, Claim.OWN),
        # Another command, or the same training with another text.
        ({"arguments": ("--fold", "1"), "command": "other"}, None, Claim.OTHERS, Claim.OWN),
        ({"arguments": ("--fold", "1"), "command": ""}, None, Claim.OTHERS, Claim.OWN),
        ({"script": "other.py", "command": "other"}, None, Claim.OTHERS, Claim.OWN),
        ({"digest": "edited"}, None, Claim.OTHERS, Claim.OWN),
        ({"torch": "2.10.0"}, None, Claim.OTHERS, Claim.OWN),
        ({"digest": "edited", "attach": 2}, None, Claim.OTHERS, Claim.OTHERS),
    ],
)
def test_whose_a_snapshot_is(
    changes: dict[str, object], alone: Claim | None, scheduled: Claim, anyway: Claim
) -> None:
    other = msgspec.structs.replace(HERE, **changes)
    assert HERE.claim(other, SCHEDULED) is scheduled
    assert HERE.claim(other, ANYWAY) is anyway
    if alone is not None:
        assert HERE.claim(other, ALONE) is alone
        return
    with pytest.raises(RefusedSnapshotError, match="job k has a snapshot") as refusal:
        HERE.claim(other, ALONE)
    for way in ("--fresh", "--job", "--continue-anyway"):
        assert way in refusal.value.remedy


def test_a_file_that_does_not_say_is_refused() -> None:
    with pytest.raises(RefusedSnapshotError, match="does not say which run wrote it"):
        HERE.claim(None, ALONE)
    assert HERE.claim(None, SCHEDULED) is Claim.OTHERS
    assert HERE.claim(None, ANYWAY) is Claim.OWN


def test_the_refusal_offers_a_name_made_of_what_differs() -> None:
    other = msgspec.structs.replace(HERE, arguments=("--fold", "1", "--lr", "3"), command="")
    here = msgspec.structs.replace(HERE, arguments=("--fold=0", "--lr", "3"))
    with pytest.raises(RefusedSnapshotError) as refusal:
        here.claim(other, ALONE)
    assert refusal.value.message == (
        "job k has a snapshot of another run: train.py --fold 1 --lr 3; this is: train.py --fold=0 --lr 3"
    )
    assert "--job 'k-{fold}'" in refusal.value.remedy


def test_all_but_the_command_tells_trainings_apart() -> None:
    for field, value in {
        "script": "x",
        "digest": "x",
        "arguments": ("x",),
        "attach": 2,
        "torch": "3",
    }.items():
        assert msgspec.structs.replace(HERE, **{field: value}).key != HERE.key, field
    assert msgspec.structs.replace(HERE, command="x").key == HERE.key


Identify = Callable[..., str]


@pytest.fixture
def identify(warm_workshop: Workshop) -> Identify:
    def run(*words: str) -> str:
        done = warm_workshop.python(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_scripts_and_modules_are_known_by_name_and_text(warm_workshop: Workshop, identify: Identify) -> None:
    script = str(warm_workshop.write("train.py", SCRIPT))
    warm_workshop.write("package/__init__.py", "")
    warm_workshop.write("package/train.py", SCRIPT)
    name, digest, *words = identify(script, "--fold", "0").split()
    assert (name, words) == ("train.py", ["--fold", "0"])
    assert identify("-m", "package.train", "x").split() == ["-m", "package.train", digest, "x"]
    changes = "import sys; sys.argv = sys.argv[:1]\n"
    warm_workshop.write("train.py", changes + SCRIPT)
    assert digest not in identify(script)


def test_code_and_standard_input_are_known_by_their_text(quick_workshop: Workshop) -> None:
    command = [sys.executable, "-c", SCRIPT, "--fold", "0"]
    first = quick_workshop.execute(command).stdout.split()
    command[2] += "#"
    second = quick_workshop.execute(command).stdout.split()
    assert (first[0], first[2:]) == (second[0], second[2:]) == ("-c", ["--fold", "0"])
    assert first[1] != second[1]
    read = [
        quick_workshop.execute([sys.executable, "-"], text).stdout.split()
        for text in (SCRIPT, "1\n" + SCRIPT)
    ]
    assert [words[:2] for words in read] == [["standard", "input"]] * 2
    assert read[0][2] != read[1][2]


def test_a_notebook_s_arguments_are_its_kernel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "get_ipython", lambda: None, raising=False)
    assert Training.present(["kernel", "-f", "kernel-1.json"], 1, "").arguments == ()


def test_it_comes_back_from_a_text() -> None:
    assert msgspec.json.decode(HERE.text(), type=Training) == HERE
    assert json.loads(HERE.text())["script"] == "train.py"


def test_arguments_that_are_no_text_are_kept_apart(tmp_path: Path) -> None:
    first, second = (Training.present(["x", word], 1, "") for word in ("a\udcff", "a\udcfe"))
    assert first.arguments != second.arguments
    assert first.text().isascii()
