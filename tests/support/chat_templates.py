"""A conversation, and two templates that use between them what real templates use."""

from __future__ import annotations

from ondevice.chat_template import Message

CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi there!\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
    {"role": "user", "content": "What is 2 + 2?"},
]

INSTRUCTIONS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, loop_messages = messages[0]['content'] | trim ~ '\\n', messages[1:] %}
{%- else %}
    {%- set system, loop_messages = '', messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

HEADERS = """\
{%- macro turn(role, content) %}
<|{{ role }}|>
{{ content | replace('\\t', ' ') }}<|end|>
{%- endmacro %}
{% set ns = namespace(users=0, seen=[]) %}
{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% if message.content is string and 'role' in message %}
{% set ns.users = ns.users + (1 if message.role == 'user' else 0) %}
{% set ns.seen = ns.seen + [message.role | upper] %}
{{ turn(message.role, message.content) }}
{% endif %}
{% endfor %}
{% generation %}
{{ ns.users }} of {{ messages | length }}: {{ ns.seen | join(', ') }} {{ messages[-1] | tojson }}
{{ {'a': [1, 2.5, none, true], 'b': 'é"'} | tojson(indent=2) | indent(3) }}
{% endgeneration %}
{% for name in messages | map(attribute='role') | unique | sort | list %}
{{ loop.index }}{{ name | title }};
{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 7 // 2 % 5 * 'ab' }}{{ missing }}
{{ ['x', 'y'] }} {{ "abc"[::-1] }} {{ "a,b".split(",")[0] }} {{ messages[0].get('name', 'none') }} {{ 3 / 2 }}
{% if add_generation_prompt and not tools %}<|assistant|>
{% endif %}
"""

TOOLS = """\
{%- if tools %}<|user|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{}</tool_call>
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}<|assistant|>
        {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
        {%- for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
        {%- endfor %}
    {%- elif m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response>
    {%- else %}<|{{ m.role }}|>{{ m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}
"""
"""A template with tools and thinking, of the kind that Hermes and Qwen have."""
