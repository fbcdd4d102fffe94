"""Chat templates: where they come from, what they find, and what they may not do."""

from __future__ import annotations

import json

import pytest

from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.server.chat_template import ChatTemplate, ChatTemplateError

HELLO = [{"role": "user", "content": "<Hello & 'you'>"}]


def rendered(source: str, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO, **options)


def test_a_directory_without_a_template_has_none(tmp_path):
    assert ChatTemplate.from_directory(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert ChatTemplate.from_directory(tmp_path) is None


@pytest.mark.parametrize(
    "template",
    ["{{ bos_token }}x", [{"name": "tool_use", "template": "-"},
                          {"name": "default", "template": "{{ bos_token }}x"}]],
    ids=["one", "several"],
)  # fmt: skip
@pytest.mark.parametrize(
    "token", ["<s>", {"content": "<s>", "lstrip": False}], ids=["text", "dict"]
)
def test_from_tokenizer_config(tmp_path, template, token):
    config = {"chat_template": template, "bos_token": token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_directory(tmp_path).render(HELLO) == "<s>x"


def test_a_file_of_its_own_goes_first(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "a", "bos_token": "<s>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}€")
    assert ChatTemplate.from_directory(tmp_path).render(HELLO) == "<s>€"


def test_a_template_with_a_mistake_is_told_at_the_start(tmp_path):
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% for %}")
    for content in ("{", '{"a":' + "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(CheckpointError, match="tokenizer_config"):
            ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        b'{{ "\xff" }}',
        b"{% for %}",
        b"{% break %}",
        b"{% for a in [1] %}" * 150 + b"{% endfor %}" * 150,
        b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}",
    ],
    ids=["no UTF-8", "syntax", "break", "loops", "brackets"],
)
def test_a_template_that_is_none_is_told_at_the_start_with_its_file(tmp_path, template):
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(template)
    with pytest.raises(CheckpointError, match=f"chat template .*: {file}; to change it: ") as told:
        ChatTemplate.from_directory(tmp_path)
    assert len(str(told.value)) < 600


def test_a_template_in_the_tokenizers_config_is_told_with_that_file(tmp_path):
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"chat_template": "{% break %}"}')
    with pytest.raises(CheckpointError, match=f"chat template .*: {file}; "):
        ChatTemplate.from_directory(tmp_path)


def test_a_template_whose_name_is_none_is_passed_over(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": ["a"], "template": "-"}]}'
    )
    assert ChatTemplate.from_directory(tmp_path) is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", "<Hello & 'you'>"),
        ("{{ messages[0]['content'] | tojson }}", "\"<Hello & 'you'>\""),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}a{{ bos_token }}{% endgeneration %}b", "a<s>b"),
        ("{{ tools is none }} {{ add_generation_prompt }}", "True True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ thinking }}", "yes"),
        ("{% set s = namespace(n=0) %}{% for m in 'ab' %}{% set s.n = 7 %}{% endfor %}{{ s.n }}",
         "7"),
    ],
)  # fmt: skip
def test_what_published_templates_rely_on(source, text):
    assert rendered(source, extra={"thinking": "yes"}) == text


def test_a_templates_own_refusal_is_passed_on():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_may_not_or_cannot_do_is_an_error_of_the_request(source):
    with pytest.raises(ChatTemplateError):
        rendered(source)
