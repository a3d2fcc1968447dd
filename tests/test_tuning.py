"""Threads: chosen by timing, kept, used again, and never changing what is computed."""

import json
from pathlib import Path

import pytest
import torch
from fakes import CPU, Clock, random_llama
from torch import Tensor

from specctl.experiments import tuning
from specctl.experiments.tuning import Tuner
from specctl.models.llama_decoder import LlamaDecoder, LlamaSession

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 96,
}


def decoder(name: str = "target", **sizes: int) -> LlamaDecoder:
    return LlamaDecoder(random_llama(0, 0.2, **{**SIZES, **sizes}).float(), name, dtype=torch.float32, device=CPU)


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_faster_number_of_threads_is_kept_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "num_cores", lambda: 4)
    monkeypatch.setattr(tuning, "_seconds", lambda decoder: {1: 3.0, 2: 1.0, 4: 2.0}[decoder.threads])
    path, first = tmp_path / "tuning.json", decoder()
    Tuner(path, "auto").tune(first)
    assert first.threads == 2
    monkeypatch.setattr(tuning, "_seconds", lambda decoder: pytest.fail("timed again"))
    again, tuner = decoder(), Tuner(path, "auto")
    tuner.tune(again)
    assert again.threads == 2 and tuner.chosen["target"].threads == 2
    again.session().extend(torch.tensor([[1]]))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({(1, 1): 1.0, (1, 5): 3.0, (2, 1): 1.5, (2, 5): 2.0}, 2),  # a plain step alone would choose 1
        ({(1, 1): 1.0, (1, 5): 2.0, (2, 1): 2.0, (2, 5): 1.5}, 1),  # a verifying pass alone would choose 2
    ],
)
def test_a_plain_step_and_a_verifying_pass_decide_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[int, int], float], fastest: int
) -> None:
    """seconds: of a pass, by its threads and tokens."""

    def seconds_of(session: LlamaSession, ids: Tensor) -> float:
        return seconds.get((session._decoder.threads or 0, ids.shape[1]), 100.0)

    clock = Clock(monkeypatch, "experiments.tuning")
    monkeypatch.setattr(LlamaSession, "extend", clock.slowed(LlamaSession.extend, seconds_of))
    monkeypatch.setattr(tuning, "num_cores", lambda: 2)
    model = decoder()
    Tuner(tmp_path / "tuning.json", "auto").tune(model)
    assert model.threads == fastest


def test_another_shape_or_setting_is_timed_anew(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    Tuner(path, 1).tune(decoder())
    Tuner(path, 2).tune(decoder())
    Tuner(path, 1).tune(decoder(hidden_size=24))
    assert sorted(entry["threads"] for entry in json.loads(path.read_text()).values()) == [1, 1, 2]


@pytest.mark.parametrize("entry", [None, [], {"threads": "two"}, {"threads": 0}])
def test_an_entry_that_does_not_fit_is_made_again(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "tuning.json"
    Tuner(path, 1).tune(decoder())
    (key,) = json.loads(path.read_text())
    path.write_text(json.dumps({key: entry}))
    Tuner(path, 1).tune(decoder())
    assert json.loads(path.read_text())[key]["threads"] == 1


def test_a_broken_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{")
    Tuner(path, 1).tune(decoder())
    assert len(json.loads(path.read_text())) == 1
