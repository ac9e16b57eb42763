"""What KEY=VALUE of ``gpuslice set`` change, and what is refused by name."""

from __future__ import annotations

import pytest

from gpuslice.daemon.scheduler_setup import Setup, options
from gpuslice.daemon.settings.present import Settings, after_all, fields_of
from gpuslice.daemon.settings.words import change_of
from gpuslice.errors import UsageError
from gpuslice.types import DeviceName

NULL = tuple(DeviceName("null", index) for index in range(2))


def of(policy: str = "rr", quantum_s: float | None = None, *, pack: bool = False) -> Settings:
    return Settings(Setup(NULL, policy, options(policy, [], quantum_s, pack=pack)))


def changed(settings: Settings, *words: str) -> tuple[str, dict[str, str]]:
    after = settings.after(change_of(words, settings)).setup
    return after.policy, dict(after.options)


def test_the_policy_has_its_own_options_and_the_quantum_that_was_stated() -> None:
    words = ("policy=2das", "quantum=30s", "2das.thresholds=6,18")
    policy, made = changed(of(), *words)
    assert (policy, made["thresholds"]) == ("2das", "6,18")
    assert "30.0" in made.values()
    assert changed(of(quantum_s=10.0), "policy=las") == ("las", {"quantum_s": "10.0"})
    assert changed(of(), "policy=las") == ("las", {"quantum_s": "2.0"})
    assert changed(of(quantum_s=10.0), "policy=fifo") == ("fifo", {})
    assert changed(of(), "policy=chronus")[1]["best_effort_lease_s"] == "60.0"
    assert changed(of("chronus"), "policy=rr") == ("rr", {"quantum_s": "2.0"})
    assert changed(of("chronus"), "quantum=5s")[1]["lease_s"] == "10.0"


def test_options_that_all_policies_take_stay() -> None:
    settings = of(pack=True)
    _, made = changed(settings, "policy=las", "placement=spread")
    assert (made["pack"], made["placement"]) == ("true", "spread")
    again = settings.after(change_of(("policy=las", "placement=spread"), settings))
    assert "placement" not in changed(again, "placement=")[1]
    assert changed(again, "pack=false")[1]["pack"] == "false"
    assert "pack" not in changed(of("gandiva"), "policy=rr")[1], "it packs without being asked"


def test_quotas_are_those_of_the_tenants_that_are_named() -> None:
    settings = of()
    first = settings.after(change_of(("quota=a=2", "quota=b=3"), settings))
    assert first.setup.quotas == {"a": 2, "b": 3}
    assert first.after(change_of(("quota=a=", "quota=c=1"), first)).setup.quotas == {"b": 3, "c": 1}


def test_what_is_so_already_is_no_change() -> None:
    settings = of()
    words = (
        "policy=rr",
        "quantum=2s",
        "switch-share=0.03",
        "grace=30s",
        "wait-for-node=10m",
        "devices=null:2",
    )
    assert fields_of(change_of(words, settings)) == {}
    assert settings.summary() == ""


def test_all_settings_are_shown_with_those_that_were_changed() -> None:
    settings = of()
    words = ("quantum=5s", "grace=1m", "prestart=0", "devices=null:0,null:3")
    after = after_all(settings, [change_of(words, settings)])
    shown = {one.name: one for one in after.shown()}
    assert {name for name, one in shown.items() if one.changed} >= {"quantum", "grace", "prestart", "devices"}
    assert [shown[name].value for name in ("devices", "policy", "quantum", "grace", "prestart")] == [
        *("null:0,null:3", "rr", "5s", "60s", "0")
    ]
    assert not shown["switch-share"].changed
    assert "quantum=5s" in after.summary()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("policy", "is not KEY=VALUE"),
        ("polcy=las", "no setting 'polcy'"),
        ("las.quantum_s=2", "the policy is rr"),
        ("rr.quantum=2", "no option 'quantum'"),
        ("policy=fast", "no policy 'fast'"),
        ("quantum=fast", "fast"),
        ("pack=yes", "neither true nor false"),
        ("quota=vision", "not TENANT=DEVICES"),
        ("switch-share=2", "not a share of the time"),
        ("prestart=-1", "no number of jobs"),
        ("devices=cpu:1", "cpu:0 cannot be added"),
        ("ramdisk-limit=8G", "jobs that were submitted under it"),
        ("metrics-port=9", "read when the scheduler starts"),
        ("foreign=share", "read when the scheduler starts"),
        ("set=a=2", "rr.NAME=VALUE"),
    ],
)
def test_what_cannot_be_changed_is_named(word: str, said: str) -> None:
    with pytest.raises(UsageError) as found:
        change_of((word, "grace=5s"), of())
    assert said in found.value.message + found.value.remedy


def test_a_setting_is_given_once_and_devices_of_other_nodes_stay() -> None:
    with pytest.raises(UsageError, match="given twice"):
        change_of(("grace=5s", "grace=6s"), of())
    far = Settings(Setup((NULL[0], NULL[0].on("b"))))
    with pytest.raises(UsageError, match="other nodes"):
        change_of(("devices=null:3",), far)
    with pytest.raises(UsageError, match="sockets"):
        change_of(("devices=null:3",), Settings(Setup(NULL, sockets=2)))
