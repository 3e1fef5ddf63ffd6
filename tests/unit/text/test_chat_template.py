"""What a chat template reads."""

from __future__ import annotations

from cospec.text.tokenizer import Names, names_read


def test_variables_are_those_that_the_template_does_not_set() -> None:
    source = (
        "{% set own = 1 %}{% if enable_thinking is defined and not enable_thinking %}{{ own }}{% endif %}"
        "{%- for m in messages %}{% generation %}{{ m.content }}{{ m['name'] }}{{ m.get('thinking') }}"
        "{% endgeneration %}{% break %}{% endfor %}{{ effort | default('low') }}"
    )
    found = names_read(source)
    assert found.variables == {"enable_thinking", "messages", "effort"}
    assert {"content", "name", "thinking"} <= found.keys
    assert "reasoning_content" not in found.keys


def test_a_text_that_is_no_template_reads_nothing() -> None:
    assert names_read("{% for %}") == Names()
