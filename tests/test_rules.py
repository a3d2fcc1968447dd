"""What a run file asks of a rule and of the law, through whole commands: penalties, log-probabilities, LOSSY."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Points, Tiny, random_llama, wrong_model
from tiny_run import Tiny as Run
from torch import Tensor

from specctl.acceptance import block_rule, token_rule
from specctl.chance import SeededChance
from specctl.decoding import plain, speculative
from specctl.drafters.draft_model import DraftModel
from specctl.errors import UsageError
from specctl.events import Event, Round, TokenLogprob
from specctl.sampling import History, SamplingLaw
from specctl.stats import collect
from specctl.stopping import StopRules

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
PROMPT = (3, 1, 4, 1, 5)
TYPICAL = ("--rule", "typical", "--drafter", "mismatched")


def tiny_llama(dtype: torch.dtype = torch.float32) -> Tiny:
    return Tiny(random_llama(0, 0.5, num_hidden_layers=2, **SIZES), "target", dtype)


def drafts(target: Tiny) -> list[Any]:
    """One that is often right, one that is always wrong, and one that repeats the last token."""
    near = Tiny(random_llama(0, 0.5, num_hidden_layers=1, **SIZES), "draft", torch.float32)
    points = Points(lambda token_ids: token_ids[-1], 12)
    return [DraftModel(near, "draft"), DraftModel(target, "self"), DraftModel(wrong_model(target), "wrong"), points]


def options(law: SamplingLaw, num_tokens: int) -> dict[str, Any]:
    return {"law": law, "chance": SeededChance(0), "stop": StopRules(max_new_tokens=num_tokens)}


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": ((2, 1.0),), "banned_token_ids": (7,)},
    ],
)
def test_greedy_with_penalties_equals_plain_at_every_k(penalties: dict[str, Any]) -> None:
    target, law = tiny_llama(), SamplingLaw(temperature=0, **penalties)
    expected, _ = collect(plain(target, PROMPT, **options(law, 40)))
    bare, _ = collect(plain(target, PROMPT, **options(SamplingLaw(temperature=0), 40)))
    assert expected != bare and len(set(expected)) > 3
    num_accepted = num_rejected = 0
    for drafter in drafts(target):
        for k in range(1, 9):
            events = speculative(target, drafter, PROMPT, num_speculative_tokens=k, **options(law, 40))
            found, stats = collect(events)
            assert found == expected
            num_accepted += stats.num_accepted
            num_rejected += stats.num_drafted - stats.num_accepted
    assert num_accepted and num_rejected


class Blind(SamplingLaw):
    """A planted bug: penalties that see the committed tokens alone."""

    def probs(self, logits: Tensor, history: History) -> Tensor:
        committed = History(token_ids=history.token_ids, prompt_length=history.prompt_length)
        return SamplingLaw.probs(self, logits, committed)


def test_greedy_penalties_that_do_not_see_the_drafted_prefix_are_seen() -> None:
    target, penalties = tiny_llama(), {"frequency_penalty": 0.5, "repetition_penalty": 1.3}
    expected, _ = collect(plain(target, PROMPT, **options(SamplingLaw(temperature=0, **penalties), 40)))
    blind = options(Blind(temperature=0, **penalties), 40)
    assert collect(speculative(target, DraftModel(target, "self"), PROMPT, num_speculative_tokens=4, **blind))[0] != (
        expected
    )


# Log-probabilities


def rounds(events: Iterator[Event]) -> list[Round]:
    return [event for event in events if isinstance(event, Round)]


def logprobs(events: Iterator[Event]) -> list[TokenLogprob]:
    found: list[TokenLogprob] = []
    for round_ in rounds(events):
        assert round_.logprobs is not None and len(round_.logprobs) == len(round_.emitted)
        assert tuple(entry.token_id for entry in round_.logprobs) == round_.emitted
        found += round_.logprobs
    return found


@pytest.mark.parametrize("rule", [token_rule, block_rule])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_logprobs_are_those_of_plain_decoding(k: int, rule: Any) -> None:
    """Of the raw logits, whatever the law; rounds with rejections included."""
    target, law = tiny_llama(), SamplingLaw(temperature=0, repetition_penalty=1.3)
    expected = logprobs(plain(target, PROMPT, **options(law, 30), num_logprobs=3))
    raw = torch.log_softmax(target.rows_after([*PROMPT, *(entry.token_id for entry in expected)]), -1)
    for i, entry in enumerate(expected):
        row = raw[len(PROMPT) - 1 + i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [value for _, value in entry.alternatives] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert [token_id for token_id, _ in entry.alternatives] == row.topk(3).indices.tolist()
    assert any(entry.token_id != entry.alternatives[0][0] for entry in expected)  # the penalty chose another
    for drafter in drafts(target):
        asked = {"num_speculative_tokens": k, "num_logprobs": 3, "rule": rule}
        found = logprobs(speculative(target, drafter, PROMPT, **asked, **options(law, 30)))
        assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]
        assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
        for mine, theirs in zip(found, expected, strict=True):
            assert dict(mine.alternatives) == pytest.approx(dict(theirs.alternatives), abs=1e-4)


def test_logprobs_only_where_asked_for() -> None:
    target, law = tiny_llama(), SamplingLaw()
    for extra, expected in (({}, None), ({"num_logprobs": 0}, ())):
        found = rounds(plain(target, PROMPT, **options(law, 4), **extra))
        asked = {"num_speculative_tokens": 2, **extra}
        found += rounds(speculative(target, DraftModel(target, "self"), PROMPT, **asked, **options(law, 4)))
        for round_ in found:
            alternatives = None if round_.logprobs is None else round_.logprobs[0].alternatives
            assert alternatives == expected


def test_logprobs_of_generate(tiny: Run) -> None:
    document = tiny.specctl("generate", "--json", "--set", "decoding.logprobs=2").json
    assert [entry["token_id"] for entry in document["logprobs"]] == document["token_ids"]
    assert all(entry["logprob"] <= 0 and len(entry["alternatives"]) == 2 for entry in document["logprobs"])
    without = tiny.specctl("generate", "--json").json
    assert without["logprobs"] is None and without["token_ids"] == document["token_ids"]


# The rule of a run


def test_every_watcher_judges_by_the_rule_of_the_run(tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def counting(*arguments: Any) -> Any:
        judged.append(1)
        return block_rule(*arguments)

    monkeypatch.setattr("specctl.experiments.pair.block_rule", counting)
    for command in (("generate",), ("generate", "--trace", str(tiny.run_dir / "trace.jsonl")), ("sweep-k",)):
        judged.clear()
        assert tiny.specctl(*command, "--rule", "block").code == 0 and judged
        judged.clear()
        assert tiny.specctl(*command).code == 0 and not judged


def says_lossy(tiny: Run, *arguments: str) -> tuple[bool, dict[str, Any]]:
    """Whether a command's words say so, and its JSON."""
    shown = tiny.specctl(*arguments)
    assert shown.code == 0, shown.err
    return "LOSSY" in shown.out + shown.err, tiny.specctl(*arguments, "--json").json


@pytest.mark.parametrize("command", ["generate", "sweep-k", "break-it"])
def test_lossy_is_said_where_it_is_true_and_nowhere_else(tiny: Run, command: str) -> None:
    rule = TYPICAL[:2] if command == "break-it" else TYPICAL
    said, document = says_lossy(tiny, command, *rule)
    assert said and document["lossy"] is True
    for other in ((), ("--rule", "block")):
        said, document = says_lossy(tiny, command, *other)
        assert not said and document["lossy"] is False


def test_plain_decoding_is_never_lossy(tiny: Run) -> None:
    for arguments in (("generate", "--k", "0"), ("sweep-k", "--set", "sweep.k=[0]")):
        said, document = says_lossy(tiny, *arguments, "--rule", "typical")
        assert not said and document["lossy"] is False


def test_lossy_in_files_of_prompts_and_traces(tiny: Run, tmp_path: Path) -> None:
    prompts, output, trace = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    prompts.write_text("def a\nclass b\n", encoding="utf-8")
    for rule, expected in ((TYPICAL, True), (("--rule", "token"), False)):
        files = ("--prompts", str(prompts), "--output", str(output), "--trace", str(trace))
        answer = tiny.specctl("generate", *files, *rule)
        assert answer.code == 0, answer.err
        for path in (output, trace):
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            assert lines and all(line["lossy"] is expected for line in lines)
        assert ("LOSSY" in answer.out) is expected
        output.unlink()


def test_lossy_in_the_titles_of_pictures() -> None:
    from test_plots import BREAK_IT, sweep, sweep_row  # type: ignore[import-not-found]

    from specctl.report.plots import break_it_figure, sweep_figure

    plain_sweep = sweep([sweep_row(0, 1.0), sweep_row(1, 1.2)], 1)
    for figure, result in ((sweep_figure, plain_sweep), (break_it_figure, BREAK_IT)):
        assert "LOSSY" not in figure(result).get_suptitle()
        fields = {name: getattr(result, name) for name in type(result).__dataclass_fields__}
        assert "LOSSY" in figure(type(result)(**fields | {"lossy": True})).get_suptitle()


# What a run file may ask for


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("banned_token_ids=[300]", "decoding.banned_token_ids: 300 is not in the vocabulary of 300 tokens"),
        ("logit_bias={5: 1.0, 999: 2}", "decoding.logit_bias: 999 is not in the vocabulary of 300 tokens"),
        ("logprobs=301", "decoding.logprobs: 301 is more than the vocabulary of 300 tokens"),
        (f"banned_token_ids={list(range(300))}", "decoding.banned_token_ids: no token is left"),
        ("repetition_penalty=0", "decoding.repetition_penalty: input should be greater than or equal to 1e-15"),
        ("logit_bias={-1: 1.0}", "decoding.logit_bias.-1"),
        ("rule=tokn", "decoding.rule: input should be 'token', 'block' or 'typical'"),
        ("draft_temperature=-1", "decoding.draft_temperature: input should be greater than or equal to 0"),
    ],
)
def test_mistakes_are_said_before_anything_runs(tiny: Run, override: str, says: str) -> None:
    answer = tiny.specctl("generate", "--set", f"decoding.{override}")
    assert answer.code == 2 and says in answer.err and "Traceback" not in answer.err


def test_the_law_of_a_run_file(tiny: Run) -> None:
    shaping = ("repetition_penalty=1.2", "presence_penalty=0.3", "frequency_penalty=-0.1")
    pair = tiny.pair(
        *(f"decoding.{field}" for field in shaping),
        "decoding.logit_bias={5: 1.5, 6: -2}",
        "decoding.banned_token_ids=[7]",
        "decoding.draft_temperature=0.5",
    )
    law = pair.law
    assert (law.repetition_penalty, law.presence_penalty, law.frequency_penalty) == (1.2, 0.3, -0.1)
    assert (law.logit_bias, law.banned_token_ids) == (((5, 1.5), (6, -2.0)), (7,))
    assert (law.temperature, pair.draft_law.temperature) == (1.0, 0.5)
    assert pair.draft_law.logit_bias == law.logit_bias
    seen: list[SamplingLaw] = []
    original = DraftModel.propose

    def propose(self: DraftModel, history: History, limit: int, law: SamplingLaw, chance: Any) -> Any:
        seen.append(law)
        return original(self, history, limit, law, chance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModel, "propose", propose)
        token_ids, _ = collect(pair.events([40, 41], drafter="distilled", k=3))
    assert seen and set(seen) == {pair.draft_law}
    assert 7 not in token_ids
    with pytest.raises(UsageError, match="not in the vocabulary"):
        tiny.pair("decoding.logit_bias={300: 1.0}")
