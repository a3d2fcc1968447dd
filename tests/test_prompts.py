"""Files of prompts: what is read from them, what is refused, and generating from all of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Answer, Tiny

from specctl.errors import SpecctlError, UsageError
from specctl.experiments import generate_file as module
from specctl.experiments.generate_file import generate_file
from specctl.experiments.output_file import open_output, recipe_path
from specctl.experiments.workload import workload
from specctl.prompts import Prompt, choose, hold_out, read_prompts

# Reading


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def prompt(name: str, category: str | None = None, text: str = "def ") -> Prompt:
    return Prompt(id=name, category=category, text=text)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.md"])
def test_text_is_a_prompt_a_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, '\ufeffdef \r\n\n  indented\u2028same\x0cline\n   \n{"prompt": 1}')
    assert read_prompts(path) == [
        prompt("1", text="def "),
        prompt("3", text="  indented\u2028same\x0cline"),
        prompt("5", text='{"prompt": 1}'),
    ]


def test_jsonl_fields(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "id": "x", "category": "code", "more": [1]},
        {"text": "two"},
        {"prompt": "three", "text": "not this", "id": 7, "category": None},
        {"question_id": 81, "category": "writing", "turns": ["four\nlines", "never used"], "reference": []},
    ]
    path = write(tmp_path, "a.JSONL", "\n\n".join(json.dumps(line) for line in lines))
    assert read_prompts(path) == [
        prompt("x", "code", "one"),
        prompt("3", text="two"),
        prompt("7", text="three"),
        prompt("81", "writing", "four\nlines"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "", "there is no prompt in it"),
        ("a.txt", " \n\n\t", "there is no prompt in it"),
        ("a.txt", b"fine\nb\xffd", "is not UTF-8 at byte 6"),
        ("a.txt", b"\xef\xbb\xbfb\xffd", "is not UTF-8 at byte 4"),
        ("a.json", "[]", "name it .jsonl"),
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": ', "line 3: not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", '["x"]', "line 1: not an object"),
        ("a.jsonl", '{"promt": "x"}', "line 1: it has no prompt, text or turns"),
        ("a.jsonl", '{"prompt": 3}', "line 1: its prompt is not text"),
        ("a.jsonl", '{"prompt": ""}', "line 1: its prompt is empty"),
        ("a.jsonl", '{"turns": []}', "line 1: its turns is not a list of texts"),
        ("a.jsonl", '{"turns": "x"}', "line 1: its turns is not a list of texts"),
        ("a.jsonl", '{"prompt": "x", "id": [1]}', "line 1: its id is neither"),
        ("a.jsonl", '{"prompt": "x", "id": 1.5}', "line 1: its id is neither"),
        ("a.jsonl", '{"prompt": "x", "category": true}', "line 1: its category is neither"),
        ("a.jsonl", '{"prompt": "\\ud800"}', "line 1: its text holds half a surrogate pair"),
        ("a.jsonl", '{"prompt": "x", "id": "\\ud800"}', "line 1: its id holds half a surrogate pair"),
        ("a.jsonl", '{"prompt": "x", "id": 2}\n{"text": "y", "id": "2"}', "line 2: the id '2' was given in line 1 too"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(UsageError) as caught:
        read_prompts(path)
    assert says in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([2, None], ["2", "line-2"]),
        ([None, 1], ["line-1", "1"]),
        ([None, None, "line-2", "2"], ["1", "line-line-2", "line-2", "2"]),
        (["", None, 1], ["", "2", "1"]),
    ],
)
def test_an_id_that_is_made_is_no_given_one(tmp_path: Path, given: list[Any], ids: list[str]) -> None:
    lines = [{"prompt": "x"} if name is None else {"prompt": "x", "id": name} for name in given]
    path = write(tmp_path, "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert [one.id for one in read_prompts(path)] == ids


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_prompts(tmp_path / "no.txt")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path)


# Choosing


HELD = [(0, []), (1, []), (2, [1]), (3, [1]), (10, [2, 7]), (13, [2, 6, 10]), (18, [1, 4, 7, 10, 13, 16])]


@pytest.mark.parametrize(("count", "held"), HELD)
def test_a_fifth_is_held_out_evenly(count: int, held: list[int]) -> None:
    rest, out = hold_out(range(count))
    assert out == held
    assert sorted([*rest, *out]) == list(range(count))


def test_choice_is_spread_over_categories_and_decided_by_the_seed() -> None:
    prompts = [prompt(f"{category}{i}", category) for category in "abc" for i in range(20)]
    chosen = choose(prompts, 6, seed=0)
    assert [one.category for one in chosen] == ["a", "a", "b", "b", "c", "c"]
    assert chosen == choose(prompts, 6, seed=0) != choose(prompts, 6, seed=1)
    assert choose(prompts, 100, seed=0) == prompts


def test_what_is_predicted_from_is_never_measured(tiny: Tiny, tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "\n".join(f"def f{i}" for i in range(10)))
    whole = workload(tiny.pair(f"prompts={path}", "sweep.num_prompts=null"))
    assert ([one.id for one in whole.held_out], len(whole.measured), whole.note) == (["3", "8"], 8, FEW)
    some = workload(tiny.pair(f"prompts={path}", "sweep.num_prompts=3"))
    assert len(some.measured) == 3 and some.held_out == whole.held_out
    assert not {one.id for one in some.measured} & {one.id for one in some.held_out}
    with pytest.raises(UsageError, match=r"sweep.num_prompts is 9, and of the 10 prompts in .* 8 can be measured"):
        workload(tiny.pair(f"prompts={path}", "sweep.num_prompts=9"))
    split = workload(tiny.pair())
    assert [one.token_ids for one in split.measured + split.held_out] == tiny.pair().prompts(4)


FEW = (
    "No intervals of predictions: from fewer than 6 prompts they would hold far less often than they say (8 were "
    "measured and 2 held out; of a file of 18 or more there are enough)."
)


def test_prompts_of_the_validation_split_do_not_overlap(tiny: Tiny) -> None:
    pair = tiny.pair()
    ids = pair.artefacts.text.token_ids("code", "validation").tolist()
    room = (len(ids) - 1) // 8
    found = pair.prompts(room + 5)
    assert len(found) == room and {len(prompt) for prompt in found} == {8}
    assert sorted(found) == sorted(ids[place * 8 : place * 8 + 8] for place in range(room))  # each place once
    assert pair.prompts(3) == found[:3] and tiny.pair("seed=1").prompts(room) != found


def test_a_split_that_is_too_small_for_both_says_so(tiny: Tiny) -> None:
    num_tokens = len(tiny.pair().artefacts.text.token_ids("code", "validation"))
    half = f"sweep.prompt_tokens={num_tokens // 7}"  # room for 7 (or 6) prompts
    few = workload(tiny.pair(half, "sweep.num_prompts=null", "target.model.max_position_embeddings=64"))
    assert len(few.measured) == len(few.held_out) == 3
    assert few.note is not None and few.note.startswith("Fewer prompts than 12: the validation split of code has room")
    with pytest.raises(UsageError, match=r"sweep.num_prompts is 4, and the validation split of code has room for 7 .*"):
        workload(tiny.pair(half, "sweep.num_prompts=4"))
    one = workload(tiny.pair(f"sweep.prompt_tokens={num_tokens - 1}", "sweep.num_prompts=null"))
    assert (len(one.measured), one.held_out) == (1, [])
    assert one.note is not None and one.note.startswith("No prediction: the validation split of code has room for one")


def test_texts_that_end_early_bring_more_prompts(tiny: Tiny) -> None:
    """As many tokens are wanted as 12 prompts give whose texts reach the budget of 12 tokens."""
    ending = ("sweep.num_prompts=null", f"decoding.stop_token_ids={list(range(0, 300, 2))}")
    assert len(workload(tiny.pair(*ending)).measured) > 24  # half of all tokens end a text: about two of them each
    assert len(workload(tiny.pair(*ending, "sweep.ignore_eos=true")).measured) == 12
    assert len(workload(tiny.pair("sweep.num_prompts=null")).measured) == 12


# The commands

CATEGORIES = [
    {"id": f"{category}-{i}", "category": category, "prompt": f"def {category}_{i}("}
    for category in ("read", "write")
    for i in range(3)
]


def jsonl(folder: Path, lines: list[dict[str, Any]] = CATEGORIES) -> Path:
    return write(folder, "prompts.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def generated(path: Path) -> list[dict[str, Any]]:
    """The lines of an output, without the times in them."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["stats"] = {name: value for name, value in line["stats"].items() if "second" not in name}
    return lines


def run(tiny: Tiny, prompts: Path, output: Path, *arguments: str) -> Answer:
    return tiny.specctl("generate", "--prompts", str(prompts), "--output", str(output), *arguments)


def test_a_line_a_prompt(tiny: Tiny, tmp_path: Path) -> None:
    output = tmp_path / "new folder" / "out.jsonl"
    answer = run(tiny, jsonl(tmp_path), output)
    assert answer.code == 0, answer.err
    lines = generated(output)
    assert [line["id"] for line in lines] == [one["id"] for one in CATEGORIES]
    fields = "id category prompt text token_ids finish_reason drafter k temperature stats lossy logprobs seed"
    assert all(line.keys() == set(fields.split()) for line in lines)
    assert {(line["drafter"], line["k"], line["seed"]) for line in lines} == {("distilled", 3, 0)}
    assert len({tuple(line["token_ids"]) for line in lines}) > 1
    assert all(name in answer.out for name in ("read", "write", "all", "end to end"))
    totals = json.loads((tiny.run_dir / "results" / "generate.json").read_text(encoding="utf-8"))
    assert totals["total"]["num_new_tokens"] == sum(len(line["token_ids"]) for line in lines)
    assert [(row["category"], row["num_prompts"]) for row in totals["by_category"]] == [("read", 3), ("write", 3)]


@pytest.mark.parametrize("num_left", [0, 1, 3, 6])
@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_file_goes_on_as_if_nothing_had_happened(
    tiny: Tiny, tmp_path: Path, num_left: int, torn: bool
) -> None:
    prompts, output, whole = jsonl(tmp_path), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert run(tiny, prompts, whole).code == run(tiny, prompts, output).code == 0
    kept = output.read_bytes().splitlines(keepends=True)
    head = b"".join(kept[:num_left])
    output.write_bytes(head + (kept[num_left][:-5] if torn and num_left < 6 else b""))
    answer = run(tiny, prompts, output)
    assert answer.code == 0, answer.err
    assert f"{num_left} of 6 prompts were done before" in answer.err
    assert output.read_bytes().startswith(head)  # not one byte of what was finished was touched
    assert generated(output) == generated(whole)


def test_made_ids_are_the_same_when_a_file_is_gone_on_with(tiny: Tiny, tmp_path: Path) -> None:
    lines = [{"prompt": "def a", "id": 2}, {"prompt": "def b"}, {"prompt": "def c", "id": 1}]
    prompts, output = jsonl(tmp_path, lines), tmp_path / "out.jsonl"
    assert run(tiny, prompts, output).code == 0
    whole = generated(output)
    assert [line["id"] for line in whole] == ["2", "line-2", "1"]
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    answer = run(tiny, prompts, output)
    assert answer.code == 0 and "2 of 3 prompts were done before" in answer.err
    assert generated(output) == whole


def test_ctrl_c_keeps_what_is_done(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, output, whole = jsonl(tmp_path), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(tiny, prompts, whole)
    original, calls = module.generate, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(options["request"])
        if len(calls) == 3:
            assert len(generated(output)) == 2, "a line is on disk as soon as it is finished"
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, "generate", interrupted)
        answer = run(tiny, prompts, output)
    assert answer.code == 130
    assert "2 of 6 prompts are done" in answer.one_line and "the same command goes on" in answer.one_line
    assert run(tiny, prompts, output).code == 0
    assert generated(output) == generated(whole)


def test_a_full_disk_is_one_line(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "generate", full)
    refused = pytest.raises(SpecctlError, match=r"No space left on device; what is done stays, and the same command")
    with refused, open_output(tmp_path / "out.jsonl") as output:
        generate_file(tiny.pair(), [prompt("1")], output)


def test_draws_depend_on_seed_and_place_alone(tiny: Tiny, tmp_path: Path) -> None:
    same = [{"id": str(i), "prompt": "def "} for i in range(3)]
    output = tmp_path / "out.jsonl"
    run(tiny, jsonl(tmp_path, same), output)
    texts = [line["token_ids"] for line in generated(output)]
    assert texts[0] == tiny.specctl("generate", "--json", "--prompt", "def ").json["token_ids"]
    assert len({tuple(text) for text in texts}) == 3
    other = tmp_path / "other.jsonl"
    run(tiny, tmp_path / "prompts.jsonl", other, "--seed", "1")
    assert [line["token_ids"] for line in generated(other)] != texts


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--temperature", "0.5"), "decoding.temperature was 1.0, is 0.5"),
        (("--seed", "4"), "seed was 0, is 4"),
        (("--k", "2"), "decoding.num_speculative_tokens was 3, is 2"),
        (("--drafter", "mismatched"), "decoding.drafter was distilled, is mismatched; drafter.weights was"),
        (("--set", "runtime.dtype=float64"), "runtime.dtype was float32, is float64"),
    ],
)
def test_another_config_is_refused_by_name(tiny: Tiny, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    prompts, output = jsonl(tmp_path, CATEGORIES[:2]), tmp_path / "out.jsonl"
    run(tiny, prompts, output)
    before = output.read_bytes()
    answer = run(tiny, prompts, output, *arguments)
    assert answer.code == 2 and says in answer.one_line and str(output) in answer.one_line
    assert output.read_bytes() == before
    # What has no say in the text may change.
    assert run(tiny, prompts, output, "--set", "sweep.repeats=2", "--set", "decoding.prompt=x").code == 0


def test_other_prompts_weights_and_foreign_files_are_refused(tiny_copy: Tiny, tmp_path: Path) -> None:
    prompts, output = jsonl(tmp_path, CATEGORIES[:2]), tmp_path / "out.jsonl"
    run(tiny_copy, prompts, output)
    other = write(tmp_path, "other.jsonl", json.dumps(CATEGORIES[3]))
    answer = run(tiny_copy, other, output)
    assert answer.code == 2 and "prompts.content was" in answer.one_line and "prompts.count was 2, is 1" in answer.err
    answer = run(tiny_copy, prompts, output, "--set", "target.training.steps=21")
    assert answer.code == 2 and "target.weights was" in answer.one_line
    foreign = write(tmp_path, "foreign.jsonl", "{}\n")
    answer = run(tiny_copy, prompts, foreign)
    assert answer.code == 2 and "is not of this command's making" in answer.one_line
    assert foreign.read_bytes() == b"{}\n"


@pytest.mark.parametrize("line", [b"{}", b'{"id": "read-0"', b'{"id": "nobody", "category": null}', None])
def test_a_changed_line_is_refused_not_dropped(tiny: Tiny, tmp_path: Path, line: bytes | None) -> None:
    """None: the line before it, once more."""
    prompts, output = jsonl(tmp_path, CATEGORIES[:3]), tmp_path / "out.jsonl"
    run(tiny, prompts, output)
    lines = output.read_bytes().split(b"\n")
    output.write_bytes(b"\n".join([lines[0], line or lines[0], *lines[2:]]))
    before = output.read_bytes()
    answer = run(tiny, prompts, output)
    assert answer.code == 2 and "out.jsonl, line 2 was changed" in answer.one_line
    assert output.read_bytes() == before


def test_an_empty_output_is_a_new_one(tiny: Tiny, tmp_path: Path) -> None:
    output = write(tmp_path, "out.jsonl", b"")
    assert run(tiny, jsonl(tmp_path, CATEGORIES[:1]), output).code == 0
    assert recipe_path(output).is_file() and len(generated(output)) == 1


def test_without_an_output_the_texts_are_shown_below_headings(tiny: Tiny, tmp_path: Path) -> None:
    prompts, output = jsonl(tmp_path, [*CATEGORIES[:2], {"prompt": "import "}]), tmp_path / "out.jsonl"
    run(tiny, prompts, output)
    answer = tiny.specctl("generate", "--prompts", str(prompts))
    assert answer.code == 0, answer.err
    headings = ["== read-0 (read)", "== read-1 (read)", "== 3"]
    expected = [f"{h}\n{line['prompt']}{line['text']}\n" for h, line in zip(headings, generated(output), strict=True)]
    assert answer.out == "".join(expected)
    document = tiny.specctl("generate", "--prompts", str(prompts), "--json").json
    assert [one["text"] for one in document["generations"]] == [line["text"] for line in generated(output)]


def test_prompts_in_the_run_file_and_one_prompt_over_them(tiny: Tiny, tmp_path: Path) -> None:
    setting = ("--set", f"prompts={jsonl(tmp_path)}")
    assert "== read-0" in tiny.specctl("generate", *setting).out
    assert tiny.specctl("generate", "--prompt", "def ", *setting).out == tiny.specctl("generate").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output", "out.jsonl"), "--output takes a line a prompt and needs a file of them; give --prompts FILE"),
        (("--prompt", "x", "--prompts", "{prompts}"), "give one of the two"),
        (("--prompts", "{prompts}", "--plot", "a.png"), "--plot shows the rounds of one prompt"),
        (("--prompts", "{prompts}", "--output", "o", "--show-rounds"), "give one of the two"),
        (("--prompts", "{folder}/no.jsonl"), "does not exist"),
        (("--prompts", "{prompts}", "--output", "{folder}"), "is a folder; name a file"),
        (("--prompts", "{prompts}", "--output", "{prompts}/out.jsonl"), "choose another --output"),
    ],
)
def test_mistakes_come_before_any_work(tiny: Tiny, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    prompts, fresh = jsonl(tmp_path), Tiny(tiny.config_path, tmp_path / "fresh")
    answer = fresh.specctl("generate", *(one.format(prompts=prompts, folder=tmp_path) for one in arguments))
    assert answer.code == 2 and says in answer.one_line
    assert answer.err.strip() == answer.one_line and answer.out == "", "something was done before"


@pytest.mark.parametrize("command", ["generate", "sweep-k", "break-it"])
def test_a_prompt_too_long_is_named_before_a_model_is_trained(tiny: Tiny, tmp_path: Path, command: str) -> None:
    long = {"id": "long one", "prompt": "xyz " * 80}
    prompts, fresh = jsonl(tmp_path, [*CATEGORIES, long]), Tiny(tiny.config_path, tmp_path / "fresh")
    answer = fresh.specctl(command, "--prompts", str(prompts))
    assert answer.code == 2
    assert "prompt long one has" in answer.one_line and "the context holds 64" in answer.one_line
    assert "shorten it to 63 or fewer" in answer.one_line and "training target" not in answer.err
    held_out = tiny.specctl(command, "--prompts", str(prompts), "--set", f"target.path={tiny.run_dir}/target")
    assert held_out.code == 2 and "prompt long one has" in held_out.one_line


@pytest.mark.parametrize("command", ["sweep-k", "break-it"])
def test_measuring_on_prompts(tiny: Tiny, tmp_path: Path, command: str) -> None:
    lines = [{**line, "id": f"{line['id']}-{copy}"} for line in CATEGORIES for copy in range(3)]
    arguments = (command, "--prompts", str(jsonl(tmp_path, lines)), "--set", "sweep.num_prompts=10")
    document = tiny.specctl(*arguments, "--json").json
    for row in document["rows"]:
        assert [figures["num_prompts"] for figures in row["by_category"]] == [5, 5]
        assert all(figures["speedup_interval"] is None for figures in row["by_category"])  # fewer than six
        assert [figures["category"] for figures in row["by_prompt"]] == ["read"] * 5 + ["write"] * 5
        low, high = row["mean_acceptance_length_interval"]
        assert low <= row["mean_acceptance_length"] <= high
    measured = {figures["id"] for row in document["rows"] for figures in row["by_prompt"]}
    assert len(measured) == 10
    assert document["note"] is None
    shown = tiny.specctl(*arguments)
    assert "By category: K = " in shown.out and "write" in shown.out and "95 %" in shown.out


@pytest.mark.parametrize("command", ["sweep-k", "break-it"])
def test_a_single_prompt_gives_no_prediction_and_says_so_once(tiny: Tiny, tmp_path: Path, command: str) -> None:
    arguments = (command, "--prompts", str(jsonl(tmp_path, CATEGORIES[:1])), "--set", "sweep.num_prompts=1")
    document = tiny.specctl(*arguments, "--json").json
    for row in document["rows"][1:]:
        assert row["predicted_speedup" if command == "sweep-k" else "expected_acceptance"] is None
        assert row["speedup"] > 0 and row["speedup_interval"] is None
    shown = tiny.specctl(*arguments)
    assert shown.code == 0 and shown.out.count("No prediction: ") == 1
