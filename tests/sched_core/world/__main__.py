"""Live through many worlds: ``python -m tests.sched_core.world --runs 2000 --seed 0``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext

from .against import against
from .changes import with_changes
from .own_time import with_own_times
from .put_back import FAULTS, put_back
from .record import Violation
from .rooms import with_rooms
from .scenario import draw_scenario
from .week import check_week, draw_week
from .windows import with_windows
from .world import check, draw_deaths


def main() -> int:
    """Return 1 if something has happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.sched_core.world", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="how many worlds")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first; the others follow")
    parser.add_argument("--verbose", action="store_true", help="print what came before each violation")
    parser.add_argument("--put-back", default="", metavar="PAIR", help="with a fault that was mended")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="end after so many violations")
    parser.add_argument(
        "--against", default="", metavar="COMMIT", help="say what the core of that commit does otherwise"
    )
    parser.add_argument("--profile", default="", metavar="NAME", help="only worlds about that")
    told = "and again so often, as the scheduler dies at an order to a node"
    parser.add_argument("--deaths", type=int, default=0, metavar="N", help=told)
    parser.add_argument("--windows", action="store_true", help="with pauses, drains and reservations")
    parser.add_argument("--rooms", action="store_true", help="with little room for states on each node")
    parser.add_argument("--changes", action="store_true", help="with changes of the scheduler's settings")
    told = "with arrays, holds, moments, dependencies, time limits, priorities and requeues"
    parser.add_argument("--own-times", action="store_true", help=told)
    parser.add_argument(
        "--weeks", action="store_true", help="whole weeks of a box instead, with all of these"
    )
    parser.add_argument("--no-faults", action="store_true", help="nothing goes wrong")
    options = parser.parse_args()
    faults = {fault.pair: fault for fault in FAULTS}
    if options.put_back and options.put_back not in faults:
        parser.error(f"there is no fault {options.put_back!r}; choose of {', '.join(faults)}")
    if options.against:
        return int(against(options.against, options.seed, options.runs) > 0)
    lived, found, began_s = 0, Counter[str](), time.monotonic()
    with put_back(faults[options.put_back]) if options.put_back else nullcontext():
        for seed in range(options.seed, options.seed + options.runs):
            scenario = draw_week(seed) if options.weeks else draw_scenario(seed)
            scenario = with_windows(scenario) if options.windows else scenario
            scenario = with_rooms(scenario) if options.rooms else scenario
            scenario = with_own_times(scenario) if options.own_times else scenario
            scenario = with_changes(scenario) if options.changes else scenario
            scenario = scenario.without_faults() if options.no_faults else scenario
            if options.profile not in ("", scenario.profile.name):
                continue
            lived += 1
            try:
                world = check_week(scenario) if options.weeks else check(scenario)
                for deaths in draw_deaths(world, options.deaths):
                    check(scenario, deaths=deaths)
            except Violation as violation:
                found[str(violation).partition(":")[0]] += 1
                said = str(violation) if options.verbose else str(violation).partition(", after")[0]
                print(f"seed {seed}: {said}", flush=True)
                if found.total() == options.most:
                    break
    print(f"{lived} runs, {found.total()} violations, {time.monotonic() - began_s:.0f} s")
    for what, times in found.most_common():
        print(f"{times:6} {what}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
