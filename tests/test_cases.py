"""Cases from the field, through whole commands: text, vocabularies, devices, honest figures, files.

Each stands for a kind of mistake that tools of this sort have made. Cases of the law, the caches and the
stops stand in the tests of their modules.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import CPU, Clock, Tiny, cycle, llama_shape, random_llama, self_draft
from tiny_run import Tiny as Run

from specctl.chance import SeededChance
from specctl.decoding import plain, speculative
from specctl.errors import SpecctlError
from specctl.models.checkpoint import load_checkpoint, save_checkpoint
from specctl.models.kernel.decoder import why_not_kernel
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaSession
from specctl.sampling import SamplingLaw
from specctl.stats import collect
from specctl.stopping import StopRules
from specctl.tokenizer import TextStream, Tokenizer

GREEDY = SamplingLaw(temperature=0)


@pytest.mark.parametrize("k", range(1, 9))
def test_text_is_streamed_whole_at_every_k(tiny: Run, k: int) -> None:
    """Hot text of a hardly trained model: broken characters in the middle, whole ones over token borders."""
    hot = ("--k", str(k), "--temperature", "3", "--drafter", "aligned", "--set", "decoding.max_new_tokens=40")
    text = tiny.specctl("generate", "--json", *hot).json["text"]
    assert tiny.specctl("generate", *hot).out == f"def {text}\n"


@pytest.mark.parametrize(
    "text", ["naïve café 中文 🙂🙃", "\" of 'x' , y\"\n    indented\n\ttab", "e\u0301 ﷽ \U0001f468\u200d\U0001f469"]
)
def test_every_split_of_a_text_streams_byte_for_byte(text: str) -> None:
    tokenizer = Tokenizer.train(["plain text, nothing special"], 257)
    ids = tokenizer.encode(text)
    for width in range(1, 10):
        stream = TextStream(tokenizer)
        pieces = [stream.push(ids[start : start + width]) for start in range(0, len(ids), width)] + [stream.finish()]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_rows_of_padding_are_never_drafted_and_never_emitted(tiny_copy: Run, tmp_path: Path) -> None:
    """Target and draft of one tokenizer, each with padding of its own, whose logits are the largest of all."""
    folders = []
    for name, num_rows in (("target", 320), ("drafters/aligned", 363)):
        folder = tmp_path / f"padded {num_rows}"
        shutil.copytree(tiny_copy.run_dir / name, folder)
        module, entries = load_checkpoint(folder), tiny_copy.artefacts().tokenizer.vocab_size
        wide = Llama(replace(module.shape, vocab_size=num_rows))
        weights = module.state_dict()
        for matrix in ("model.embed_tokens.weight", "lm_head.weight"):
            padding = 50 * weights[matrix][:1].repeat(num_rows - entries, 1)
            padding[::2] *= -1  # whichever sign the first row's logit has, a half of them is the largest
            weights[matrix] = torch.cat((weights[matrix], padding))
        wide.load_state_dict(weights)
        save_checkpoint(wide, folder, 0)
        folders.append(folder)
    sets = ("--set", f"target.path={folders[0]}", "--set", f"drafters.aligned.path={folders[1]}")
    for arguments in (("--drafter", "aligned"), ("--drafter", "none")):
        common = ("--json", *arguments, "--set", "decoding.max_new_tokens=40")
        padded = tiny_copy.specctl("generate", *common, *sets)
        assert padded.code == 0, padded.err
        assert padded.json["token_ids"] == tiny_copy.specctl("generate", *common).json["token_ids"]
    logprobs = tiny_copy.specctl("generate", *common, *sets, "--set", "decoding.logprobs=2").json["logprobs"]
    assert all(token_id < entries for token in logprobs for token_id, _ in token["alternatives"])
    written = tiny_copy.artefacts(sets[1], "corpora.own={generated_by: target, num_tokens: 300}")
    assert max(written.text.token_ids("own", "train")) < entries  # nor in text that the target writes for a draft


def test_a_copy_of_the_target_accepts_everything_and_pays_for_it(
    tiny_copy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SELF: acceptance 1, a draft step as dear as a target step, and a speedup that is not hidden.

    In float64, in which passes over one row and over more give the same p and q but for 1e-15. A pass takes a second,
    and one that verifies three drafts half a second more.
    """
    clock = Clock(monkeypatch, "decoding", "experiments.timing")
    seconds = lambda session, ids, *_, **__: 1.5 if ids.shape[1] == 4 else 1.0  # noqa: E731
    monkeypatch.setattr(LlamaSession, "extend", clock.slowed(LlamaSession.extend, seconds))
    copied = f"drafters={{itself: {{path: '{tiny_copy.run_dir / 'target'}'}}}}"
    fields = (copied, "decoding.drafter=itself", "runtime.dtype=float64")
    overrides = [part for override in fields for part in ("--set", override)]
    document = tiny_copy.specctl("break-it", "--json", *overrides).json
    (row,) = [row for row in document["rows"] if row["name"] == "itself"]
    assert row["acceptance_rate"] == 1 and row["expected_acceptance"] == pytest.approx(1, abs=1e-5)
    assert (row["mean_acceptance_length"], row["cost_ratio"]) == (4.0, 1.0)
    assert row["speedup"] == pytest.approx(4 / (3 + 1.5))
    assert row["cause"] == "draft cost" and row["speedup"] < 1
    (said,) = [line for line in document["conclusions"] if line.startswith("itself: ")]
    assert "costly draft, 1.00 target steps a token, alpha 1.00" in said


def test_itself_as_draft_at_any_temperature() -> None:
    """Acceptance 1 in every round, with 40 passes for 200 tokens, caches and all."""
    target = Tiny(random_llama(0, 0.5, vocab_size=12, num_hidden_layers=3, max_position_embeddings=256))
    for law in (GREEDY, SamplingLaw(), SamplingLaw(temperature=0.7, top_p=0.8, min_p=0.05)):
        _, stats = collect(
            speculative(
                target,
                self_draft(target),
                [1, 2, 3],
                num_speculative_tokens=4,
                law=law,
                chance=SeededChance(0),
                stop=StopRules(max_new_tokens=200),
            )
        )
        assert stats.acceptance_rate == 1 and stats.num_rounds <= 41


def test_unequal_rows_are_refused_by_name() -> None:
    """A batch of unequal prompts is not supported, and says so rather than mixing rows."""
    session = Tiny(random_llama(0)).session(2)
    session.extend(torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(SpecctlError, match="rows of unequal length are not supported"):
        session.keep((1, 2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["aligned", "medusa"])
def test_other_precisions_decode_greedily_alike(tiny: Run, dtype: str, kind: str) -> None:
    """Target and draft are cast alike; in one precision greedy text does not depend on the drafter here."""
    if dtype == "bfloat16" and why_not_kernel(tiny.pair().target.shape, torch.bfloat16, CPU):
        pytest.skip("torch's operators round passes of another width otherwise, in bfloat16 visibly")
    common = ("--json", "--temperature", "0", "--set", f"runtime.dtype={dtype}", "--drafter")
    texts = [tiny.specctl("generate", *common, name).json["text"] for name in ("none", kind)]
    assert texts[0] == texts[1]


def test_a_width_that_heads_do_not_divide_works(tmp_path: Path) -> None:
    """Head size is a field of its own: 3 heads of 8 on a width of 20."""
    shape = llama_shape(hidden_size=20, num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    module = Llama(shape).double()
    module.initialise(0)
    model = Tiny(module)
    logits = model.session().extend(torch.tensor([[0, 1, 2]])).logits[0, -1]
    assert (logits - model.logits_after([0, 1, 2])).abs().max() < 1e-12
    assert CPU.type == "cpu"


def test_a_cap_cuts_an_accepted_stop_token_nowhere_else() -> None:
    """10, 11, STOP, 20, 21 accepted together, cap 5: 10, 11, STOP, reason "stop"."""
    target = cycle(30)
    stop = StopRules(max_new_tokens=5, stop_token_ids=frozenset({12}))
    run = speculative(
        target,
        self_draft(target),
        [9],
        num_speculative_tokens=4,
        law=GREEDY,
        chance=SeededChance(0),
        stop=stop,
    )
    token_ids, stats = collect(run)
    assert (token_ids, stats.reason) == ([10, 11, 12], "stop")
    assert (token_ids, stats.reason) == (lambda found: (found[0], found[1].reason))(
        collect(plain(target, [9], law=GREEDY, chance=SeededChance(0), stop=stop))
    )


def test_requests_leave_nothing_behind(tiny: Run, tmp_path: Path) -> None:
    """A, B, A in one process equal the same prompts alone, for every drafter."""
    prompts = ["def a", "import b", "def a"]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    for drafter in ("none", "distilled", "medusa", "lookup"):
        common = ("--json", "--drafter", drafter, "--temperature", "0", "--set", "drafters.lookup.kind=ngram")
        together = tiny.specctl("generate", *common, "--prompts", str(tmp_path / "three.jsonl")).json["generations"]
        alone = [tiny.specctl("generate", *common, "--prompt", prompt).json["text"] for prompt in prompts]
        assert [line["text"] for line in together] == alone
