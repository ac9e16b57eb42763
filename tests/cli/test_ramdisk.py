"""``gpuslice ramdisk``: the documented keys, exit codes, and one or two lines for a human."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.ramdisk.budget import Tenant
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.daemon import event_log
from gpuslice.errors import RefusedSnapshotError, UsageError

from ..gpuslice.conftest import servers
from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_S
from .conftest import Shell

__all__ = ["servers"]

STORE_KEYS = [
    "job",
    "rank",
    "tenant",
    "scheduler",
    "pid",
    "alive",
    "bytes",
    "generation",
    "boundary",
    "restartable",
    "snapshot",
    "directory",
    "spilled",
    "spilled_bytes",
    "place",
]


@pytest.fixture
def disk(tmp_path: Path) -> RamDisk:
    return RamDisk(tmp_path / "disk", 64 << 20)


@pytest.fixture
def store(disk: RamDisk) -> Iterator[JobStore]:
    """The living store of the job ``night``, with one snapshot taken at boundary 12."""
    store = disk.open_store("night")
    writer = store.begin(Layout((StorageSpec(40, "cpu", "w"),)))
    writer.view(0)[:] = bytes(range(40))
    spec = TensorSpec("model.w", 0, "float32", (5, 2), (2, 1))
    writer.publish(tree.encode({}), [spec], boundary=12, restartable=True)
    yield store
    store.close(keep=False)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gpuslice", "ramdisk", *map(str, arguments)]


#: Starts a command.
_start: list[Callable[..., subprocess.Popen[str]]] = []


@pytest.fixture(autouse=True)
def warm(servers: Servers) -> Iterator[None]:
    """Start commands in forks of a Python that has torch, which exports need."""
    _start.append(servers.start)
    yield
    _start.clear()


def gpuslice(*arguments: object, disk: RamDisk | None = None) -> subprocess.CompletedProcess[str]:
    where = [] if disk is None else ["--dir", disk.directory]
    environ = {**os.environ, "GPUSLICE_RAMDISK_LIMIT": "64MiB"}
    words, (start,) = command(*arguments, *where), _start
    with start(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_ls_lists_stores_and_the_total(disk: RamDisk, store: JobStore) -> None:
    done = gpuslice("ls", "--json", disk=disk)
    listing = json.loads(done.stdout)
    assert list(listing) == [
        "directory",
        "limit_bytes",
        "used_bytes",
        "free_bytes",
        "spill_directory",
        "spilled_bytes",
        "spill_limit_bytes",
        "spill_free_bytes",
        "tenants",
        "stores",
    ]
    assert (listing["limit_bytes"], listing["used_bytes"]) == (64 << 20, disk.used_bytes)
    (entry,) = listing["stores"]
    assert list(entry) == STORE_KEYS
    assert entry["job"] == "night"
    assert entry["pid"] == os.getpid()
    assert (entry["alive"], entry["generation"], entry["boundary"]) == (True, 1, 12)
    plain = gpuslice("ls", disk=disk)
    head, row, total = plain.stdout.splitlines()
    assert head.split()[:6] == ["job", "rank", "tenant", "scheduler", "pid", "state"]
    assert row.split()[:6] == ["night", "0", "-", "-", str(os.getpid()), "alive"]
    assert total.endswith("of 64.00 MiB used")
    assert (plain.returncode, plain.stderr) == (0, "")


def test_an_empty_ram_disk_has_a_total_only(disk: RamDisk) -> None:
    assert gpuslice("ls", disk=disk).stdout == f"{disk.directory}: 0 B of 64.00 MiB used\n"


def test_gc_removes_the_dead_and_says_how_much(disk: RamDisk, store: JobStore) -> None:
    store.close(keep=True)
    with disk.open_store("living"):
        assert json.loads(gpuslice("gc", "--json", disk=disk).stdout) == {"removed": [], "freed_bytes": 0}
        used = disk.used_bytes
        done = json.loads(gpuslice("gc", "--all", "--json", disk=disk).stdout)
        assert done["freed_bytes"] == used - disk.used_bytes > 0
        assert [list(entry) for entry in done["removed"]] == [STORE_KEYS]
        assert [info.job for info in disk.listing()] == ["living"]
    assert gpuslice("gc", disk=disk).stdout == f"{disk.directory}: 0 stores removed, 0 B freed\n"


def test_gc_counts_one_store_as_one(disk: RamDisk, store: JobStore) -> None:
    store.close(keep=True)
    assert gpuslice("gc", "--all", disk=disk).stdout.startswith(f"{disk.directory}: 1 store removed, ")


def test_ls_shows_what_tenants_use_of_their_limits(disk: RamDisk) -> None:
    ours = RamDisk(disk.directory, 64 << 20, tenant=Tenant("vision", 8 << 20))
    theirs = RamDisk(disk.directory, 64 << 20, tenant=Tenant("audio"))
    with ours.open_store("a"), ours.open_store("b"), theirs.open_store("c"):
        answer = json.loads(gpuslice("ls", "--json", disk=disk).stdout)
        assert [(store["job"], store["tenant"]) for store in answer["stores"]] == [
            ("a", "vision"),
            ("b", "vision"),
            ("c", "audio"),
        ]
        by_job = {store["job"]: store["bytes"] for store in answer["stores"]}
        assert answer["tenants"] == [
            {"tenant": "audio", "used_bytes": by_job["c"], "limit_bytes": None},
            {"tenant": "vision", "used_bytes": by_job["a"] + by_job["b"], "limit_bytes": 8 << 20},
        ]
        shown = gpuslice("ls", disk=disk).stdout
    assert re.search(r"^a +0 +vision ", shown, re.MULTILINE)
    assert re.search(r"^tenant audio: [\d.]+ KiB used$", shown, re.MULTILINE)
    assert re.search(r"^tenant vision: [\d.]+ KiB of 8\.00 MiB used$", shown, re.MULTILINE)


def saved(disk: RamDisk) -> Path:
    """The file of the only snapshot."""
    (info,) = disk.listing()
    assert info.snapshot is not None
    return Path(info.snapshot)


def test_spill_and_ls_say_what_is_where(disk: RamDisk, store: JobStore, tmp_path: Path) -> None:
    store.close(keep=True)
    place = tmp_path / "spill"
    done = gpuslice("spill", "--spill-dir", place, disk=disk)
    assert done.stdout == f"{disk.directory}: 1 snapshot spilled\n"
    listed = gpuslice("ls", "--spill-dir", place, disk=disk).stdout
    assert re.search(r"night +0 +- +- +- +dead +[\d.]+ MiB +spilled ", listed)
    assert re.search(rf"{place}: [\d.]+ MiB spilled, [\d.]+ [KMGT]iB free\n", listed)
    answer = json.loads(gpuslice("ls", "--json", "--spill-dir", place, disk=disk).stdout)
    assert (answer["spill_directory"], len(answer["stores"])) == (str(place), 1)
    assert answer["spilled_bytes"] == answer["stores"][0]["bytes"] > 0
    listed = gpuslice("ls", "--spill-dir", place, "--spill-limit", "1GiB", disk=disk).stdout
    assert re.search(rf"{place}: [\d.]+ MiB of 1.00 GiB spilled", listed)
    assert gpuslice("spill", disk=disk).returncode == 2


def test_a_spill_directory_takes_no_more_than_its_limit(
    disk: RamDisk, store: JobStore, tmp_path: Path
) -> None:
    store.close(keep=True)
    place = tmp_path / "spill"
    done = gpuslice("spill", "--spill-dir", place, "--spill-limit", "4KiB", disk=disk)
    assert done.returncode == 5
    assert "is full" in done.stderr
    assert "raise --spill-limit" in done.stderr
    assert gpuslice("spill", "--spill-dir", place, "--spill-limit", "lots", disk=disk).returncode == 2


def test_verify_tells_whole_from_damaged(disk: RamDisk, store: JobStore) -> None:
    path = saved(disk)
    whole = gpuslice("verify", path)
    assert whole.returncode == 0
    assert whole.stdout == f"{path}: whole; generation 1, boundary 12, 1 tensor, 40 B\n"
    assert json.loads(gpuslice("verify", path, "--json").stdout) == {
        "path": str(path),
        "whole": True,
        "job": "night",
        "rank": 0,
        "generation": 1,
        "boundary": 12,
        "restartable": True,
        "bytes": 40,
        "storages": 1,
        "tensors": 1,
    }
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff")
    damaged = gpuslice("verify", path)
    assert (damaged.returncode, damaged.stdout) == (4, "")
    assert "storage 0 (w) is damaged" in damaged.stderr
    assert len(damaged.stderr.splitlines()) == 2
    answer = gpuslice("verify", path, "--json")
    assert answer.returncode == 4
    assert list(json.loads(answer.stdout)) == ["path", "whole", "error", "remedy"]


@pytest.mark.slow
def test_export_writes_safetensors(disk: RamDisk, store: JobStore, tmp_path: Path) -> None:
    path, out = saved(disk), tmp_path / "out.safetensors"
    done = gpuslice("export", path, out, "--json")
    assert json.loads(done.stdout) == {"path": str(out), "tensors": 1, "bytes": out.stat().st_size}
    assert load_file(out)["model.w"].shape == (5, 2)
    done = gpuslice("export", path, tmp_path / "out.dcp", "--format", "dcp")
    assert done.stdout.startswith(f"{tmp_path / 'out.dcp'}: 1 tensor, ")
    assert {entry.name for entry in (tmp_path / "out.dcp").iterdir()} == {".metadata", "__0_0.distcp"}
    assert gpuslice("export", path, tmp_path / "out.dcp", "--format", "dcp").returncode == 2
    assert gpuslice("export", tmp_path / "nothing", out).returncode == 4
    assert gpuslice("export", path, tmp_path / "no" / "where").returncode == 3


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("dcp", marks=pytest.mark.slow)])
def test_an_export_that_cannot_be_written_leaves_nothing(disk: RamDisk, tmp_path: Path, kind: str) -> None:
    with disk.open_store("night") as store:
        with store.begin(Layout((StorageSpec(1 << 20, "cpu", "w"),))) as writer:
            specs = [TensorSpec("w", 0, "uint8", (1 << 20,), (1,))]
            writer.publish(tree.encode({}), specs, boundary=1, restartable=True)
        export = command("export", saved(disk), tmp_path / "out", "--format", kind)
        small = f"ulimit -f 64; exec {shlex.join(export)}"
        done = subprocess.run(
            ["bash", "-c", small], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"gpuslice: cannot write {tmp_path / 'out'}: File too large",
        "gpuslice: choose another place with enough room",
    ]
    assert os.listdir(tmp_path) == ["disk"]


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_an_export_to_a_directory_is_refused_by_its_name(
    disk: RamDisk, store: JobStore, tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuslice.cli.ramdisk import export

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"{re.escape(out)} is a directory"):
        export(str(saved(disk)), Path(out))
    assert os.listdir(tmp_path) == ["disk"]


def test_a_job_stands_for_its_newest_snapshot(
    disk: RamDisk, store: JobStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuslice.cli.ramdisk import export, verify

    where, whole = str(disk.directory), "whole; generation 1, boundary 12, 1 tensor, 40 B"
    for name in ("night", "night.r0"):
        verify(name, where)
        assert capsys.readouterr().out == f"{saved(disk)}: {whole}\n"
    with disk.open_store("night", 1):
        with pytest.raises(UsageError, match=r"night\.r1 has no snapshot in "):
            verify("night.r1", where)
        with pytest.raises(UsageError, match="night has several snapshots") as several:
            verify("night", where)
    assert several.value.remedy == "name one of night.r0, night.r1"
    store.close(keep=True)
    place = str(tmp_path / "spill")
    RamDisk(disk.directory, disk.limit_bytes, spill_directory=tmp_path / "spill").spill()
    export("night", tmp_path / "out", directory=where, spill_dir=place)
    assert list(load_file(tmp_path / "out")) == ["model.w"]
    with pytest.raises(RefusedSnapshotError, match="there is no snapshot day"):
        verify("day", where)


def test_a_file_comes_before_a_job_of_its_name(
    disk: RamDisk,
    store: JobStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from gpuslice.cli.ramdisk import verify

    monkeypatch.chdir(tmp_path)
    shutil.copy(saved(disk), "night")
    verify("night", str(disk.directory))
    assert capsys.readouterr().out.startswith("night: whole; ")


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = gpuslice("ls", "--dir", tmp_path / "typo")
    assert (done.returncode, (tmp_path / "typo").exists()) == (2, False)
    assert "does not exist" in done.stderr
    done = gpuslice("ls", "--dir", tmp_path / "file")
    assert done.returncode == 3
    assert "is not a directory" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_no_torch_is_loaded() -> None:
    modules = "gpuslice.cli.ramdisk, gpuslice.checkpoint.format.export_safetensors"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode == 0


def test_a_terminal_gets_a_table(
    disk: RamDisk, store: JobStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuslice.cli.ramdisk import ls

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    ls(str(disk.directory))
    shown = capsys.readouterr().out
    assert "night" in shown
    assert "━" in shown or "─" in shown


def test_a_scheduler_removes_what_dead_processes_left_in_the_ramdisk(
    shell: Shell, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", str(shm / "ram"))
    imports = (
        "import os; from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk; from gpuslice.config import load"
    )
    leave = f"{imports}; store = RamDisk.from_settings(load()).open_store(None); os._exit(0)"
    subprocess.run([sys.executable, "-c", leave], check=True)
    assert "dead" in shell("ramdisk", "ls")
    shell("up", "--devices", "cpu:1")
    assert "dead" not in shell("ramdisk", "ls")
    assert "removed from the RAM disk" in (shell.directory / event_log.FILE).read_text()
    shell("down")
