"""The trace says what each round did, changes nothing, and break-it's explanation rests on what was watched."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import const
from tiny_run import Tiny

from specctl.acceptance import token_rule
from specctl.chance import SeededChance
from specctl.decoding import speculative
from specctl.drafters.draft_model import DraftModel
from specctl.events import Event, Round
from specctl.experiments.agreement import agreement_on
from specctl.experiments.break_it import EntropyBand, by_entropy, entropy_limits
from specctl.experiments.trace import open_trace
from specctl.experiments.watch import Judged, Watch
from specctl.sampling import SamplingLaw
from specctl.stats import Stats
from specctl.stopping import StopRules

FIELDS = {
    *("prompt", "drafter", "k", "lossy", "round", "drafted", "num_accepted", "emitted", "closing"),
    *("seconds", "draft_seconds", "verify_seconds", "rejection_entropy"),
}
P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
ENTROPY = -sum(p * math.log(p) for p in P)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def watched_events(watch: Watch, max_new_tokens: int = 60) -> Iterator[Event]:
    draft = DraftModel(const(Q, "draft"), "draft")
    stop = StopRules(max_new_tokens=max_new_tokens)
    options = {"law": SamplingLaw(), "chance": SeededChance(0), "stop": stop, "observer": watch}
    return speculative(const(P), draft, [0], num_speculative_tokens=3, **options)  # type: ignore[arg-type]


def test_watch_sees_every_judged_token_and_its_law() -> None:
    watch, stats, judged = Watch(), Stats(), list[Judged]()
    assert watch.judged() == []
    for event in watched_events(watch):
        stats.add(event)
        if isinstance(event, Round):
            judged += watch.judged()
    assert 0 < stats.num_accepted < stats.num_drafted
    assert len(judged) == sum(stats.reached)
    assert sum(position.accepted for position in judged) == stats.num_accepted
    assert {round(position.overlap, 9) for position in judged} == {0.6}  # .2 + .2 + .2
    assert {round(position.entropy, 9) for position in judged} == {round(ENTROPY, 9)}


def test_each_line_is_on_disk_before_its_round_is_passed_on(tmp_path: Path) -> None:
    path, watch, seen = tmp_path / "a" / "trace.jsonl", Watch(), list[Event]()
    with open_trace(path) as trace:
        assert trace is not None
        for event in trace.follow(watched_events(watch), watch, prompt=5, drafter="draft", k=3):
            seen.append(event)
            assert len(read(path)) == sum(isinstance(event, Round) for event in seen)
    rounds = [event for event in seen if isinstance(event, Round)]
    assert seen[: len(rounds)] == rounds and len(seen) == len(rounds) + 1
    for line, event in zip(read(path), rounds, strict=True):
        assert line.keys() == FIELDS
        assert (line["prompt"], line["drafter"], line["k"], line["round"]) == (5, "draft", 3, event.index)
        assert (tuple(line["drafted"]), tuple(line["emitted"])) == (event.drafted, event.emitted)
        for name in ("num_accepted", "closing", "seconds", "draft_seconds", "verify_seconds"):
            assert line[name] == getattr(event, name)
        rejected = event.closing == "recovered"
        assert line["rejection_entropy"] == (pytest.approx(ENTROPY) if rejected else None)
    assert {line["closing"] for line in read(path)} == {"recovered", "bonus"}


def test_the_entropy_is_that_of_the_position_that_was_rejected() -> None:
    watch = Watch()
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)

    class Proposed:
        ids = torch.tensor([1, 0])

        def at(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.ones(2, dtype=torch.float64)

        def row(self, position: torch.Tensor) -> torch.Tensor:
            return torch.zeros(2, dtype=torch.float64).index_fill(0, self.ids[position], 1)

    class Rejecting(SeededChance):
        def successes(self, probs: torch.Tensor) -> torch.Tensor:
            return torch.tensor(1)

    chance = Rejecting(0)
    chance.begin_round(0)
    watch(p, Proposed(), token_rule(p, Proposed(), chance))
    assert [(position.entropy, position.accepted) for position in watch.judged()] == [
        (0.0, True),
        (pytest.approx(math.log(2)), False),
    ]


def test_generate_traces_its_rounds_and_its_text_stays(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    arguments = ("--json", "--drafter", "mismatched", "--set", "decoding.max_new_tokens=40")
    plain, traced = tiny.specctl("generate", *arguments), tiny.specctl("generate", *arguments, "--trace", str(path))
    assert traced.code == 0, traced.err
    assert traced.json["token_ids"] == plain.json["token_ids"]
    lines = read(path)
    assert [token_id for line in lines for token_id in line["emitted"]] == traced.json["token_ids"]
    assert len(lines) == traced.json["stats"]["num_rounds"]
    assert sum(line["num_accepted"] for line in lines) == traced.json["stats"]["num_accepted"]
    assert {(line["prompt"], line["drafter"], line["k"]) for line in lines} == {(0, "mismatched", 3)}
    assert [line["rejection_entropy"] is None for line in lines] == [line["closing"] != "recovered" for line in lines]
    assert any(line["closing"] == "recovered" for line in lines)


def test_plain_decoding_is_traced_too(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert tiny.specctl("generate", "--k", "0", "--trace", str(path)).code == 0
    assert {(line["drafter"], line["k"], line["rejection_entropy"]) for line in read(path)} == {("none", 0, None)}
    assert all(line["drafted"] == [] and len(line["emitted"]) == 1 for line in read(path))


def test_without_a_trace_the_rule_is_not_wrapped(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = []
    monkeypatch.setattr(Watch, "__call__", lambda self, *judged: wrapped.append(1))
    assert tiny.specctl("generate").code == 0 and not wrapped
    monkeypatch.setattr(Watch, "judged", lambda self: [Judged(overlap=1.0, entropy=1.0, accepted=True)])
    assert tiny.specctl("generate", "--trace", str(tmp_path / "trace.jsonl")).code == 0 and wrapped


@pytest.mark.parametrize(("command", "k", "drafters"), [("break-it", 3, 4), ("sweep-k", 3, 1)])
def test_measuring_commands_trace_the_prompts_that_are_not_timed(
    tiny: Tiny, tmp_path: Path, command: str, k: int, drafters: int
) -> None:
    path = tmp_path / "trace.jsonl"
    assert tiny.specctl(command, "--trace", str(path)).code == 0
    lines = read(path)
    requests = {(line["drafter"], line["prompt"]) for line in lines}
    assert len(requests) == drafters * 2
    pair = tiny.pair()
    found = agreement_on(pair, "distilled", k, pair.prompts(4)[2:]).stats
    ours = [line for line in lines if line["drafter"] == "distilled"]
    assert len(ours) == found.num_rounds and sum(line["num_accepted"] for line in ours) == found.num_accepted
    assert {line["k"] for line in lines} == {k}


@pytest.mark.parametrize("command", ["generate", "sweep-k", "break-it"])
def test_an_unwritable_trace_is_found_before_any_work(tiny: Tiny, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file" / "trace.jsonl", tmp_path):
        answer = tiny.specctl(command, "--trace", str(path))
        assert answer.code == 2 and "cannot write the trace" in answer.one_line
        assert answer.err.strip() == answer.one_line and answer.out == "", "something was done before"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(tiny: Tiny) -> None:
    answer = tiny.specctl("generate", "--trace", "/dev/full")
    assert answer.code == 1 and "cannot write the trace /dev/full: No space left" in answer.one_line


# What break-it says


def judged(*positions: tuple[float, bool]) -> list[Judged]:
    return [Judged(overlap=0.5, entropy=entropy, accepted=accepted) for entropy, accepted in positions]


def test_bands_hold_a_third_each() -> None:
    positions = judged(*((float(entropy), entropy < 4) for entropy in range(9)))
    limits = entropy_limits(positions)
    assert limits == [3.0, 6.0]
    bands = by_entropy(positions, limits)
    assert [(band.low, band.high, band.num_judged) for band in bands] == [(0.0, 3.0, 3), (3.0, 6.0, 3), (6.0, None, 3)]
    assert [band.acceptance for band in bands] == [1.0, pytest.approx(1 / 3), 0.0]
    assert by_entropy(positions[:1], limits)[2] == EntropyBand(low=6.0, high=None, num_judged=0, acceptance=None)


def test_greedy_decoding_has_one_band() -> None:
    positions = judged((0.0, True), (0.0, False), (0.0, True))
    assert entropy_limits(positions) == [] == entropy_limits([])
    (band,) = by_entropy(positions, [])
    assert (band.low, band.high, band.num_judged, band.acceptance) == (0.0, None, 3, pytest.approx(2 / 3))


def test_break_it_reports_and_prints_where_drafts_are_accepted(tiny: Tiny) -> None:
    rows = tiny.specctl("break-it", "--json").json["rows"]
    assert rows[0]["conditional_acceptance"] is None and rows[0]["acceptance_by_entropy"] is None
    bands = [[(band["low"], band["high"]) for band in row["acceptance_by_entropy"]] for row in rows[1:]]
    assert len(bands[0]) == 3 and all(band == bands[0] for band in bands)
    for row in rows[1:]:
        assert 0 < len(row["conditional_acceptance"]) <= 3
    sizes = [sum(row["acceptance_by_entropy"][band]["num_judged"] for row in rows[1:]) for band in range(3)]
    assert sum(sizes) > 0 and max(sizes) - min(sizes) <= sum(sizes) / 10  # equal entropies stay in one band
    assert tiny.specctl("break-it").out.count("accepted by position ") == 4
