"""Chat: templates rendered as transformers renders them, their tokens, and every command that reads prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Answer, Tiny, specctl, write_run_file

from specctl.chat import ChatTemplate, prompt_encoder
from specctl.errors import UsageError
from specctl.experiments.workload import encoder_of, workload
from specctl.models.checkpoint import save_checkpoint
from specctl.models.llama import Llama, LlamaShape
from specctl.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "<|im_start|>system<|im_end|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- for message in messages %}
    {%- if message.role == 'skipped' %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '<|im_end|>\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\\n\\n' }}{%- endif %}
"""
INSTRUCT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}
{% generation %}
{{ message['content'] + eos_token }}
{% endgeneration %}
{% endif %}
{% endfor %}"""
NAMESPACED = """{%- set ns = namespace(last=-1, self='x') %}
{%- for message in messages %}{%- set ns.last = loop.index0 %}{%- endfor %}
{%- set kept = dict(text=messages[ns.last].content) %}
{%- if tools %}{{- 'never' }}{%- endif %}
<|im_start|>{{ kept | tojson }}{{ messages | tojson(indent=2) }}{{ unk_token is defined }}
{%- if add_generation_prompt %}<|im_end|>{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA_3, "instruct": INSTRUCT, "namespaced": NAMESPACED}
TEXTS = [
    "def ",
    " spaced \n out ",
    "<b>'quoted' & \"escaped\"</b> é 中 🙂",
    "{{ not_a_template }}",
    "a <|im_end|> in it",
]
SPECIAL = ("<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>")


def write_chat_model(folder: Path, template: Any = CHATML) -> Path:
    """A random model with chat tokens: the template in tokenizer_config.json, two end tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["You are helpful. system user assistant def return " * 20], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    shape = LlamaShape(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    module = Llama(shape)
    module.initialise(0)
    save_checkpoint(module, folder, 0)
    ends = [backend.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken", "special": True},
        "eos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(chat_model: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(chat_model)
    theirs.chat_template = TEMPLATES[name]
    special = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    template = ChatTemplate(path=chat_model, source=TEMPLATES[name], special_tokens=special)
    tokenizer = Tokenizer.load(chat_model)
    encode = prompt_encoder(tokenizer, template)
    for text in TEXTS:
        messages = [{"role": "user", "content": text}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encode(text) == expected, text
        assert template.renderer()(text) == theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )


def test_special_tokens_are_ids_in_a_template_and_bytes_in_a_document(chat_model: Path) -> None:
    tokenizer = Tokenizer.load(chat_model)
    marked = tokenizer.encode_markup("<|im_start|>user")
    assert marked[0] == SPECIAL.index("<|im_start|>")
    assert tokenizer.encode("<|im_start|>user")[0] > len(SPECIAL)  # afterwards too
    assert tokenizer.decode(tokenizer.encode("<|im_start|>user")) == "<|im_start|>user"
    ids = prompt_encoder(tokenizer, ChatTemplate(path=chat_model, source=LLAMA_3, special_tokens={"bos_token": "<s>"}))(
        "x"
    )
    assert ids.count(SPECIAL.index("<s>")) == 1 and ids[0] == SPECIAL.index("<s>")


def test_where_a_template_is_found(tmp_path: Path) -> None:
    def source(template: Any, jinja: str | None = None) -> str:
        folder = write_chat_model(tmp_path / "model", template)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        if jinja is not None:
            (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
        return ChatTemplate.load(folder).source

    assert source("one") == "one"
    assert source([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]) == "d"
    assert source([{"name": "only", "template": "o"}]) == "o"
    assert source(None, jinja="é") == "é"
    assert source("config", jinja="file") == "file"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template"),
        ([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], "none of them is default"),
        (7, "neither a text nor a list"),
        ([], "neither a text nor a list"),
        ({"default": "x"}, "neither a text nor a list"),
        ([{"name": "a", "template": 3}], "neither a text nor a list"),
        ("\n{% if %}", "line 2: "),
        ("{{ raise_exception('no system\nrole') }}", "fails on a user's message: no system role"),
        ("{{ messages[3].content.x }}", "fails on a user's message: "),
        ("{{ 1 / 0 }}", "fails on a user's message: division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails on a user's message: "),
        ("{{ messages.append(1) }}", "fails on a user's message: "),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "a namespace may not hold __class__"),
    ],
)
def test_what_is_refused(tmp_path: Path, template: Any, says: str) -> None:
    folder = write_chat_model(tmp_path / "model", template)
    with pytest.raises(UsageError) as caught:
        ChatTemplate.load(folder).renderer()("hello")
    assert says in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_special_tokens_of_older_releases(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model", "{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "other"}))
    assert ChatTemplate.load(folder).renderer()("x") == "<s>|<|endoftext|>|False"


def test_broken_files(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is not a JSON object"):
        ChatTemplate.load(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.load(folder)


# The commands


@pytest.fixture(scope="module")
def chat_run(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run of the chat model with itself as a draft."""
    folder = tmp_path_factory.mktemp("chat run")
    path = write_run_file(folder)
    lines = path.read_text(encoding="utf-8").partition("target:")[0]
    path.write_text(
        lines
        + f"""chat: true
target: {{corpus: code, path: "{chat_model}"}}
drafters:
  distilled: {{path: "{chat_model}"}}
decoding: {{max_new_tokens: 6, num_speculative_tokens: 3, prompt: hello}}
sweep: {{k: [0, 2], max_new_tokens: 6, repeats: 1}}
""",
        encoding="utf-8",
    )
    return Tiny(path, folder / "run")


def write_prompts(folder: Path) -> Path:
    lines = [{"question_id": i, "category": "writing", "turns": [f"Write {i}.", "Rewrite it."]} for i in range(4)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_prompts_are_messages(chat_run: Tiny, tmp_path: Path) -> None:
    artefacts = chat_run.artefacts()
    expected = artefacts.tokenizer.encode_markup(
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nWrite 0.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoder_of(artefacts)("Write 0.") == expected
    work = workload(chat_run.pair(f"prompts={write_prompts(tmp_path)}"))
    assert expected in [prompt.token_ids for prompt in work.measured + work.held_out]
    assert encoder_of(chat_run.artefacts("chat=false"))("<|im_start|>") != expected[:1]


def test_text_ends_at_the_chats_end_token(chat_run: Tiny) -> None:
    end = SPECIAL.index("<|im_end|>")
    after_three = ("--set", f"decoding.logit_bias={{{end}: 1000}}", "--set", "decoding.min_new_tokens=3")
    answer = chat_run.specctl("generate", *after_three, "--json")
    assert answer.code == 0, answer.err
    found = answer.json
    assert found["finish_reason"] == "eos" and found["token_ids"][-1] == end and len(found["token_ids"]) == 4
    assert "im_end" not in found["text"]
    shown = chat_run.specctl("generate", *after_three)
    assert shown.out.startswith("hello\n\n") and "im_end" not in shown.out
    assert shown.out.removeprefix("hello\n\n") == found["text"] + "\n"


@pytest.mark.parametrize("command", ["sweep-k", "break-it", "generate"])
def test_every_command_reads_messages(chat_run: Tiny, tmp_path: Path, command: str) -> None:
    answer = chat_run.specctl(command, "--prompts", str(write_prompts(tmp_path)), "--json")
    assert answer.code == 0, answer.err


def test_an_output_says_which_template(chat_run: Tiny, tmp_path: Path) -> None:
    prompts, output = write_prompts(tmp_path), tmp_path / "out.jsonl"

    def run(*arguments: str) -> Answer:
        return chat_run.specctl("generate", "--prompts", str(prompts), "--output", str(output), *arguments)

    assert run().code == 0
    line = json.loads(output.read_text(encoding="utf-8").splitlines()[0])
    assert line["prompt"] == "Write 0."
    changed = run("--set", "chat=false")
    assert changed.code == 2 and "was made otherwise (chat was" in changed.one_line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sweep-k",), "give a file of prompts"),
        (("verify",), "give a file of prompts"),
        (("generate", "--prompt", ""), "the prompt is empty"),
    ],
)
def test_what_commands_refuse(chat_run: Tiny, arguments: tuple[str, ...], says: str) -> None:
    answer = chat_run.specctl(*arguments)
    assert answer.code == 2 and says in answer.one_line


def test_a_target_that_is_trained_has_no_template(tiny: Tiny) -> None:
    answer = specctl("generate", "-c", str(tiny.config_path), "--set", "chat=true")
    assert answer.code == 2 and "chat: a target that is trained here has no chat template" in answer.err


def test_a_model_without_a_template_is_one_line(chat_run: Tiny, tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "base", None)
    paths = ("--set", f"target.path={folder}", "--set", f"drafters.distilled.path={folder}")
    for arguments in (("generate",), ("sweep-k", "--prompts", str(write_prompts(tmp_path)))):
        answer = chat_run.specctl(*arguments, *paths)
        assert answer.code == 2 and f"{folder} has no chat template" in answer.one_line
