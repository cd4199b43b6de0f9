"""Chat templates in the manners of several families, as this project writes them: how they begin an
answer, trim it, end it, and what they insert. `CONTENT` and `END` stand round what is the answer's.
"""

from __future__ import annotations

LOOP = "{% for m in messages %}"
ASSISTANT = "{% if m.role == 'assistant' %}"

CHATML = (
    LOOP + "{{ '<|im_start|>' + m.role + '\n' }}" + ASSISTANT + "{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Marked."""
TRIMMED = (
    "{{ '<s>' }}" + LOOP + "{{ '<|head|>' + m.role + '\n\n' + m.content | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant\n\n' }}{% endif %}"
)
SPACED = (
    LOOP + ASSISTANT + "{{ ' ' + m.content | trim + ' </s>' }}"
    "{% else %}{{ '<s>[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""Which takes no notice of a generation prompt."""
RENAMED = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with a question') }}"
    "{% endif %}" + LOOP + "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content + '<end>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
THINKING = (
    LOOP + "{{ '<|im_start|>' + m.role + '\n' }}" + ASSISTANT + "{% if loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Which inserts an empty thought into the last answer, and takes thoughts from all."""
BARE = (
    LOOP + "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Without control tokens."""
PROMPTED = (
    LOOP + "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
"""Whose generation prompt begins a thought that answers in a text do not have."""
CONTROLS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|end|>", "<s>", "</s>", "<turn>", "<end>"]

UNKNOWN = {
    "repeats": LOOP + "{{ m.content + m.content }}{% endfor %}",
    "leaves out": LOOP + "{% if not loop.last %}{{ m.content }}{% endif %}{% endfor %}",
    "changes": LOOP + "{{ m.content | upper }}{% endfor %}",
    "counts": "{{ messages | map(attribute='content') | join | length }}"
    + LOOP
    # What stands before an answer follows its length.
    + "{{ m.content }}{% endfor %}",
}
"""Templates of which it is not known where they put an answer."""
