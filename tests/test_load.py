"""A disturbed block is known by what else ran, and measured again as a whole; speed has no say in it."""

from collections.abc import Iterator
from itertools import count

import pytest
from tiny_run import Tiny

from specctl.experiments import load
from specctl.experiments.load import Load, is_disturbed, load_of, read_load
from specctl.experiments.measure import Bench, Disturbance, Variant
from specctl.experiments.workload import workload

STAT = """cpu  100 1 2 3 4 5 6 7 8 9
cpu0 1000 200 300 9000 50 10 20 40 500 0
cpu1 2000 0 100 8000 0 0 0 0 0 0
cpu2 77777 0 0 0 0 0 0 9999 0 0
intr 1 2 3
""".splitlines()


def test_busy_and_stolen_time_of_our_cores_alone() -> None:
    found = load_of(STAT, {0, 1}, ticks=100, own=1.5, clock=10.0)
    assert found.busy == pytest.approx((1000 + 200 + 300 + 10 + 20 + 2000 + 100) / 100)  # neither idle nor iowait
    assert (found.stolen, found.own, found.clock, found.num_cores) == (0.4, 1.5, 10.0, 2)
    assert load_of(STAT, {2}, ticks=100, own=0, clock=0).stolen == 99.99


def after(others: float, *, own: float = 1.0, stolen: float = 0.0, seconds: float = 1.0) -> tuple[Load, Load]:
    """A second in which we used one core and others what is given, on two cores."""
    before = Load(clock=5.0, busy=40.0, stolen=1.0, own=7.0, num_cores=2)
    now = Load(clock=5.0 + seconds, busy=40.0 + own + others, stolen=1.0 + stolen, own=7.0 + own, num_cores=2)
    return before, now


@pytest.mark.parametrize(
    ("others", "stolen", "threads", "expected"),
    [
        (0.0, 0.0, 2, False),
        (0.08, 0.0, 2, False),  # daemons
        (0.2, 0.0, 2, True),
        (1.0, 0.0, 1, False),  # on the core that one thread leaves free
        (1.2, 0.0, 1, True),
        (0.0, 0.2, 1, True),  # stolen time is lost wherever it was
        (-0.05, 0.0, 2, False),  # clocks of different grain
    ],
)
def test_what_counts_as_disturbed(others: float, stolen: float, threads: int, expected: bool) -> None:
    assert is_disturbed(*after(others, stolen=stolen), threads) is expected


def test_a_tick_in_a_short_block_is_no_disturbance_and_nothing_known_is_none() -> None:
    assert not is_disturbed(*after(0.02, own=0.05, seconds=0.05), 2)
    assert not is_disturbed(None, after(1.0)[1], 2) and not is_disturbed(after(1.0)[0], None, 2)


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(load, "_STAT", load.Path("/nowhere/stat"))
    assert read_load() is None


def busy_in(blocks: set[int]) -> Iterator[Load]:
    """Readings before and after each block; others take a core during some of them."""
    clock = busy = 0.0
    for block in count():
        yield Load(clock=clock, busy=busy, stolen=0.0, own=clock, num_cores=1)
        clock += 1.0
        busy += 1.0 + (block in blocks)
        yield Load(clock=clock, busy=busy, stolen=0.0, own=clock, num_cores=1)


def measured(tiny: Tiny, blocks: set[int], repeats: int = 3) -> tuple[Bench, list[tuple[int, int]]]:
    pair, progress = tiny.pair(), list[tuple[int, int]]()
    readings = busy_in(blocks)
    bench = Bench(
        pair, workload(pair).measured, lambda done, planned: progress.append((done, planned)), lambda: next(readings)
    )
    bench.run([Variant("none", 0), Variant("distilled", 2)], repeats)
    return bench, progress


def test_a_disturbed_block_is_measured_again_with_everything_in_it(tiny: Tiny) -> None:
    """Two prompts and two variants, three times: 6 blocks, of which the second and the one after it are disturbed."""
    quiet, _ = measured(tiny, set())
    bench, progress = measured(tiny, {1, 2})
    assert quiet.disturbance == Disturbance(num_blocks=6)
    assert bench.disturbance == Disturbance(num_blocks=6, num_measured_again=2)
    assert progress == [(done, 12) for done in (2, 4, 6, 8, 10, 12)]  # two runs a block that counts
    for variant in (Variant("none", 0), Variant("distilled", 2)):
        assert bench.num_repeats_of(variant) == 3
        found, expected = bench.speed(variant).stats, quiet.speed(variant).stats
        assert (found.num_new_tokens, found.num_rounds) == (expected.num_new_tokens, expected.num_rounds)  # same draws


def test_where_it_is_never_quiet_it_ends_and_says_so(tiny: Tiny) -> None:
    bench, _ = measured(tiny, set(range(1000)), repeats=10)
    found = bench.disturbance
    assert found.num_blocks == 20 == found.num_disturbed
    assert 4 <= found.num_measured_again <= 6  # a quarter of the blocks


def test_order_within_a_block_is_mixed_anew(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, order = tiny.pair(), list[int]()
    events = pair.events
    monkeypatch.setattr(pair, "events", lambda prompt, **given: order.append(given["k"]) or events(prompt, **given))
    bench = Bench(pair, workload(pair).measured)
    bench.run([Variant("none", 0), *(Variant("distilled", k) for k in (1, 2, 3))], 8)
    blocks = [tuple(order[start : start + 4]) for start in range(4, len(order), 4)]  # behind the warm-up
    assert len(blocks) == 16 and all(sorted(block) == [0, 1, 2, 3] for block in blocks)
    assert len(set(blocks)) > 6 and len({block[0] for block in blocks}) == 4
