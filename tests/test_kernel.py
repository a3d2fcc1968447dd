"""The C++ pass against the module, against itself bit for bit, and what happens where it cannot be built."""

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fakes import CPU, random_llama
from tiny_run import Tiny
from torch import Tensor

from specctl.chance import SeededChance, inverse_cdf
from specctl.continuation import by_session, draw_with, step_by_step
from specctl.decoding import plain, speculative
from specctl.drafters.draft_model import DraftModel
from specctl.errors import NumericalError, SpecctlError, UsageError
from specctl.events import Round
from specctl.experiments.verify.verdict import allowed_gap
from specctl.models import backend
from specctl.models.kernel import layout
from specctl.models.kernel.decoder import KernelDecoder, KernelSession, why_not_kernel
from specctl.models.llama import Llama, RopeScaling
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.session import CausalModel, Drawn
from specctl.models.vocabulary import trimmed
from specctl.sampling import History, SamplingLaw
from specctl.stopping import StopRules

SIZES = {
    "vocab_size": 19,  # not a whole number of blocks, nor is the feed-forward width
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
}
IDS = torch.randint(0, 19, (1, 90), generator=torch.Generator().manual_seed(0))
SWITCHES = {name: True for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")}


def model(seed: int = 0, **sizes: object) -> Llama:
    return random_llama(seed, 0.2, **{**SIZES, **sizes}).float()


def decoder(module: Llama, threads: int = 1, dtype: torch.dtype = torch.float32) -> KernelDecoder:
    reason = why_not_kernel(module.shape, dtype, CPU)
    if reason is not None:
        pytest.skip(reason)
    made = KernelDecoder(module, "m", dtype=dtype)
    made.threads = threads
    return made


def rows_of(made: CausalModel, lengths: list[int], ids: Tensor = IDS) -> Tensor:
    """Logits of ids read in passes of these lengths, in turn until all is read."""
    session, rows = made.session(), []
    while (done := session.lengths[0]) < ids.shape[1]:
        length = lengths[len(rows) % len(lengths)]
        rows.append(session.extend(ids[:, done : done + length]).logits[0])
    return torch.cat(rows)


def exact(module: Llama, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(module).double().eval()(ids).logits[0]


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("switches", [{}, SWITCHES], ids=["plain", "every switch"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_kernel_equals_the_module(num_key_value_heads: int, switches: dict[str, bool], tied: bool) -> None:
    module = model(num_key_value_heads=num_key_value_heads, tie_word_embeddings=tied, **switches)
    forward = decoder(module).session().extend(IDS)
    expected = exact(module)
    assert (forward.logits[0] - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (forward.hidden - module(IDS).hidden).abs().max() < 1e-4


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_heads_of_any_size_and_scaled_positions(head_dim: int) -> None:
    rope = RopeScaling(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
    module = model(head_dim=head_dim, rope_scaling=rope)
    expected = exact(module)
    assert (rows_of(decoder(module, threads=2), [7]) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("lengths", [[1], [2], [3], [4], [5], [6], [7], [9], [13], [30], [1, 6, 25, 2]], ids=str)
def test_a_token_has_the_same_bits_in_whatever_pass_it_comes(threads: int, lengths: list[int]) -> None:
    module = model(**SWITCHES)
    whole = rows_of(decoder(module), [90])
    assert torch.equal(rows_of(decoder(module, threads), lengths), whole)


def test_the_same_bits_after_a_rollback() -> None:
    """Case 12."""
    made = decoder(model(), threads=2)
    session, rows = made.session(), []
    for start in range(0, 90, 3):
        session.extend(torch.full((1, 5), 7))  # a wrong draft
        session.keep((start,))
        rows.append(session.extend(IDS[:, start : start + 3]).logits[0])
    assert torch.equal(torch.cat(rows), rows_of(made, [90]))


def test_the_same_bits_beside_other_sequences_and_threads_of_the_program() -> None:
    made = decoder(model(), threads=2)
    expected = rows_of(made, [5])
    session = made.session(2)
    both = torch.cat((IDS, IDS.flip(1)))
    rows = torch.cat([session.extend(part).logits[0] for part in both.split(5, dim=1)])
    assert torch.equal(rows, expected) and session.lengths == (90, 90)
    found: list[Tensor] = []
    jobs = [threading.Thread(target=lambda: found.append(rows_of(made, [5]))) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(found) == 4 and all(torch.equal(rows, expected) for rows in found)


def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    module = model(max_position_embeddings=2100, num_hidden_layers=1)
    ids = torch.randint(0, 19, (1, 2100), generator=torch.Generator().manual_seed(1))
    made = decoder(module, threads=2)
    rows = rows_of(made, [1000, 20, 7, 1073], ids)
    expected = exact(module, ids)
    assert (rows - expected).abs().max() < 1e-5 * expected.abs().max()


def test_weights_that_are_bfloat16_numbers_take_half_the_bytes_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = model(tie_word_embeddings=True, **SWITCHES)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())
    narrow = decoder(module)
    monkeypatch.setattr(layout, "narrowed", lambda weight, dtype: weight.float())
    wide = decoder(module)
    assert wide.pass_bytes == 2 * narrow.pass_bytes
    for lengths in ([1], [5], [8], [40]):  # from 19 rows on they are widened ahead
        assert torch.equal(rows_of(narrow, lengths), rows_of(wide, lengths))


def test_bfloat16_rounds_the_weights_alone() -> None:
    module, rounded = model(), model()
    with torch.no_grad():
        for weight in rounded.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.bfloat16())
    made = decoder(module, dtype=torch.bfloat16)
    assert made.pass_bytes * 2 == decoder(module).pass_bytes
    assert torch.equal(rows_of(made, [6]), rows_of(decoder(rounded), [6]))


def test_fewer_logits_are_the_last() -> None:
    made = decoder(model())
    every, last = made.session(2).extend(IDS.expand(2, -1)), made.session(2).extend(IDS.expand(2, -1), num_logits=2)
    assert torch.equal(last.logits, every.logits[:, -2:]) and torch.equal(last.hidden, every.hidden[:, -2:])


def test_padding_is_never_computed_or_read() -> None:
    """Case 17's kind: rows of padding, here with the largest logits of all."""
    module = model(vocab_size=50)
    with torch.no_grad():
        module.lm_head.weight[37:] *= 100
    whole = decoder(module, threads=2)
    cut = trimmed(whole, 37)
    assert cut.vocab_size == 37 and trimmed(whole, 50) is whole
    ids = IDS[:, :20]
    assert torch.equal(cut.session().extend(ids).logits, whole.session().extend(ids).logits[..., :37])
    drawn = cut.session().draw(ids, 30, 1.0, torch.rand(30, dtype=torch.float64))
    drawn_ids, probs = drawn.ids, drawn.probs
    assert probs is not None
    assert drawn_ids.max() < 37 and probs.shape == (31, 37) and whole.vocab_size == 50
    with pytest.raises(IndexError, match="no token 37"):
        cut.session().extend(torch.tensor([[37]]))
    with pytest.raises(UsageError, match="50 vocabulary rows for 51"):
        trimmed(whole, 51)


def test_used_up_weights_are_let_go_and_not_missed() -> None:
    module = model()
    expected = rows_of(decoder(module), [9])
    made = KernelDecoder(module, "m", dtype=torch.float32, use_up=True)
    assert module.lm_head.weight.numel() == 0 and torch.equal(rows_of(made, [9]), expected)


def test_a_full_context_unequal_rows_and_unknown_tokens_are_refused() -> None:
    session = decoder(model(max_position_embeddings=90)).session()
    session.extend(IDS)
    with pytest.raises(SpecctlError, match="context is full: 91 tokens, room for 90"):
        session.extend(IDS[:, :1])
    with pytest.raises(SpecctlError, match="unequal"):
        session.keep((1, 2))
    session.keep((5,))
    for unknown in (19, -1):
        with pytest.raises(IndexError, match=f"m has no token {unknown}"):
            session.extend(torch.tensor([[1, unknown]]))
    assert session.lengths == (5,)


def test_what_is_not_a_pass_is_refused_and_changes_nothing() -> None:
    """The kernel itself checks nothing: what it is given must be right."""
    made = decoder(model())
    session = made.session(2)
    both = IDS[:, :4].expand(2, -1)
    uniforms = torch.rand(2, dtype=torch.float64)
    for wrong in (
        lambda: session.extend(IDS[:, :4]),  # one sequence of two
        lambda: session.extend(both[:, :0]),
        lambda: session.extend(both, num_logits=0),
        lambda: session.extend(both, num_logits=5),
        lambda: session.extend(both.float()),
        lambda: session.extend(both.to("meta")),
        lambda: session.draw(both, 2, 1.0, uniforms),
        lambda: made.session().draw(IDS[:, :4], 0, 1.0, uniforms[:0]),
        lambda: made.session().draw(IDS[:, :4], 3, 1.0, uniforms),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert session.lengths == (0, 0)
    narrow, wide = (made.session().extend(ids).logits for ids in (IDS.int(), IDS))
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("value", [-1e38, -1e30, -200.0, -88.5, -87.5])
def test_a_gate_far_below_zero_is_closed(value: float) -> None:
    module = model(mlp_bias=True)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.mlp.gate_proj.weight.zero_()  # type: ignore[union-attr]
            layer.mlp.gate_proj.bias.fill_(value)  # type: ignore[union-attr]
    expected = exact(module)
    assert (rows_of(decoder(module), [6]) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_runs_passes_of_its_own() -> None:
    """While helpers are on their way to sleep, which left a lock of theirs held in the child."""
    script = """
import os, random, sys, time, torch
sys.path.insert(0, os.environ["HERE"])
from test_kernel import IDS, decoder, model
made = decoder(model(), threads=4)
session = made.session()
expected = session.extend(IDS).logits
for trial in range(40):
    session.keep((0,))
    session.extend(IDS)
    time.sleep(random.random() * 0.003)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(made.session().extend(IDS).logits, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    decoder(model())  # skips where there is no kernel
    environment = {**os.environ, "HERE": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "done", done.stderr


def test_greedy_speculation_writes_the_very_tokens_of_plain_decoding() -> None:
    """Equal logits would be enough for that, and here they are equal to the last bit."""
    target = decoder(model(0, vocab_size=50), threads=2)
    draft = decoder(model(0, vocab_size=50, num_hidden_layers=1))
    law, prompt = SamplingLaw(temperature=0.0), [3, 1, 4]
    rules = StopRules(max_new_tokens=80)

    def tokens(k: int) -> list[int]:
        chance = SeededChance(0, 0)
        events = (
            speculative(
                target,
                DraftModel(draft, "draft"),
                prompt,
                num_speculative_tokens=k,
                law=law,
                chance=chance,
                stop=rules,
            )
            if k
            else plain(target, prompt, law=law, chance=chance, stop=rules)
        )
        rounds = [event for event in events if isinstance(event, Round)]
        return [token for event in rounds for token in event.emitted]

    expected = tokens(0)
    assert len(set(expected)) > 3
    assert all(tokens(k) == expected for k in range(1, 9))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.gate_proj.weight"])
def test_weights_that_are_not_finite_are_noticed(value: float, name: str) -> None:
    module = model()
    with torch.no_grad():
        module.get_parameter(name)[3] = value
    events = plain(
        decoder(module), [1, 2], law=SamplingLaw(), chance=SeededChance(0, 0), stop=StopRules(max_new_tokens=4)
    )
    with pytest.raises(NumericalError, match="m produced NaN or infinite logits"):
        list(events)


def test_what_it_does_not_take_is_said() -> None:
    shape = model().shape
    assert "CPU" in str(why_not_kernel(shape, torch.float32, torch.device("cuda")))
    assert "not float64" in str(why_not_kernel(shape, torch.float64, CPU))
    assert "multiples of 8" in str(why_not_kernel(model(head_dim=8).shape, torch.float32, CPU))


def test_it_can_be_left_out_or_asked_for() -> None:
    assert isinstance(backend.decoder(model(), "m", dtype=torch.float32, device=CPU, kernel=False), LlamaDecoder)
    decoder(model())
    assert isinstance(backend.decoder(model(), "m", dtype=torch.float32, device=CPU, kernel=True), KernelDecoder)
    with pytest.raises(UsageError, match=r"runtime.kernel: m cannot run through it: .*float32"):
        backend.decoder(model(), "m", dtype=torch.float64, device=CPU, kernel=True)


# ---- Drawing tokens in one call ----


def drawn(made: KernelDecoder, law: SamplingLaw, seed: int, count: int, feed: list[int], *, at_once: bool) -> Drawn:
    """Tokens after a prompt and `feed`, in one call or step by step."""
    session, chance = made.session(), SeededChance(seed, 0)
    chance.begin_round(0)
    session.extend(IDS[:, :9])
    draw = draw_with(made, law) if at_once else step_by_step
    history = History(token_ids=[*IDS[0, :9].tolist(), *feed], prompt_length=9)
    found = draw(session, torch.tensor([feed]), count, law=law, history=history, chance=chance)
    assert session.lengths == (9 + len(feed) + count - 1,)
    return found


def test_verify_takes_no_difference_for_a_tie(tiny: Tiny) -> None:
    pair, by_steps = tiny.pair(), tiny.pair("runtime.kernel=false")
    if not isinstance(pair.target, KernelDecoder):
        pytest.skip("no kernel")
    assert allowed_gap(pair) == 0 < allowed_gap(by_steps)


def test_a_run_draws_in_one_call(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of a run names its end tokens, which changes nothing as long as no shortest output is asked for."""
    pair = tiny.pair()
    if not isinstance(pair.target, KernelDecoder):
        pytest.skip("no kernel")
    calls: list[int] = []
    draw = KernelSession.draw
    monkeypatch.setattr(KernelSession, "draw", lambda self, *given: calls.append(given[1]) or draw(self, *given))
    for k, name in ((0, "none"), (3, "distilled")):
        list(pair.events(pair.prompts(1)[0], drafter=name, k=k, stop=StopRules(max_new_tokens=8)))
    assert calls.count(1) >= 8 and calls.count(3) >= 1
    calls.clear()
    pair = tiny.pair("decoding.min_new_tokens=4")
    list(pair.events(pair.prompts(1)[0], drafter="none", k=0))
    assert not calls


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-30, 3.0, 0.0])
@pytest.mark.parametrize("vocab_size", [19, 50, 300])
def test_what_is_drawn_in_one_call_is_what_is_drawn_step_by_step(temperature: float, vocab_size: int) -> None:
    """The rows are equal but for rounding, which decides a token alone where a uniform lies between two."""
    made, law = decoder(model(vocab_size=vocab_size), threads=2), SamplingLaw(temperature=temperature)
    seen = set()
    for seed in range(40):
        feed = [3] if seed % 2 else [3, 1]
        mine = drawn(made, law, seed, 5, feed, at_once=True)
        theirs = drawn(made, law, seed, 5, feed, at_once=False)
        chance = SeededChance(seed, 0)
        chance.begin_round(0)
        num_equal = int((mine.ids == theirs.ids).cumprod(0).sum())
        assert (mine.mass - theirs.mass)[:num_equal].abs().max() < 1e-6 or not num_equal
        if temperature == 0:  # point masses: no row of V numbers for each token
            assert mine.probs is None and theirs.probs is None and (mine.mass == 1).all()
        else:
            assert mine.probs is not None and theirs.probs is not None
            for row, token_id, uniform in zip(mine.probs[:5], mine.ids, chance.uniforms(5).split(1), strict=True):
                assert inverse_cdf(row, uniform) == token_id
            assert (mine.probs - theirs.probs)[: num_equal + 1].abs().max() < 1e-6 and not mine.probs[5].any()
            assert torch.equal(mine.probs[:5].gather(1, mine.ids[:, None])[:, 0], mine.mass) and mine.mass.min() > 0
        if num_equal == 5:
            assert (mine.hidden - theirs.hidden).abs().max() < 1e-5
        seen.add(tuple(mine.ids.tolist()))
    assert len(seen) <= 2 if temperature < 1e-9 else len(seen) > 10


def test_a_law_of_more_than_a_temperature_is_followed_step_by_step() -> None:
    made = decoder(model())
    assert draw_with(made, SamplingLaw(temperature=0.3)) is by_session
    with pytest.raises(ValueError, match="temperature alone"):
        history = History(token_ids=[1], prompt_length=1)
        by_session(made.session(), IDS[:, :1], 1, law=SamplingLaw(top_k=1), history=history, chance=SeededChance(0))
    for law in (SamplingLaw(top_k=1), SamplingLaw(banned_token_ids=(3,)), SamplingLaw(frequency_penalty=50.0)):
        found = [drawn(made, law, seed, 8, [3], at_once=True).ids.tolist() for seed in range(20)]
        assert found == [drawn(made, law, seed, 8, [3], at_once=False).ids.tolist() for seed in range(20)]
        if law.top_k:
            assert len({tuple(ids) for ids in found}) == 1
        elif law.banned_token_ids:
            assert not any(3 in ids for ids in found)
        else:
            assert all(len(set(ids)) == 8 for ids in found)


def test_tokens_without_probability_are_not_drawn() -> None:
    """Case A8's kind: logits of minus infinity, at the ends and between, and whatever uniform."""
    module = model()
    made = decoder(module)
    session = made.session()
    with torch.no_grad():
        biased = copy.deepcopy(module)
        hidden = session.extend(IDS[:, :1]).hidden[0, 0]
        for token in (0, 7, 18):  # rows that make the logit far below all others
            biased.lm_head.weight[token] = -hidden * 1e6
    made = decoder(biased)
    for uniform in (0.0, 0.5, 1 - 2**-53, 1.0):
        drawn = made.session().draw(IDS[:, :1], 1, 1.0, torch.tensor([uniform], dtype=torch.float64))
        ids, probs = drawn.ids, drawn.probs
        assert probs is not None and drawn.mass == probs[0, ids]
        assert (probs[0, [0, 7, 18]] == 0).all() and probs[0, ids] > 0
        assert abs(probs[0].double().sum().item() - 1) < 1e-6


def test_the_lowest_of_equal_maxima_is_greedy() -> None:
    module = model()
    with torch.no_grad():
        module.lm_head.weight[5:9] = module.lm_head.weight[5]
        hidden = decoder(module).session().extend(IDS[:, :1]).hidden[0, 0]
        module.lm_head.weight[5:9] = hidden * 100
    drawn = decoder(module).session().draw(IDS[:, :1], 1, 0.0, torch.tensor([0.9], dtype=torch.float64))
    assert drawn.ids.tolist() == [5] and drawn.mass.tolist() == [1] and drawn.probs is None


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_draft_that_is_not_finite_is_named(temperature: float) -> None:
    broken = model()
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    events = speculative(
        decoder(model()),
        DraftModel(decoder(broken), "the draft"),
        [1, 2],
        num_speculative_tokens=3,
        law=SamplingLaw(temperature=temperature),
        chance=SeededChance(0, 0),
        stop=StopRules(max_new_tokens=9),
    )
    with pytest.raises(NumericalError, match="the draft produced NaN"):
        list(events)
