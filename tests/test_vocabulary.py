"""Pairs whose vocabularies differ: padding is never seen, and a foreign tokenizer changes the draft's law alone.

A wrong mapping keeps the law of the output (the rule is told whatever q is), so rows are held to an oracle
that spells and maps for itself, and acceptance to what a relabelled copy of the target must reach.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import (
    CPU,
    FakeModel,
    Oracle,
    Tiny,
    const,
    enumerated_law,
    history,
    law_of,
    markov,
    max_error,
    random_llama,
    wrong_model,
)
from tiny_run import Tiny as Run
from torch import Tensor

from specctl.acceptance import Proposal, block_rule, token_rule
from specctl.chance import Chance, SeededChance
from specctl.decoding import Rule, plain, speculative
from specctl.drafters.base import DenseProposal, Drafter
from specctl.drafters.draft_model import DraftModel
from specctl.drafters.medusa import MedusaDrafter
from specctl.errors import SpecctlError, UsageError
from specctl.events import Event, Round
from specctl.experiments.verify import verdict
from specctl.models import vocabulary
from specctl.models.checkpoint import load_checkpoint, save_checkpoint
from specctl.models.llama import Llama
from specctl.models.medusa import MedusaDecoder, MedusaHeads, MedusaShape
from specctl.models.session import CausalModel
from specctl.models.vocabulary import Intersected, Mapping, Trimmed, num_read, trimmed
from specctl.sampling import History, SamplingLaw
from specctl.stats import collect
from specctl.stopping import StopRules
from specctl.tokenizer import Tokenizer

TOLERANCE = 1e-12
VISIBLE = 1e-3
GREEDY = SamplingLaw(temperature=0)
TARGETS: dict[str, Callable[[], Oracle]] = {
    "CONST": lambda: const((0.5, 0.3, 0.2)),
    "MARKOV": lambda: markov(((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), (0.25, 0.25, 0.5))),
    "HISTORY": lambda: history(0),
}
# The target's 0 is the draft's 3, its 1 the draft's 0; its 2 is spelt, and the draft's 2 and 4 are unknown to it.
SMALL = Mapping(3, {0: 3, 1: 0}, {2: (1, 4)}.__getitem__)
# Six tokens of the target: three shared, one of two draft tokens, one of three, and one (3) that is skipped.
WIDE_SHARED = {0: 3, 1: 0, 4: 2}
WIDE_SPELT: dict[int, tuple[int, ...]] = {2: (1, 4), 3: (), 5: (3, 3, 0)}
WIDE = Mapping(6, WIDE_SHARED, WIDE_SPELT.__getitem__)


def stop(num_tokens: int) -> StopRules:
    return StopRules(max_new_tokens=num_tokens)


def speculate(
    target: CausalModel,
    drafter: Drafter,
    *,
    k: int,
    num_tokens: int,
    law: SamplingLaw | None = None,
    rule: Rule = token_rule,
    prompt: tuple[int, ...] = (0,),
) -> dict[tuple[int, ...], float]:
    """The enumerated law of `speculative`."""

    def run(chance: Chance) -> Iterator[Event]:
        return speculative(
            target,
            drafter,
            prompt,
            num_speculative_tokens=k,
            law=law or SamplingLaw(),
            chance=chance,
            stop=stop(num_tokens),
            rule=rule,
        )

    return enumerated_law(run)


def foreign(seed: int = 7, context: int = 64) -> Tiny:
    """A random draft of five tokens, whose law depends on the whole prefix."""
    return Tiny(random_llama(seed, vocab_size=5, max_position_embeddings=context), "draft")


# Rows of padding


def padded(probs: Sequence[float], num_rows: int, name: str = "target") -> FakeModel:
    """A fixed law with rows of padding whose logits are large."""
    logits = torch.tensor([*probs, *[math.exp(50)] * (num_rows - len(probs))], dtype=torch.float64).log()
    return FakeModel(lambda prefix: logits, num_rows, name)


def test_a_model_without_padding_is_left_as_it_is() -> None:
    model = const((0.5, 0.5))
    assert trimmed(model, 2) is model
    with pytest.raises(UsageError, match="2 vocabulary rows for 3"):
        trimmed(model, 3)


@pytest.mark.parametrize("target_rows", [65, 80])
def test_padding_is_never_drafted_and_never_emitted(target_rows: int) -> None:
    """65 tokens; a draft of 128 rows, of which 63 are padding with large logits."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(65, generator=generator).softmax(0).tolist() for _ in range(2))
    target, draft = trimmed(padded(p, target_rows), 65), trimmed(padded(q, 128, "draft"), 65)
    events = speculative(
        target,
        DraftModel(draft, "draft"),
        [0],
        num_speculative_tokens=4,
        law=SamplingLaw(),
        chance=SeededChance(0),
        stop=stop(400),
    )
    rounds = [event for event in events if isinstance(event, Round)]
    assert max(max(*round_.drafted, *round_.emitted) for round_ in rounds if round_.drafted) < 65
    accepted, drafted = sum(r.num_accepted for r in rounds), sum(r.num_drafted for r in rounds)
    assert accepted / drafted > 0.6  # the two laws are near; padding would be rejected each time


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_the_law_over_padded_models_is_the_tokens_own(rule: Rule) -> None:
    probs, target, draft = (0.5, 0.3, 0.2), padded((0.5, 0.3, 0.2), 5), padded((0.2, 0.2, 0.6), 4, "draft")
    drafter = DraftModel(Trimmed(draft, 3), "draft")
    found = speculate(Trimmed(target, 3), drafter, k=2, num_tokens=3, rule=rule)
    assert max_error(found, law_of(const(probs), (0,), 3)) <= TOLERANCE
    seen = enumerated_law(lambda chance: plain(target, [0], law=SamplingLaw(), chance=chance, stop=stop(1)))
    assert max_error(seen, law_of(const(probs), (0,), 1)) > VISIBLE  # untrimmed, padding is all that it says


def test_trimmed_logits_are_a_view_and_hidden_states_stay() -> None:
    model = Tiny(random_llama(0, vocab_size=9))
    session, whole = Trimmed(model, 6).session(), model.session()
    ids = torch.tensor([[0, 1, 2]])
    forward, expected = session.extend(ids, num_logits=2), whole.extend(ids, num_logits=2)
    assert torch.equal(forward.logits, expected.logits[..., :6]) and torch.equal(forward.hidden, expected.hidden)
    assert not forward.logits.is_contiguous()
    session.keep((1,))
    assert session.lengths == (1,)


def test_heads_of_a_padded_target_draft_tokens_alone() -> None:
    target = Tiny(random_llama(0, vocab_size=5, max_position_embeddings=32))
    heads = MedusaHeads(MedusaShape(num_heads=2, num_hidden_layers=0, hidden_size=8, vocab_size=5)).double()
    decoder = MedusaDecoder(heads, dtype=torch.float64, device=CPU)
    found = speculate(Trimmed(target, 3), MedusaDrafter(decoder, "medusa", 3), k=2, num_tokens=3, prompt=(0, 1))
    model = FakeModel(lambda prefix: target.logits_after(prefix)[:3], 3)
    assert max_error(found, law_of(model, (0, 1), 3)) <= TOLERANCE


# What a draft of another vocabulary reads and answers


def expected_row(draft: Oracle, prefix: Sequence[int]) -> Tensor:
    """The target's six probabilities by the draft, spelt and mapped here: what `WIDE` must give."""
    table = {**WIDE_SPELT, **{mine: (theirs,) for mine, theirs in WIDE_SHARED.items()}}
    spelt = [draft_id for token_id in prefix for draft_id in table[token_id]]
    probs = torch.zeros(6, dtype=torch.float64)
    if not spelt:
        return probs + 1 / 6
    own = torch.softmax(draft.logits_after(spelt), -1)
    for mine, theirs in WIDE_SHARED.items():
        probs[mine] = own[theirs]
    return probs / probs.sum()


def walk(model: CausalModel, seed: int, most: int, check: Callable[[list[int], Tensor], None]) -> None:
    """Passes of all widths and rollbacks to any length; `check` gets each text and the row that followed it."""
    rng, session, text = random.Random(seed), model.session(), list[int]()
    for _ in range(40):
        if text and rng.random() < 0.4:
            text = text[: rng.randrange(len(text) + 1)]
            session.keep((len(text),))
        new = [rng.randrange(model.vocab_size) for _ in range(rng.randint(1, 4))]
        if len(text) + len(new) > most:
            continue
        asked = rng.choice([None, 1, len(new)])
        logits = session.extend(torch.tensor([new]), num_logits=asked).logits[0]
        text += new
        assert session.lengths == (len(text),) and len(logits) == (asked or len(new))
        for back, row in enumerate(reversed(logits)):
            check(text[: len(text) - back], row)


@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_that_of_the_spelt_text(seed: int) -> None:
    draft = foreign()

    def check(text: list[int], row: Tensor) -> None:
        assert (torch.softmax(row, -1) - expected_row(draft, text)).abs().max() < 1e-12

    walk(Intersected(draft, WIDE), seed, 20, check)


def test_what_the_draft_cannot_read_at_all_leaves_a_uniform_row() -> None:
    session = Intersected(foreign(), WIDE).session()
    rows = torch.softmax(session.extend(torch.tensor([[3, 3]])).logits[0], -1)
    assert rows.shape == (2, 6) and (rows - 1 / 6).abs().max() < 1e-12
    row = torch.softmax(session.extend(torch.tensor([[3, 0]])).logits[0, -1], -1)
    assert (row - expected_row(foreign(), [0])).abs().max() < 1e-12


@pytest.mark.parametrize("context", [1, 2, 3, 5, 8])
def test_the_draft_context_never_overflows(context: int) -> None:
    """A fake fails beyond its context; each row is that of some latest tokens, half a context of them at least."""
    weights = torch.randn((16, 5), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def logits_after(prefix: Sequence[int]) -> Tensor:
        return sum((weights[place % 16] * (token_id + 1) for place, token_id in enumerate(prefix)), weights[0])

    draft = FakeModel(logits_after, 5, "draft", context)

    def check(text: list[int], row: Tensor) -> None:
        spelt = [draft_id for token_id in text for draft_id in WIDE.spell(token_id)]
        shortest = min(len(spelt), max(1, context // 2))
        rows = [logits_after(spelt[len(spelt) - n :])[[3, 0, 2]] for n in range(shortest, context + 1)]
        assert not spelt or any((row[[0, 1, 4]] - found).abs().max() < 1e-9 for found in rows)

    for seed in range(4):
        walk(Intersected(draft, WIDE), seed, 30, check)


def test_a_row_is_a_distribution_whatever_the_law_bans() -> None:
    """All shared tokens banned, or impossible to the draft: then the others are drafted, and rejected or not."""
    row = Intersected(foreign(), WIDE).session().extend(torch.tensor([[0]])).logits[0, 0]
    seen = History(token_ids=[0], prompt_length=1)
    for law in (SamplingLaw(), SamplingLaw(temperature=1e-4), SamplingLaw(top_k=5), SamplingLaw(repetition_penalty=2)):
        probs = law.probs(row, seen)
        assert probs[[2, 3, 5]].sum() == 0 and abs(float(probs.sum()) - 1) < 1e-12
    for temperature in (0.0, 1.0, 3.0):
        probs = SamplingLaw(temperature=temperature, banned_token_ids=(0, 1, 4)).probs(row, seen)
        assert probs[[0, 1, 4]].sum() == 0 and abs(float(probs.sum()) - 1) < 1e-12
    impossible = const((0.0, 0.5, 0.0, 0.0, 0.5), "draft")  # the draft says its 1 and 4 alone, which nobody shares
    for mapping in (WIDE, Mapping(2, {0: 3, 1: 0}, lambda token_id: ())):  # with others than the shared, and without
        row = Intersected(impossible, mapping).session().extend(torch.tensor([[0]])).logits[0, 0]
        assert abs(float(SamplingLaw().probs(row, seen).sum()) - 1) < 1e-12


def test_bad_use_is_refused() -> None:
    with pytest.raises(UsageError, match="share no token"):
        Mapping(3, {}, lambda token_id: ())
    with pytest.raises(SpecctlError, match="one sequence at a time"):
        Intersected(foreign(), WIDE).session(2)
    session = Intersected(foreign(), WIDE).session()
    with pytest.raises(ValueError, match="cannot keep 1"):
        session.keep((1,))


def test_num_read_counts_what_is_spelt() -> None:
    model = Intersected(foreign(), WIDE)
    assert num_read(model, [0, 5, 5]) == 7 and num_read(model, [3, 3]) == 2 and num_read(foreign(), [0, 1]) == 2


# The law of the output


@pytest.mark.parametrize("rule", [token_rule, block_rule])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_the_output_law_is_the_targets(name: str, k: int, rule: Rule) -> None:
    target, drafter = TARGETS[name](), DraftModel(Intersected(foreign(), SMALL), "draft")
    found = speculate(target, drafter, k=k, num_tokens=3, rule=rule, prompt=(2, 0, 2))
    assert max_error(found, law_of(target, (2, 0, 2), 3)) <= TOLERANCE


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_law_holds_through_windows_of_the_draft(context: int) -> None:
    target, draft = history(0), foreign(context=context)
    drafter = DraftModel(Intersected(draft, SMALL), "draft")
    found = speculate(target, drafter, k=2, num_tokens=3, prompt=(2, 2, 2, 0))
    assert max_error(found, law_of(target, (2, 2, 2, 0), 3)) <= TOLERANCE


@pytest.mark.parametrize(
    "law", [SamplingLaw(banned_token_ids=(0, 1)), SamplingLaw(temperature=0.5, top_p=0.7), SamplingLaw(top_k=2)]
)
def test_the_law_holds_where_few_or_no_shared_tokens_are_left(law: SamplingLaw) -> None:
    target, drafter = history(0), DraftModel(Intersected(foreign(), SMALL), "draft")
    found = speculate(target, drafter, k=2, num_tokens=3, law=law)
    assert max_error(found, law_of(target, (0,), 3, law)) <= TOLERANCE


class Unrestricted:
    """A planted bug: draws from the draft's own law and maps the token, but declares the restricted one."""

    name = "unrestricted"

    def __init__(self, draft: CausalModel) -> None:
        self._session = draft.session()
        self._restricted = Intersected(draft, SMALL).session()

    def begin(self, prompt: Sequence[int], forward: object) -> None:
        pass

    def propose(self, history: History, limit: int, law: SamplingLaw, chance: Chance) -> Proposal:
        self._restricted.keep((0,))
        self._session.keep((0,))
        ids = torch.tensor([list(history.token_ids)])
        spelt = torch.tensor([[each for token_id in history.token_ids for each in SMALL.spell(token_id)]])
        q = law.probs(self._restricted.extend(ids, 1).logits[0, -1], history)
        drawn = int(chance.draw(law.probs(self._session.extend(spelt, 1).logits[0, -1], history)))
        token_id = {3: 0, 0: 1}.get(drawn, 0)
        return DenseProposal(torch.tensor([token_id])[:limit], torch.stack([q, q * 0])[-limit - 1 :])

    def observe(self, round_: Round, forward: object) -> None:
        pass


def test_a_law_that_is_declared_but_not_drawn_from_is_seen() -> None:
    target = TARGETS["MARKOV"]()
    found = speculate(target, Unrestricted(foreign()), k=1, num_tokens=3)
    assert max_error(found, law_of(target, (0,), 3)) > VISIBLE


def relabelled(target: Tiny, order: Sequence[int]) -> Tiny:
    """The target with its token i as number order[i]."""
    module = random_llama(0, **{name: getattr(target.module.shape, name) for name in ("vocab_size",)})
    module.load_state_dict(target.module.state_dict())
    with torch.no_grad():
        for weight in (module.lm_head.weight, module.model.embed_tokens.weight):
            weight[list(order)] = weight.clone()
    return Tiny(module, "draft")


def test_a_relabelled_copy_of_the_target_accepts_everything() -> None:
    """And one whose mapping is off by one does not, though its output keeps the law."""
    target, order = Tiny(random_llama(0, vocab_size=4)), [2, 0, 3, 1]
    draft = relabelled(target, order)
    rates = []
    for shift in (0, 1):
        mapping = Mapping(4, {token_id: order[(token_id + shift) % 4] for token_id in range(4)}, lambda token_id: ())
        drafter = DraftModel(Intersected(draft, mapping), "draft")
        events = speculative(
            target,
            drafter,
            [1],
            num_speculative_tokens=3,
            law=SamplingLaw(),
            chance=SeededChance(0),
            stop=stop(14),
        )
        rates.append(collect(events)[1].acceptance_rate)
        found = speculate(target, drafter, k=1, num_tokens=3)
        assert max_error(found, law_of(target, (0,), 3)) <= TOLERANCE
    assert rates[0] == 1 and rates[1] is not None and rates[1] < 0.9


@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_text_is_that_of_plain_decoding(k: int) -> None:
    target = Tiny(random_llama(3, vocab_size=6, num_hidden_layers=3, max_position_embeddings=64))
    for draft in (foreign(), wrong_model(foreign()), foreign(context=8)):
        for prompt in ([3], [5, 2], [3, 0, 5, 2, 1, 3, 4, 4, 2]):
            expected, _ = collect(plain(target, prompt, law=GREEDY, chance=SeededChance(0), stop=stop(24)))
            run = speculative(
                target,
                DraftModel(Intersected(draft, WIDE), "draft"),
                prompt,
                num_speculative_tokens=k,
                law=GREEDY,
                chance=SeededChance(0),
                stop=stop(24),
            )
            assert collect(run)[0] == expected


# Two tokenizers


TEXTS = {
    "code": "def read_file(path):\n    with open(path) as file:\n        return file.read()\n" * 20,
    "prose": "The quick brown fox jumps over the lazy dog, naïve café, and of course it was there.\n" * 20,
}


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return Tokenizer.train([TEXTS["code"], TEXTS["prose"]], 330), Tokenizer.train([TEXTS["prose"] * 2], 290)


def test_shared_tokens_mean_the_same_and_others_are_spelt_byte_for_byte(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> None:
    for target, draft in (tokenizers, tokenizers[::-1]):
        mapping, shared = Mapping.between(target, draft), target.shared_with(draft)
        assert 257 < mapping.num_shared < min(target.vocab_size, draft.vocab_size)
        assert len(set(shared.values())) == len(shared) and shared[0] == 0  # the ends of text
        for token_id in range(1, target.vocab_size):
            spelt = mapping.spell(token_id)
            assert b"".join(map(draft.token_bytes, spelt)) == target.token_bytes(token_id)
            assert (len(spelt) == 1) == (token_id in shared)
        text = "def naïve(café):\n    return 日本 🙂"
        spelt = [draft_id for token_id in target.encode(text) for draft_id in mapping.spell(token_id)]
        assert draft.decode(spelt) == text


def test_whole_commands_with_another_tokenizer(tiny_copy: Run, tmp_path: Path) -> None:
    """Refused by default, saying what differs and what would do; with the option exact, and so says verify."""
    folder = foreign_draft(tiny_copy, tmp_path)
    drafter = ("--drafter", "foreign", "--set", f"drafters.foreign.path={folder}")
    refused = tiny_copy.specctl("generate", *drafter)
    assert refused.code == 2 and "differs from the target's (token" in refused.one_line
    assert "drafters.foreign.vocabulary: intersection" in refused.one_line
    drafter += ("--set", "drafters.foreign.vocabulary=intersection")
    greedy = ("--temperature", "0", "--json", "--prompt", "def naïve(")
    answer = tiny_copy.specctl("generate", *drafter, *greedy)
    assert answer.json["token_ids"] == tiny_copy.specctl("generate", "--drafter", "none", *greedy).json["token_ids"]
    assert re.search(r"drafter foreign drafts 2\d\d of the target's 300 tokens", answer.err)
    answer = tiny_copy.specctl("verify", "--tokens", "300", "--k", "3", *drafter, "--json")
    assert answer.code == 0, answer.out
    (rescored,) = [finding for finding in answer.json["findings"] if finding["part"] == "rescore"]
    assert rescored["figures"]["num_q"] > 100


def test_texts_that_outgrow_the_draft_when_spelt_are_said_to_be_skipped(
    tiny_copy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both contexts are of 64 tokens, the target's own, and a text needs more of the draft's."""
    monkeypatch.setattr(verdict, "CASES", verdict.CASES[:1])
    foreign = f"drafters.foreign={{path: '{foreign_draft(tiny_copy, tmp_path, context=64)}', vocabulary: intersection}}"
    answer = tiny_copy.specctl("verify", "--tokens", "200", "--drafter", "foreign", "--set", foreign)
    assert answer.code == 0 and "come from a window of the draft's context" in answer.out


def test_verify_sees_a_stale_token_in_the_drafts_cache(
    tiny_copy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: after a rollback another token stands where the last one that is kept was."""
    right = vocabulary._IntersectedSession.keep

    def wrong(session: vocabulary._IntersectedSession, lengths: tuple[int, ...]) -> None:
        right(session, lengths)
        if session._spelt:
            session._spelt[-1] = 0
            session._session.keep((min(session._session.lengths[0], len(session._spelt) - 1),))

    monkeypatch.setattr(vocabulary._IntersectedSession, "keep", wrong)
    monkeypatch.setattr(verdict, "CASES", verdict.CASES[:1])
    folder = foreign_draft(tiny_copy, tmp_path)
    foreign = f"drafters.foreign={{path: '{folder}', vocabulary: intersection}}"
    answer = tiny_copy.specctl("verify", "--tokens", "300", "--drafter", "foreign", "--set", foreign)
    assert answer.code == 3 and "rows of q wrong" in answer.out


def foreign_draft(run: Run, tmp_path: Path, context: int = 256) -> Path:
    """A random draft with a tokenizer of its own, learned from other text, and rows of padding."""
    folder, tokenizer = tmp_path / "foreign", Tokenizer.train([TEXTS["prose"] * 2], 290)
    tokenizer.save(folder)
    shape = load_checkpoint(run.run_dir / "drafters" / "aligned").shape
    module = Llama(replace(shape, vocab_size=tokenizer.vocab_size + 6, max_position_embeddings=context))
    module.initialise(5)
    with torch.no_grad():
        module.lm_head.weight.mul_(20)
    save_checkpoint(module, folder, tokenizer.end_of_text)
    return folder


def test_tokenizers_that_share_nothing_are_refused(tiny_copy: Run, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    folder = foreign_draft(tiny_copy, tmp_path)
    Backend(models.WordLevel({"def": 0, "return": 1}, unk_token="def")).save(str(folder / "tokenizer.json"))
    for vocabulary_ in ("same", "intersection"):
        foreign = f"drafters.foreign={{path: '{folder}', vocabulary: {vocabulary_}}}"
        answer = tiny_copy.specctl("generate", "--drafter", "foreign", "--set", foreign)
        assert answer.code == 2 and "they share no token" in answer.one_line


def test_a_draft_with_fewer_rows_than_its_own_tokens_is_refused(tiny_copy: Run, tmp_path: Path) -> None:
    folder = foreign_draft(tiny_copy, tmp_path)
    Tokenizer.train([TEXTS["code"], TEXTS["prose"]], 330).save(folder)
    foreign = f"drafters.foreign={{path: '{folder}', vocabulary: intersection}}"
    answer = tiny_copy.specctl("generate", "--drafter", "foreign", "--set", foreign)
    assert answer.code == 2 and "296 vocabulary rows and its tokenizer 330 tokens" in answer.one_line
