"""Medusa heads: the right hidden state, the right shift, the exact law, and files that travel."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakes import CPU, Tiny, enumerated_law, law_of, max_error, random_llama
from safetensors.torch import load_file, save_file
from scipy.stats import chi2
from tiny_run import Answer
from tiny_run import Tiny as Run
from torch import Tensor

from specctl.acceptance import Chance as RuleChance
from specctl.acceptance import Proposal, Verdict, token_rule
from specctl.chance import Chance, SeededChance
from specctl.config import TrainingConfig
from specctl.decoding import plain, speculative
from specctl.drafters.medusa import MedusaDrafter
from specctl.errors import UsageError
from specctl.events import Event, Round
from specctl.models.llama import Llama
from specctl.models.llama_decoder import LlamaDecoder
from specctl.models.medusa import MedusaDecoder, MedusaHeads, MedusaShape
from specctl.models.medusa_checkpoint import load_heads, save_heads
from specctl.models.session import Forward
from specctl.sampling import SamplingLaw
from specctl.stats import collect
from specctl.stopping import StopRules
from specctl.training.blocks import Blocks
from specctl.training.generated_text import _continue
from specctl.training.loop import train
from specctl.training.losses import cross_entropy
from specctl.training.medusa_heads import MedusaTask


def random_heads(target: Llama, num_heads: int = 3, seed: int = 5, **sizes: object) -> MedusaHeads:
    """Heads with weights large enough that every layer, bias and head is heard in the logits."""
    shape = MedusaShape(
        num_heads=num_heads,
        hidden_size=target.shape.hidden_size,
        vocab_size=target.shape.vocab_size,
        **{"num_hidden_layers": 1, **sizes},  # type: ignore[arg-type]
    )
    heads = MedusaHeads(shape).to(target.lm_head.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return heads


def drafter(heads: MedusaHeads) -> MedusaDrafter:
    dtype = next(heads.parameters()).dtype
    return MedusaDrafter(MedusaDecoder(heads, dtype=dtype, device=CPU), "medusa")


# The module


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_batched_pass_equals_head_by_head(depth: int, shared: bool, bias: bool) -> None:
    target = random_llama(0)
    sizes = {"num_hidden_layers": depth, "original_lm_head": shared, "medusa_fc_bias": bias}
    heads = random_heads(target, **sizes)
    hidden = torch.randn(8, dtype=torch.float64)
    decoder = MedusaDecoder(heads, dtype=torch.float64, device=CPU)
    for count in (1, 2, 3):
        assert (decoder.logits(hidden, count) - heads(hidden)[:count]).abs().max() < 1e-12
    assert (heads(hidden)[0] - heads(hidden)[1]).abs().max() > 1e-3 or (depth == 0 and shared)


def test_a_new_head_is_the_targets_own() -> None:
    target = random_llama(0)
    shape = MedusaShape(num_heads=2, num_hidden_layers=2, hidden_size=8, vocab_size=3)
    heads = MedusaHeads(shape, target.lm_head.weight).double()
    forward = target(torch.tensor([[0, 1, 2]]))
    assert all(torch.allclose(logits, forward.logits, atol=1e-12) for logits in heads(forward.hidden))


# The law


def speculate(heads: MedusaHeads, target: Tiny, prompt: tuple[int, ...], k: int, law: SamplingLaw, num_tokens: int):  # type: ignore[no-untyped-def]
    def run(chance: Chance) -> Iterator[Event]:
        return speculative(
            target,
            drafter(heads),
            prompt,
            num_speculative_tokens=k,
            law=law,
            chance=chance,
            stop=StopRules(max_new_tokens=num_tokens),
        )

    return enumerated_law(run)


@pytest.mark.parametrize(("k", "num_tokens"), [(1, 4), (2, 4), (3, 4)])
@pytest.mark.parametrize("prompt", [(1,), (0, 1, 1)])
def test_the_law_is_the_targets(k: int, num_tokens: int, prompt: tuple[int, ...]) -> None:
    target = Tiny(random_llama(0, vocab_size=2))
    law = SamplingLaw(temperature=0.8)
    found = speculate(random_heads(target.module), target, prompt, k, law, num_tokens)
    assert max_error(found, law_of(target, prompt, num_tokens, law)) <= 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_greedy_equals_plain(k: int, length: int) -> None:
    target = Tiny(random_llama(1, vocab_size=12, num_hidden_layers=3, max_position_embeddings=128))
    prompt, stop = [3, 1, 4, 1, 5, 9, 2, 6, 5][:length], StopRules(max_new_tokens=60)
    law = SamplingLaw(temperature=0)
    expected, _ = collect(plain(target, prompt, law=law, chance=SeededChance(0), stop=stop))
    heads = random_heads(target.module)
    found, stats = collect(
        speculative(
            target, drafter(heads), prompt, num_speculative_tokens=k, law=law, chance=SeededChance(0), stop=stop
        )
    )
    assert found == expected
    assert stats.num_drafted > stats.num_accepted


def test_a_prompt_of_one_token_begins_with_a_plain_round() -> None:
    target = Tiny(random_llama(0))
    for prompt, drafted in (([1], 0), ([1, 2], 2)):
        events = speculative(
            target,
            drafter(random_heads(target.module)),
            prompt,
            num_speculative_tokens=2,
            law=SamplingLaw(),
            chance=SeededChance(0),
            stop=StopRules(max_new_tokens=9),
        )
        rounds = [event for event in events if isinstance(event, Round)]
        assert rounds[0].num_drafted == drafted and rounds[1].num_drafted == 2


def test_more_tokens_than_heads_are_refused() -> None:
    target = Tiny(random_llama(0))
    events = speculative(
        target,
        drafter(random_heads(target.module)),
        [1, 2],
        num_speculative_tokens=4,
        law=SamplingLaw(),
        chance=SeededChance(0),
        stop=StopRules(max_new_tokens=9),
    )
    with pytest.raises(UsageError, match="medusa has 3 heads and cannot draft 4 tokens"):
        list(events)


# The hidden state and the shift: every q that the loop saw against a pass without a cache


class WrongRow(MedusaDrafter):
    """A planted bug: takes the row before the right one, which the first round cannot show."""

    def observe(self, round_: Round, forward: Forward) -> None:
        self._hidden = forward.hidden[0, max(0, round_.num_accepted - 1)]


class LastRow(MedusaDrafter):
    """A planted bug: takes the last row of the pass, right only where all drafts were accepted."""

    def observe(self, round_: Round, forward: Forward) -> None:
        self._hidden = forward.hidden[0, -1]


def shifted(heads: MedusaHeads) -> MedusaHeads:
    """A planted bug: head i answers for head i + 1."""
    weights = heads.state_dict()
    moved = {name.replace("s.1.", "s.0.", 1): weight for name, weight in weights.items() if "s.1." in name[:9]}
    moved = {**weights, **moved}
    other = MedusaHeads(heads.shape).double()
    other.load_state_dict(moved)
    return other


def largest_error(made: MedusaDrafter, heads: MedusaHeads, target: Tiny) -> float:
    """The largest difference of a q that was used and the one that the heads give on a fresh hidden state."""
    errors: list[float] = []
    rows: list[list[Tensor]] = []

    def watching(p: Tensor, proposal: Proposal, chance: RuleChance) -> Verdict:
        rows.append([proposal.row(torch.tensor(i)) for i in range(len(proposal.ids))])
        return token_rule(p, proposal, chance)

    token_ids = [1, 0, 2]
    events = speculative(
        target,
        made,
        list(token_ids),
        num_speculative_tokens=2,
        law=SamplingLaw(),
        chance=SeededChance(3),
        stop=StopRules(max_new_tokens=40),
        rule=watching,
    )
    kinds = set()
    for event in events:
        if isinstance(event, Round):
            hidden = target.module(torch.tensor([token_ids[:-1]])).hidden[0, -1]
            expected = heads(hidden).softmax(-1)  # [H, V]
            errors += [float((row - expected[i]).detach().abs().max()) for i, row in enumerate(rows[-1])]
            token_ids += event.emitted
            kinds.add(event.num_accepted)
    assert {0, 1, 2} <= kinds
    return max(errors)


def test_the_heads_read_the_right_hidden_state() -> None:
    target = Tiny(random_llama(0, max_position_embeddings=64))
    heads = random_heads(target.module)
    assert largest_error(drafter(heads), heads, target) < 1e-9
    decoder = MedusaDecoder(heads, dtype=torch.float64, device=CPU)
    for planted in (WrongRow(decoder, "wrong"), LastRow(decoder, "last"), drafter(shifted(heads))):
        assert largest_error(planted, heads, target) > 1e-2


# Training


def cycle_target() -> Llama:
    """A target that has learned 0, 1, .., 7, 0, .. by heart."""
    from specctl.training.language_model import LanguageModelTask

    module = random_llama(
        0, 0.2, vocab_size=8, hidden_size=16, intermediate_size=32, max_position_embeddings=128
    ).float()
    ids = torch.arange(600).remainder(8).numpy().astype("uint16")
    config = TrainingConfig(
        steps=150, batch_size=4, block_size=16, learning_rate=1e-2, warmup_steps=5, eval_interval=150
    )
    blocks = Blocks(ids, 16, "train")
    train(LanguageModelTask(module=module, held_out=blocks.spread(4), config=config), "target", blocks, config)
    return module.eval()


@pytest.fixture(scope="module")
def cycle() -> Llama:
    return cycle_target()


class Late:
    """A planted bug: a task whose labels come one position late."""

    def __init__(self, task: MedusaTask) -> None:
        self.module, self.evaluate = task.module, task.evaluate
        self._task = task

    def loss(self, blocks: Tensor) -> Tensor:
        hidden, _ = self._task._read(blocks[:, :-1])
        late = self._task._predictions(hidden)
        losses = [cross_entropy(found, blocks[:, 3 + head :]) for head, found in late]
        return torch.stack(losses).mean()


def trained_heads(target: Llama, loss: str, late: bool = False) -> tuple[MedusaHeads, dict[str, float]]:
    """Heads trained on the cycle."""
    ids = torch.arange(600).remainder(8).numpy().astype("uint16")
    blocks = Blocks(ids, 16, "train")
    shape = MedusaShape(num_heads=3, num_hidden_layers=1, hidden_size=16, vocab_size=8)
    heads = MedusaHeads(shape, target.lm_head.weight)
    task = MedusaTask(module=heads, target=target, held_out=blocks.spread(4), batch_size=4, loss_kind=loss)  # type: ignore[arg-type]
    config = TrainingConfig(
        steps=150, batch_size=4, block_size=16, learning_rate=1e-2, warmup_steps=5, eval_interval=50
    )
    report, _ = train(Late(task) if late else task, "medusa", blocks, config)
    return heads.eval(), report.figures


@pytest.mark.parametrize("loss", ["ce", "kl", "acceptance"])
def test_a_cycle_is_learned_by_every_head(cycle: Llama, loss: str) -> None:
    """The corpus "abcdefgh" repeated: every head right, acceptance 1, heads + 1 tokens a pass."""
    heads, figures = trained_heads(cycle, loss)
    assert [figures[f"head_{i}_top_1"] for i in range(3)] == [1, 1, 1]
    assert figures["expected_acceptance_length"] > 3.9
    decoder = Tiny(cycle, dtype=torch.float32)
    greedy = SamplingLaw(temperature=0)
    events = speculative(
        decoder,
        drafter(heads),
        [0, 1, 2],
        num_speculative_tokens=3,
        law=greedy,
        chance=SeededChance(0),
        stop=StopRules(max_new_tokens=80),
    )
    token_ids, stats = collect(events)
    assert token_ids == [(3 + i) % 8 for i in range(80)]
    assert stats.acceptance_rate == 1 and stats.num_rounds == 20
    _, sampled = collect(
        speculative(
            decoder,
            drafter(heads),
            [0, 1, 2],
            num_speculative_tokens=3,
            law=SamplingLaw(),
            chance=SeededChance(0),
            stop=StopRules(max_new_tokens=80),
        )
    )
    assert sampled.mean_acceptance_length is not None and sampled.mean_acceptance_length > 3.5


def test_labels_of_the_wrong_position_are_seen(cycle: Llama) -> None:
    _, figures = trained_heads(cycle, "ce", late=True)
    assert figures["head_0_top_1"] == 0 and figures["expected_acceptance_length"] < 1.2


def test_figures_are_those_of_a_count_by_hand() -> None:
    target = random_llama(0, vocab_size=6).float()
    heads = random_heads(target, num_heads=2)
    blocks = torch.randint(6, (3, 9), generator=torch.Generator().manual_seed(0))
    task = MedusaTask(module=heads, target=target, held_out=blocks, batch_size=2, loss_kind="kl")
    with torch.no_grad():
        figures = task.evaluate().figures
        forward = target(blocks)
        q, p = heads(forward.hidden).softmax(-1), forward.logits.softmax(-1)
    lengths, hits, divergence = [], [0, 0], [0.0, 0.0]
    for row in range(3):
        for t in range(6):  # both heads are judged
            first = float(torch.minimum(q[0, row, t], p[row, t + 1]).sum())
            second = float(torch.minimum(q[1, row, t], p[row, t + 2]).sum())
            lengths.append(1 + first + first * second)
        for head, last in ((0, 7), (1, 6)):
            for t in range(last):
                hits[head] += int(q[head, row, t].argmax() == blocks[row, t + 2 + head])
                wanted, found = p[row, t + 1 + head], q[head, row, t]
                divergence[head] += float((wanted * (wanted / found).log()).sum()) / (3 * last)
    assert figures["expected_acceptance_length"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-5)
    assert figures["head_0_top_1"] == pytest.approx(hits[0] / 21) and figures["head_1_top_1"] == pytest.approx(
        hits[1] / 18
    )
    assert figures["head_0_top_5"] > figures["head_0_top_1"]
    expected = (divergence[0] + 0.8 * divergence[1]) / 1.8
    assert float(task.loss(blocks).detach()) == pytest.approx(expected, abs=1e-5)
    assert all(weight.grad is None for weight in target.parameters())


# Files


def save_original(heads: MedusaHeads, folder: Path, **config: object) -> None:
    """Write the layout of the original repository."""
    depth, weights = heads.shape.num_hidden_layers, {}
    for name, weight in heads.state_dict().items():
        kind, head, *rest = name.split(".")
        original = f"{head}.{rest[1]}.linear.{rest[2]}" if kind == "blocks" else f"{head}.{depth}.weight"
        weights[original] = weight.contiguous()
    folder.mkdir()
    save_file(weights, folder / "medusa_lm_head.safetensors")
    described = {"medusa_num_heads": heads.shape.num_heads, "medusa_num_layers": depth, "base_model_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps({**described, **config}))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_both_layouts_give_the_same_logits(tmp_path: Path, depth: int, bias: bool) -> None:
    target = random_llama(0)
    heads = random_heads(target, num_hidden_layers=depth, medusa_fc_bias=bias)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    save_heads(heads, tmp_path / "engine", target)
    save_original(heads, tmp_path / "original", **({"medusa_fc_bias": True} if bias else {}))
    for name in ("engine", "original"):
        assert torch.equal(load_heads(tmp_path / name, target)(hidden), heads(hidden))
    biases = [f"blocks.{i}.layers.{j}.bias" for i in range(3) for j in range(depth)] if bias else []
    expected = {f"blocks.{i}.layers.{j}.weight" for i in range(3) for j in range(depth)}
    expected |= {f"lm_heads.{i}.weight" for i in range(3)} | set(biases)
    assert set(load_file(tmp_path / "engine" / "model.safetensors")) == expected
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    sizes = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": depth, "hidden_size": 8, "vocab_size": 3}
    assert sizes.items() <= config.items() and config["medusa_fc_bias"] == bias


def test_a_shared_output_matrix_is_written_once(tmp_path: Path) -> None:
    target = random_llama(0)
    heads = random_heads(target, original_lm_head=True)
    save_heads(heads, tmp_path / "heads", target)
    outputs = [name for name in load_file(tmp_path / "heads" / "model.safetensors") if name.startswith("lm_heads")]
    assert outputs == ["lm_heads.0.weight"]
    hidden = torch.randn(8, dtype=torch.float64)
    assert torch.equal(load_heads(tmp_path / "heads", target)(hidden), heads(hidden))


def test_names_with_a_prefix_are_read(tmp_path: Path) -> None:
    target = random_llama(0)
    heads = random_heads(target)
    save_heads(heads, tmp_path, target)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"medusa_heads.{name}": weight for name, weight in weights.items()}, tmp_path / "model.safetensors")
    hidden = torch.randn(8, dtype=torch.float64)
    assert torch.equal(load_heads(tmp_path, target)(hidden), heads(hidden))


def drop(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors")

    return spoil


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def put(**values: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return spoil


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a key of one head": (drop("blocks.1.layers.0.weight"), "lacks blocks.1.layers.0.weight"),
    "an output matrix": (drop("lm_heads.0.weight"), "lacks lm_heads.0.weight"),
    "truncated": (truncate, "truncated or not safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "is missing"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "another kind": (put(model_type="llama"), "does not describe Medusa heads"),
    "another width": (put(hidden_size=9), "of another target: hidden_size 9, here 8"),
    "another vocabulary": (put(vocab_size=9, truncated_vocab_size=9), "of another target: vocab_size 9, here 3"),
    "a count in quotes": (
        put(num_heads="3"),
        r'config.json has num_heads "3"; it must be a whole number from 1 to 256',
    ),
    "no count": (put(num_heads=None), "config.json has num_heads null; it must be a whole number"),
    "a list for a width": (put(hidden_size=[8]), r"config.json has hidden_size \[8\]; it must be a whole number"),
    "no layers": (put(num_hidden_layers=0), "config.json has num_hidden_layers 0; it must be a whole number"),
    "absurdly many heads": (put(num_heads=10**9), "config.json has num_heads 1000000000; it must be a whole number"),
    "a word for a switch": (put(medusa_fc_bias="no"), 'config.json has medusa_fc_bias "no"; it must be true or false'),
    "fewer heads": (put(num_heads=2), "has the foreign tensor"),
    "more heads": (put(num_heads=4), "lacks blocks.3.layers.0.weight"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_broken_heads_are_refused_in_one_line(tmp_path: Path, what: str) -> None:
    spoil, message = SPOILED[what]
    target = random_llama(0)
    save_heads(random_heads(target), tmp_path, target)
    load_heads(tmp_path, target)
    spoil(tmp_path)
    with pytest.raises(UsageError, match=message) as refused:
        load_heads(tmp_path, target)
    assert "\n" not in str(refused.value)


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    target, other = random_llama(0), random_llama(1)
    save_heads(random_heads(target), tmp_path, target)
    with pytest.raises(UsageError, match="trained on a target with other weights"):
        load_heads(tmp_path, other)


# Through the command line


def test_every_command_takes_heads(tiny: Run) -> None:
    generated = tiny.specctl("generate", "--drafter", "medusa", "--json").json
    assert generated["drafter"] == "medusa" and generated["stats"]["num_drafted"] > 0
    swept = tiny.specctl("sweep-k", "--drafter", "medusa", "--json", "--set", "sweep.k=null").json
    assert [row["k"] for row in swept["rows"]] == [0, 1, 2, 3, 4]  # as many as there are heads
    broken = tiny.specctl("break-it", "--json", "--drafter", "medusa", "--drafter", "aligned").json
    assert [row["name"] for row in broken["rows"]] == ["baseline", "medusa", "aligned"]
    unknown = tiny.specctl("break-it", "--drafter", "medua")
    assert unknown.code == 2 and "no drafter is named 'medua'" in unknown.one_line
    (row,) = [row for row in broken["rows"] if row["name"] == "medusa"]
    assert row["cause"] and row["mean_acceptance_length"] >= 1 and row["cost_ratio"] > 0


def test_greedy_text_is_the_same_with_heads(tiny: Run) -> None:
    greedy = ("--json", "--temperature", "0", "--drafter")
    expected = tiny.specctl("generate", *greedy, "none").json["text"]
    for k in (1, 2, 3, 4):
        assert tiny.specctl("generate", *greedy, "medusa", "--k", str(k)).json["text"] == expected


def test_training_reports_each_head(tiny: Run) -> None:
    report = tiny.specctl("train-medusa", "--json").json
    assert report["name"] == "medusa" and report["num_parameters"] == 4 * (64 * 64 + 64 * 300)
    names = {f"head_{i}_top_{n}" for i in range(4) for n in (1, 5)} | {"expected_acceptance_length"}
    assert report["figures"].keys() == names
    scores = [point["figures"]["expected_acceptance_length"] for point in report["curve"]]
    assert report["figures"]["expected_acceptance_length"] == max(scores)
    answer = tiny.specctl("train-medusa")
    assert "already trained" in answer.err and "Medusa heads" in answer.out and "top-5" in answer.out
    assert (tiny.run_dir / "drafters" / "medusa" / "model.safetensors").is_file()


def test_heads_trained_elsewhere_are_used_and_others_refused(tiny_copy: Run, tmp_path: Path) -> None:
    folder = tmp_path / "heads é"
    shutil.copytree(tiny_copy.run_dir / "drafters" / "medusa", folder)
    elsewhere = ("--drafter", "found", "--set", f"drafters.found={{kind: medusa, path: '{folder}'}}")
    here = tiny_copy.specctl("generate", "--drafter", "medusa", "--json").json
    found = tiny_copy.specctl("generate", *elsewhere, "--json").json
    assert found["token_ids"] == here["token_ids"] and found["stats"]["num_accepted"] == here["stats"]["num_accepted"]
    refused = tiny_copy.specctl("generate", *elsewhere, "--k", "5")
    assert refused.code == 2 and "drafter found has 4 heads and cannot draft K = 5 tokens" in refused.one_line
    tiny_copy.specctl("train-target", "--force", "--set", "target.training.seed=9")
    other = tiny_copy.specctl("generate", *elsewhere, "--set", "target.training.seed=9")
    assert other.code == 2 and "trained on a target with other weights" in other.one_line


def test_heads_go_stale_with_their_target(tiny_copy: Run) -> None:
    lines: list[str] = []
    artefacts = tiny_copy.artefacts("target.training.steps=2", "drafters.medusa.training.steps=2", lines=lines)
    artefacts.heads("medusa")
    assert any("teacher.training.steps was 20, is 2" in line for line in lines)
    assert (tiny_copy.run_dir / "drafters" / "medusa.previous" / "model.safetensors").is_file()


def test_resumed_heads_equal_heads_trained_at_once(tiny_copy: Run) -> None:
    """10 + 10 steps are 20: the loop is that of every training."""
    whole = load_file(tiny_copy.run_dir / "drafters" / "medusa" / "model.safetensors")
    artefacts = tiny_copy.artefacts("drafters.medusa.training.eval_interval=10")
    artefacts.train_again("medusa")
    artefacts.heads("medusa")
    again = load_file(tiny_copy.run_dir / "drafters" / "medusa" / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("generate", ("--drafter", "medusa", "--k", "5"), "drafter medusa has 4 heads and cannot draft K = 5 tokens"),
        ("sweep-k", ("--drafter", "medusa", "--set", "sweep.k=[1,5]"), "has 4 heads and cannot draft K = 5 tokens"),
        ("break-it", ("--k", "5"), "drafter medusa has 4 heads"),
        ("train-medusa", ("--drafter", "aligned"), "drafter aligned has no heads; give it kind: medusa"),
        ("train-medusa", ("--set", "drafters={distilled: {}}"), "no drafter has heads"),
        ("generate", ("--set", "drafters.medusa.path=/no/such"), "/no/such/config.json is missing"),
        ("generate", ("--set", "drafters.medusa.training.block_size=5"), "training.block_size must be 6 or more"),
        ("generate", ("--set", "drafters.medusa.model={}"), "a drafter of kind medusa has no model"),
    ],
)
def test_mistakes_with_heads_are_one_line(tiny: Run, command: str, arguments: tuple[str, ...], says: str) -> None:
    answer = tiny.specctl(command, *arguments, *(("--drafter", "medusa") if command == "generate" else ()))
    assert answer.code == 2 and says in answer.err and "Traceback" not in answer.err


def test_text_that_the_target_writes(tiny_copy: Run) -> None:
    """A corpus of its own: made once, of the asked size, drawn from the target's law, another with another target."""
    written = ("corpora.own={generated_by: target, num_tokens: 3000, validation_fraction: 0.2}",)
    lines: list[str] = []
    artefacts = tiny_copy.artefacts(*written, "drafters.medusa.corpus=own", lines=lines)
    artefacts.heads("medusa")
    assert any("generating own with the target (3,000 tokens)" in line for line in lines)
    train, validation = (artefacts.text.token_ids("own", split) for split in ("train", "validation"))
    assert 3000 <= len(train) + len(validation) <= 8000 and len(validation) > 600
    lines.clear()
    tiny_copy.artefacts(*written, "drafters.medusa.corpus=own", lines=lines, may_train=False).heads("medusa")
    assert lines == []
    tiny_copy.artefacts(*written, "target.training.steps=2", lines=lines).text.token_ids("own", "train")
    assert any("writer.training.steps was 20, is 2" in line for line in lines)
    answer = tiny_copy.specctl("generate", "--set", "corpora.own={generated_by: target}", "--set", "target.corpus=own")
    assert answer.code == 2 and "target.corpus: 'own' is written by the target" in answer.err


def test_what_the_target_writes_has_its_law() -> None:
    """20,000 tokens of a CONST-like target; chi-square with a false-alarm rate of 1e-6."""
    module = random_llama(0, 0.0, vocab_size=4)
    with torch.no_grad():
        module.lm_head.weight.zero_()
        module.model.embed_tokens.weight.fill_(1.0)
        module.lm_head.weight += torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[:, None] / 8
        module.model.norm.weight.fill_(1.0)
    prompts = torch.zeros(200, 4, dtype=torch.int64)
    decoder = LlamaDecoder(module.float(), "target", dtype=torch.float32, device=CPU)
    rows = _continue(decoder, prompts.repeat(9, 1), 16, torch.Generator().manual_seed(0))[:, 4:]
    counts = torch.bincount(rows.flatten(), minlength=4).double()
    expected = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64) * counts.sum()
    assert counts.sum() == 9 * 200 * 12
    assert float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(1e-6, 3)


# What break-it compares unasked


def compared(answer: Answer) -> list[str]:
    assert answer.code == 0, answer.err
    return [row["name"] for row in answer.json["rows"]][1:]


def test_break_it_trains_draft_models_and_no_heads_unasked(tiny_copy: Run) -> None:
    for name in ("mismatched", "medusa"):
        shutil.rmtree(tiny_copy.run_dir / "drafters" / name)
    lookup = ("--set", "drafters.lookup={kind: ngram}")
    answer = tiny_copy.specctl("break-it", "--json", *lookup)
    assert compared(answer) == ["aligned", "distilled", "mismatched", "lookup"]
    assert "training mismatched" in answer.err and "training medusa" not in answer.err
    (line,) = [line for line in answer.err.splitlines() if "left out" in line]
    assert line.startswith("medusa: left out") and "--drafter medusa" in line and "train-medusa" in line
    assert not (tiny_copy.run_dir / "drafters" / "medusa").exists()
    named = tiny_copy.specctl("break-it", "--json", "--drafter", "medusa", "--drafter", "aligned")
    assert compared(named) == ["medusa", "aligned"] and "training medusa" in named.err and "left out" not in named.err
    after = tiny_copy.specctl("break-it", "--json")
    assert compared(after) == ["aligned", "distilled", "mismatched", "medusa"] and "left out" not in after.err


def test_break_it_takes_heads_that_are_there_and_leaves_out_those_of_another_config(tiny_copy: Run) -> None:
    copy = tiny_copy.run_dir.parent / "heads"
    shutil.copytree(tiny_copy.run_dir / "drafters" / "medusa", copy)
    stale = ("--set", "drafters.medusa.num_heads=3", "--set", f"drafters.given={{kind: medusa, path: '{copy}'}}")
    answer = tiny_copy.specctl("break-it", "--json", "--no-train", *stale)
    assert compared(answer) == ["aligned", "distilled", "mismatched", "given"] and "medusa: left out" in answer.err


def test_break_it_trains_heads_where_there_is_nothing_else(tiny_copy: Run) -> None:
    shutil.rmtree(tiny_copy.run_dir / "drafters" / "medusa")
    alone = "drafters={medusa: {kind: medusa, training: {steps: 2, batch_size: 4, block_size: 16, eval_blocks: 8}}}"
    answer = tiny_copy.specctl("break-it", "--json", "--set", alone, "--set", "decoding.drafter=medusa")
    assert compared(answer) == ["medusa"] and "left out" not in answer.err
