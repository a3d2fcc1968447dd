"""Models behind transformers: the same logits, the same text, the same refusals, and drafts trained for them.

Checkpoints are random and tiny; nothing is downloaded.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import Answer, Tiny, specctl

from specctl.config_file import load_config
from specctl.errors import Interrupted, SpecctlError, UsageError
from specctl.events import Round
from specctl.experiments.pair import Pair
from specctl.experiments.verify import verdict
from specctl.experiments.verify.enumeration import CASES
from specctl.models import hf
from specctl.models.backend import NATIVE, choose_backend, writer
from specctl.models.hf import HFModel, HFModule, load_module
from specctl.models.hf_folder import find_folder
from specctl.tokenizer import Tokenizer
from specctl.training import generated_text
from specctl.training.ensure import Artefacts
from specctl.training.generated_text import SEQUENCES_AT_ONCE, in_turn

tf = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
RUN = """
run_dir: {folder}/run
runtime: {{device: cpu, threads: 1}}
corpora:
  code: {{paths: ["{folder}/code"], validation_fraction: 0.2}}
  asked: {{generated_by: target, prompts: "{folder}/prompts.txt", num_tokens: 600, validation_fraction: 0.2}}
target: {{corpus: code, path: "{folder}/gpt2"}}
drafters:
  neox: {{path: "{folder}/neox"}}
  llama: {{path: "{folder}/llama"}}
  distilled: &draft {{corpus: code, model: {{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 1,
    num_key_value_heads: 1, intermediate_size: 48, head_dim: 32, max_position_embeddings: 64}},
    training: {{loss: kl, steps: 12, batch_size: 4, block_size: 16, learning_rate: 1e-2, eval_blocks: 4}}}}
  medusa: {{kind: medusa, num_heads: 3, training: {{steps: 8, batch_size: 4, block_size: 16, eval_blocks: 4}}}}
decoding: {{drafter: neox, max_new_tokens: 12, num_speculative_tokens: 3, prompt: "def "}}
sweep: {{k: [0, 2], num_prompts: 2, prompt_tokens: 8, max_new_tokens: 12, repeats: 1}}
"""


def models(vocab_size: int) -> dict[str, Callable[[], Any]]:
    """Families by the names of their folders."""
    ids = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    some = {**SIZES, **ids, "max_position_embeddings": 96}
    return {
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=96, **ids)),
        "padded": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=96, **{**ids, "vocab_size": vocab_size + 7})
        ),
        "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**some)),
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**some)),
        "window": lambda: tf.MistralForCausalLM(tf.MistralConfig(**some, num_key_value_heads=1, sliding_window=4)),
        "opt": lambda: tf.OPTForCausalLM(
            tf.OPTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                ffn_dim=48,
                word_embed_proj_dim=16,
                max_position_embeddings=96,
                **ids,
            )
        ),
        "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4, **ids)),
        "bert": lambda: tf.BertLMHeadModel(tf.BertConfig(**SIZES, vocab_size=vocab_size)),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(d_model=32, num_layers=1, num_heads=2, d_ff=48, d_kv=16, vocab_size=vocab_size)
        ),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, its text, and a checkpoint of each family: matrices so large that every layer is heard."""
    root = tmp_path_factory.mktemp("hf é")
    (root / "code").mkdir()
    for source in sorted(Path(json.__file__).parent.glob("*.py")):
        shutil.copy(source, root / "code" / source.name)
    tokenizer = Tokenizer.train([Path(json.__file__).read_text(encoding="utf-8")], 300)
    for seed, (name, make) in enumerate(models(tokenizer.vocab_size).items()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make()
            for weight in model.parameters():
                if weight.dim() == 2:
                    torch.nn.init.normal_(weight, std=0.25)
        model.save_pretrained(root / name)
        tokenizer.save(root / name)
    (root / "prompts.txt").write_text("def read\nimport\nclass A:\n    def f(self)\nreturn\n", encoding="utf-8")
    (root / "run.yaml").write_text(RUN.format(folder=root), encoding="utf-8")
    return root


def artefacts(folder: Path, run: Path, *overrides: str, lines: list[str] | None = None) -> Artefacts:
    said = [] if lines is None else lines
    return Artefacts(load_config(folder / "run.yaml", [f'run_dir="{run}"', *overrides]), narrate=said.append)


def command(folder: Path, run: Path, *words: str) -> Answer:
    return specctl(words[0], "-c", str(folder / "run.yaml"), "--set", f'run_dir="{run}"', *words[1:])


def text(pair: Pair, prompt: list[int], drafter: str, k: int) -> tuple[list[int], bool]:
    """The tokens after a prompt, and whether any draft was rejected."""
    rounds = [event for event in pair.events(prompt, drafter=drafter, k=k) if isinstance(event, Round)]
    return [token for each in rounds for token in each.emitted], any(r.num_accepted < r.num_drafted for r in rounds)


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "window", "opt"])
def test_logits_are_those_of_transformers(folder: Path, name: str) -> None:
    """Blocks of many widths, with tokens read and taken back between them, for one row and for three."""
    module = load_module(folder / name, torch.float32)
    theirs = tf.AutoModelForCausalLM.from_pretrained(folder / name).eval()
    ids = torch.randint(theirs.config.vocab_size, (3, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = theirs(ids).logits
    assert (module(ids).logits - wanted).abs().max() < 1e-4
    for batch in (1, 3):
        session, chance, at = HFModel(module, name).session(batch), random.Random(0), 0
        while at < 30:
            width = min(chance.choice((1, 2, 3, 6)), 30 - at)
            count = chance.choice((None, 1, width))
            forward = session.extend(ids[:batch, at : at + width], count)
            at += width
            expected = wanted[:batch, at - (count or width) : at]
            assert forward.logits.shape == expected.shape and (forward.logits - expected).abs().max() < 1e-4
            assert (module.lm_head(forward.hidden) - expected).abs().max() < 1e-4
            session.extend(ids[:batch, :2].flip(1), 1)
            session.extend(ids[:batch, 3:4])
            session.keep((at,) * batch)
            assert session.lengths == (at,) * batch
        session.keep((0,) * batch)
        assert (session.extend(ids[:batch]).logits - wanted[:batch]).abs().max() < 1e-4


def test_a_session_refuses_what_does_not_fit(folder: Path) -> None:
    model = HFModel(load_module(folder / "gpt2", torch.float32), "target")
    assert model.context_length == 96 and model.session(2).lengths == (0, 0)
    session = model.session()
    with pytest.raises(SpecctlError, match="context is full: 97 tokens, room for 96"):
        session.extend(torch.zeros(1, 97, dtype=torch.int64))
    assert session.lengths == (0,)
    with pytest.raises(SpecctlError, match="unequal"):
        model.session(2).keep((0, 1))


def test_the_context_ends_where_the_angles_change(folder: Path, tmp_path: Path) -> None:
    """LongRoPE: beyond its original length a cached key and a fresh one differ."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
    config = tf.Phi3Config(
        **SIZES,
        vocab_size=300,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters=factors,
    )
    tf.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    module = load_module(tmp_path, torch.float32)
    assert HFModel(module, "target").context_length == 32


def test_it_runs_in_the_dtype_of_the_run(folder: Path) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        module = load_module(folder / "gpt2", dtype)
        assert module.dtype == dtype and module(torch.zeros(1, 2, dtype=torch.int64)).logits.dtype == dtype


def test_greedy_text_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Plain, and drafted by a model behind transformers, a native one and the text itself, rejections included."""
    pair = Pair(
        artefacts(
            folder, tmp_path, "decoding.temperature=0", "decoding.max_new_tokens=24", "drafters.ngram={kind: ngram}"
        )
    )
    theirs = tf.AutoModelForCausalLM.from_pretrained(folder / "gpt2").eval()
    rejected = False
    for prompt in ([5, 6, 7], [40], [9, 8, 7, 6, 5, 4, 3, 2, 1]):
        wanted = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert text(pair, prompt, "none", 0)[0] == wanted
        for drafter in ("neox", "llama", "ngram"):
            for k in (1, 3, 6):
                found, some = text(pair, prompt, drafter, k)
                assert found == wanted, (drafter, k)
                rejected |= some
    assert rejected


def test_a_model_drafting_for_itself_is_always_accepted(folder: Path, tmp_path: Path) -> None:
    """The caches of both sides hold what they should after many rollbacks and full rounds.

    In float64, in which passes over one row and over more give the same p and q but for 1e-15.
    """
    overrides = (f'drafters.self.path="{folder}/gpt2"', "decoding.max_new_tokens=40", "runtime.dtype=float64")
    pair = Pair(artefacts(folder, tmp_path, *overrides))
    rounds = [event for event in pair.events([5, 6, 7], drafter="self", k=4) if isinstance(event, Round)]
    assert sum(r.num_drafted for r in rounds) > 20 and all(r.num_accepted == r.num_drafted for r in rounds)


def test_each_path_says_what_runs_it(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    made = artefacts(folder, tmp_path, lines=lines)
    made.target(), made.draft("llama")
    assert f"target ({folder}/gpt2) runs behind transformers (its config.json describes a 'gpt2' model" in lines[0]
    assert lines[1] == f"llama ({folder}/llama) runs in the native decoder"
    assert choose_backend(folder / "llama", "transformers")[0] == "transformers"


def test_a_llama_runs_in_both(folder: Path, tmp_path: Path) -> None:
    texts, kinds = [], []
    for backend in ("native", "transformers"):
        overrides = (f'target.path="{folder}/llama"', f"runtime.backend={backend}", "decoding.temperature=0")
        pair = Pair(artefacts(folder, tmp_path, *overrides))
        texts.append(text(pair, [5, 6, 7], "llama", 3)[0])
        kinds.append(type(pair.target))
    assert texts[0] == texts[1] and kinds[0] in NATIVE and kinds[1] is HFModel
    answer = command(folder, tmp_path, "generate", "--set", "runtime.backend=native")
    assert answer.code == 2 and "'gpt2' model, which the native decoder does not read" in answer.one_line


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys have tests of their own."""
    monkeypatch.setattr(verdict, "CASES", CASES[:1])
    monkeypatch.setattr(verdict, "_GREEDY_PROMPTS", 1)
    monkeypatch.setattr(verdict, "_GREEDY_TOKENS", 12)


@pytest.mark.parametrize("drafter", ["neox", "distilled", "medusa"])
def test_verify_holds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """Both sides behind transformers, a native draft for a target behind them, and heads on its hidden states."""
    quick(monkeypatch)
    answer = command(folder, tmp_path, "verify", "--tokens", "150", "--drafter", drafter, "--json")
    assert answer.code == 0 and answer.json["holds"], answer.out + answer.err


def test_verify_sees_a_cache_that_is_not_rolled_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward that rows are held against has no part in the session's cache."""
    quick(monkeypatch)

    def from_the_wrong_end(cache: Any, count: int) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[..., -count:, :], layer.values[..., -count:, :]

    monkeypatch.setattr(tf.DynamicCache, "crop", from_the_wrong_end)
    monkeypatch.setattr(hf, "_rolls_back", lambda module: True)
    answer = command(folder, tmp_path, "verify", "--tokens", "100", "--drafter", "llama")
    assert answer.code == 3


def test_models_that_cannot_roll_back_are_refused(folder: Path, tmp_path: Path) -> None:
    for name, says in (
        ("mamba", "the cache of MambaForCausalLM cannot be rolled back"),
        ("bert", "the cache of BertLMHeadModel cannot be rolled back"),
        ("t5", "holds an encoder-decoder (t5)"),
    ):
        answer = command(folder, tmp_path, "generate", "--set", f'target.path="{folder}/{name}"')
        assert answer.code == 2 and says in answer.one_line and name in answer.one_line


def test_a_cache_that_forgets_is_seen_by_trial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the class says of itself: here a cache whose crop does nothing."""
    monkeypatch.setattr(tf.DynamicCache, "crop", lambda self, count: None)
    with pytest.raises(UsageError, match="the cache of GPT2LMHeadModel cannot be rolled back"):
        load_module(folder / "gpt2", torch.float32)


def broken(folder: Path, tmp_path: Path, change: Callable[[Path], object]) -> str:
    """What is said of a GPT-2 with something wrong in its folder: one line that names the folder."""
    copy = Path(shutil.copytree(folder / "gpt2", tmp_path / "broken"))
    change(copy)
    answer = command(folder, tmp_path / "run", "generate", "--set", f'target.path="{copy}"')
    assert answer.code == 2 and str(copy) in answer.one_line
    return answer.one_line


def set_config(**values: Any) -> Callable[[Path], object]:
    def change(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text()) | values
        (copy / "config.json").write_text(json.dumps(config))

    return change


def set_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def rewrite(copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        change(weights)
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def shard(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    parts = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(weights)}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda copy: (copy / "model.safetensors").rename(copy / "pytorch_model.bin"), "save_pretrained"),
        (lambda copy: (copy / "model.safetensors").unlink(), "holds no .safetensors file"),
        (lambda copy: (copy / "model.safetensors").write_bytes(b"\x08"), "cannot be loaded by transformers"),
        (lambda copy: (copy / "tokenizer.json").unlink(), "cannot read tokenizer"),
        (shard, "model-00002-of-00002.safetensors"),
        (set_weights(lambda weights: weights.pop("transformer.h.1.ln_1.weight")), "lacks transformer.h.1.ln_1.weight"),
        (set_weights(lambda weights: weights.update(extra=torch.ones(2))), "has the foreign tensor"),
        (
            set_weights(lambda weights: weights.update({"transformer.h.0.ln_1.weight": torch.ones(5)})),
            "has transformer.h.0.ln_1.weight of shape [5], config.json says [32]",
        ),
        (set_config(model_type="marvel", auto_map={"AutoModelForCausalLM": "code.Marvel"}), "'marvel' model"),
        (set_config(model_type="vit"), "no causal language model"),
        (set_config(quantization_config={"quant_method": "gptq"}), "quantised"),
        (lambda copy: (copy / "config.json").write_text("{}"), "does not say its model_type"),
    ],
)
def test_a_broken_folder_is_one_line(folder: Path, tmp_path: Path, change: Callable[[Path], object], says: str) -> None:
    assert says in broken(folder, tmp_path, change)


def test_a_folder_s_own_code_is_never_run(folder: Path, tmp_path: Path) -> None:
    def change(copy: Path) -> None:
        set_config(model_type="marvel", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})(copy)
        (copy / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    broken(folder, tmp_path, change)
    assert not (tmp_path / "ran").exists()


class Hub:
    """Stands for huggingface_hub: what it holds, what its cache holds, and every call."""

    def __init__(self, folder: Path, *, cached: bool = False, error: Exception | None = None) -> None:
        self.folder, self.cached, self.error, self.calls = folder, cached, error, list[dict[str, Any]]()

    def __call__(self, name: str, **options: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        self.calls.append({"name": name, **options})
        if options.get("local_files_only") and not self.cached:
            raise LocalEntryNotFoundError("not cached")
        if self.error and not self.cached:
            raise self.error
        return str(self.folder)


def test_a_hub_id_is_fetched_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(folder / "gpt2")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    assert find_folder("someone/tiny") == folder / "gpt2"
    fetched = hub.calls[-1]
    assert [call.get("local_files_only", False) for call in hub.calls] == [True, False]
    assert "*.safetensors" in fetched["allow_patterns"] and {"*.bin", "*.py"} <= set(fetched["ignore_patterns"])
    hub.cached = True
    answer = command(folder, tmp_path, "generate", "--set", "target.path=someone/tiny", "--drafter", "neox")
    assert answer.code == 0 and "target (someone/tiny) runs behind transformers" in answer.err
    assert all(call["local_files_only"] for call in hub.calls[2:])


def test_a_folder_is_never_looked_up(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("a/b", "/no/such", "./c/d", "~/models", "a/b/c"):
        assert find_folder(path) == Path(path)
    assert hub.calls == []


def test_hub_errors_are_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    unknown = RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # made from a response, which there is none of
    for error, code, says in (
        (unknown, 2, "neither a folder here nor a model that the hub shows you"),
        (ConnectionError("no route\nto host"), 1, "could not be fetched from the hub (ConnectionError: no route)"),
    ):
        monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(folder, error=error))
        answer = command(folder, tmp_path, "generate", "--set", "target.path=someone/tiny")
        assert answer.code == code and says in answer.one_line and "someone/tiny" in answer.one_line


@pytest.mark.parametrize("missing", ["transformers", "huggingface_hub"])
def test_a_missing_extra_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    path = f"{folder}/gpt2" if missing == "transformers" else "someone/tiny"
    answer = command(folder, tmp_path, "generate", "--set", f'target.path="{path}"')
    assert answer.code == 2 and "pip install 'specctl[hf]'" in answer.one_line


@pytest.mark.parametrize("loss", ["kl", "acceptance", "ce"])
def test_a_draft_is_trained_that_transformers_takes_as_assistant(folder: Path, tmp_path: Path, loss: str) -> None:
    """For a target with rows of padding, too: the draft has as many."""
    overrides = (f'target.path="{folder}/padded"', f"drafters.distilled.training.loss={loss}")
    made = artefacts(folder, tmp_path, *overrides)
    draft = made.draft("distilled")
    place = made.model_folder("distilled")
    target = tf.AutoModelForCausalLM.from_pretrained(folder / "padded").eval()
    assert draft.shape.vocab_size == target.config.vocab_size == Tokenizer.load(folder / "padded").vocab_size + 7
    assistant, report = tf.AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert tf.AutoTokenizer.from_pretrained(place).encode("def f") == made.tokenizer.encode("def f")
    ids = torch.tensor([made.tokenizer.encode("def read(self):")])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert (
        target.generate(ids, assistant_model=assistant, **options).tolist() == target.generate(ids, **options).tolist()
    )


def test_the_teacher_is_the_target_s_distribution(folder: Path, tmp_path: Path) -> None:
    """KL(GPT-2 as transformers runs it || draft) on held-out text falls below that of a draft that learnt the text."""
    theirs = tf.AutoModelForCausalLM.from_pretrained(folder / "gpt2").eval()
    distances = {}
    for loss in ("ce", "kl"):
        steps = (
            f"drafters.distilled.training={{loss: {loss}, steps: 60, batch_size: 4, block_size: 16, warmup_steps: 5}}"
        )
        made = artefacts(folder, tmp_path / loss, steps)
        draft, ids = made.draft("distilled"), made.text.token_ids("code", "validation")[:480]
        blocks = torch.from_numpy(ids.astype(np.int64)).view(-1, 16)
        with torch.no_grad():
            wanted, found = (logits.log_softmax(-1) for logits in (theirs(blocks).logits, draft(blocks).logits))
        distances[loss] = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    assert distances["kl"] < 0.8 * distances["ce"], distances


def test_another_teacher_makes_the_draft_again(folder: Path, tmp_path: Path) -> None:
    artefacts(folder, tmp_path).draft("distilled")
    lines: list[str] = []
    other = Path(shutil.copytree(folder / "gpt2", tmp_path / "other"))
    set_weights(lambda weights: weights["transformer.h.0.ln_1.weight"].mul_(2))(other)
    artefacts(folder, tmp_path, f'target.path="{other}"', lines=lines).draft("distilled")
    assert any("teacher.weights was" in line for line in lines)


def test_medusa_heads_on_a_model_of_transformers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(artefacts(folder, tmp_path, "decoding.temperature=0"))
    assert text(pair, [5, 6, 7], "medusa", 3)[0] == text(pair, [5, 6, 7], "none", 0)[0]
    monkeypatch.setattr(tf.GPT2LMHeadModel, "get_output_embeddings", lambda self: None)
    answer = command(folder, tmp_path / "other", "train-medusa", "--drafter", "medusa")
    assert answer.code == 2 and "Medusa heads need the output layer" in answer.one_line


def test_the_user_s_prompts_are_continued_by_the_target(folder: Path, tmp_path: Path) -> None:
    """In turn, each text beginning with its prompt; made once; made again when a prompt changes."""
    lines: list[str] = []
    made = artefacts(folder, tmp_path, lines=lines)
    train, validation = (made.text.token_ids("asked", split) for split in ("train", "validation"))
    assert len(train) + len(validation) >= 600 and len(validation) > 50
    assert any("generating asked with the target (600 tokens)" in line for line in lines)
    tokenizer = made.tokenizer
    prompts = [tokenizer.encode(line) for line in (folder / "prompts.txt").read_text().splitlines()]
    both = np.concatenate((train, validation)).tolist()
    texts = " ".join(map(str, both)).split(f" {tokenizer.end_of_text}")
    texts = [each.strip() for each in texts if each.strip()]
    for number, each in enumerate(texts):
        start = " ".join(map(str, prompts[number % len(prompts)]))
        assert each == start or each.startswith(f"{start} "), number
    lines.clear()
    artefacts(folder, tmp_path, lines=lines).text.token_ids("asked", "train")
    assert not any("generating" in line for line in lines)
    assert not list((tmp_path / "tokens").glob(".asked.*"))
    (tmp_path / "more.txt").write_text("def read\nprint\n")
    more = artefacts(folder, tmp_path, f'corpora.asked.prompts="{tmp_path}/more.txt"', lines=lines)
    more.text.token_ids("asked", "train")
    assert any("prompts.file was" in line for line in lines)


def test_an_interrupted_generation_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as in one go, and what was written is not written again."""
    monkeypatch.setattr(generated_text, "SEQUENCES_AT_ONCE", 2)
    monkeypatch.setattr(generated_text, "_FEWEST", 2)
    wanted = artefacts(folder, tmp_path / "whole").text.token_ids("asked", "train").tolist()
    original, calls = generated_text._write_part, list[Path]()

    def interrupted(path: Path, rows: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(path, rows)

    monkeypatch.setattr(generated_text, "_write_part", interrupted)
    with pytest.raises(Interrupted, match=r"of 600 tokens are kept, and the same command goes on"):
        artefacts(folder, tmp_path / "parts").text.token_ids("asked", "train")
    lines: list[str] = []
    assert artefacts(folder, tmp_path / "parts", lines=lines).text.token_ids("asked", "train").tolist() == wanted
    assert any("of them are written" in line for line in lines)
    assert len({path.name for path in calls}) == len(calls) - 1  # only the interrupted part is made twice


def test_what_was_kept_of_another_target_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, rows: Any) -> None:
        original(path, rows)
        raise KeyboardInterrupt

    original = generated_text._write_part
    monkeypatch.setattr(generated_text, "_write_part", interrupted)
    with pytest.raises(Interrupted):
        artefacts(folder, tmp_path).text.token_ids("asked", "train")
    monkeypatch.setattr(generated_text, "_write_part", original)
    neox = f'target.path="{folder}/neox"'
    wanted = artefacts(folder, tmp_path / "afresh", neox).text.token_ids("asked", "train").tolist()
    assert artefacts(folder, tmp_path, neox).text.token_ids("asked", "train").tolist() == wanted


def test_prompts_of_a_corpus_are_checked(folder: Path, tmp_path: Path) -> None:
    asked = "corpora.asked={generated_by: target, prompts: "
    use = ("train-draft", "--drafter", "distilled", "--set", "drafters.distilled.corpus=asked", "--set")
    (tmp_path / "long.txt").write_text("fine\n" + "x = 1 + y\n" + "word " * 200)
    answer = command(folder, tmp_path / "run", *use, f'{asked}"{tmp_path}/long.txt"}}')
    assert answer.code == 2 and "prompt 3 of 3 has" in answer.one_line and "context holds 96" in answer.one_line
    answer = command(folder, tmp_path / "run", *use, f'{asked}"{tmp_path}/none.txt"}}')
    assert answer.code == 2 and "none.txt does not exist" in answer.one_line
    answer = command(folder, tmp_path / "run", *use, 'corpora.code={paths: ["."], prompts: p.txt}')
    assert answer.code == 2 and "add generated_by: target" in answer.err


def test_texts_end_at_the_target_s_end_tokens(folder: Path) -> None:
    """Rows of a batch that ended are cut there; the first goes on where the second ended."""
    module = load_module(folder / "gpt2", torch.float32)
    prompts = in_turn([[5, 6], [7, 8, 9]], 96, frozenset(range(0, 300, 3)))
    rows = generated_text._continue_all(writer(module), prompts, 0, torch.Generator().manual_seed(0), 10_000)
    assert len(rows) == SEQUENCES_AT_ONCE and {len(ids) - new for ids, new in rows} == {2, 3}
    for ids, num_new in rows:
        new = ids[-num_new:] % 3 == 0
        assert (new[-1] and not new[:-1].any()) or len(ids) == 96


def test_a_native_target_s_text_has_no_ends_of_its_own(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of a corpus are continued to their full length: the next document follows an end token."""
    written, original = [], generated_text._write_part
    monkeypatch.setattr(generated_text, "_write_part", lambda path, rows: (written.extend(rows), original(path, rows)))
    artefacts = tiny_copy.artefacts("corpora.own={generated_by: target, num_tokens: 500}")
    num_ids = sum(len(artefacts.text.token_ids("own", split)) for split in ("train", "validation"))
    assert {(len(row), num_new) for row, num_new in written} == {(64, 32)}
    ended = sum(int(row[-1] == artefacts.tokenizer.end_of_text) for row, _ in written)
    assert num_ids == 65 * len(written) - ended  # an end after each, unless its last token is one


def test_the_module_is_frozen(folder: Path) -> None:
    module = load_module(folder / "gpt2", torch.float32)
    assert isinstance(module, HFModule) and not module.training
    assert not any(weight.requires_grad for weight in module.parameters()) and module.num_parameters > 10_000
